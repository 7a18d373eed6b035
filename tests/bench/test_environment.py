from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import transformers

import ridgefill
from ridgefill.bench.environment import environment, machine_key

CPU = torch.device("cpu")


def test_versions_machine_and_date():
    found = environment(CPU)
    json.dumps(found, allow_nan=False)
    assert found["ridgefill"] == ridgefill.__version__
    assert found["torch"] == torch.__version__ and found["transformers"] == transformers.__version__
    assert found["python"].split(".")[:2] == [str(v) for v in sys.version_info[:2]]
    assert found["threads"] == torch.get_num_threads()
    date = datetime.fromisoformat(found["date"])
    assert date.tzinfo is not None and abs((datetime.now(UTC) - date).total_seconds()) < 60
    assert found["device"] and "\n" not in found["device"]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/opt/bin/ridgefill", "fit", "/home/me/m.gguf", "--texts", "a/b"], "ridgefill fit m.gguf --texts a/b"),
        (["ridgefill", "check", "--json=/home/me/c.json"], "ridgefill check --json=c.json"),
        (["ridgefill", "cost", "--versus", "split=16,tail=4096"], "ridgefill cost --versus split=16,tail=4096"),
        (["ridgefill", "run", "--question", "who signed it?"], "ridgefill run --question 'who signed it?'"),
    ],
)  # fmt: skip
def test_the_command_names_no_folder_of_the_machine(monkeypatch, argv, shown):
    monkeypatch.setattr(sys, "argv", argv)
    assert environment(CPU)["command"] == shown


def test_the_machine_key_says_how_many_threads_a_cpu_uses():
    threads = torch.get_num_threads()
    before = machine_key(CPU)
    try:
        torch.set_num_threads(threads + 1)
        assert (
            machine_key(CPU) == before.replace(f", {threads} threads", f", {threads + 1} threads") != before
        )
    finally:
        torch.set_num_threads(threads)
    assert machine_key(CPU) == before


def test_a_system_without_proc_still_has_a_name(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert environment(CPU)["device"]
    assert machine_key(CPU).endswith("threads")
