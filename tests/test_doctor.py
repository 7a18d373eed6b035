from __future__ import annotations

import importlib.metadata
import io

import pytest
import torch
import transformers
from rich.console import Console

from ridgefill import doctor, embedded
from ridgefill.doctor import Finding, examine, report, self_check
from ridgefill.models.decoder import Decoder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def by_name(findings):
    return {f.what: f for f in findings}


def test_this_machine_is_fit(cache):
    found = by_name(examine())
    assert {"Python", "torch", "transformers", "accelerate", "safetensors", "gguf", "datasets"} <= set(found)
    assert not [f for f in found.values() if f.state == "missing"]
    assert found["transformers"].detail.startswith(transformers.__version__)
    assert found["default model"].state == "warn" and "not fetched" in found["default model"].detail
    assert str(cache) in found["cache folder"].detail and not cache.exists()
    assert all((f.state == "ok") == (f.remedy == "") for f in found.values())


def test_a_fetched_model_is_told_from_a_converted_one():
    path = embedded.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert "not converted" in by_name(examine())["default model"].detail


def test_self_check_leaves_the_random_state_alone():
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    assert self_check().state == "ok"
    assert torch.equal(torch.rand(1), wanted)


def test_self_check_finds_a_layer_that_computes_otherwise(monkeypatch):
    stock = Decoder.run_layer
    monkeypatch.setattr(Decoder, "run_layer", lambda self, i, h, rows: stock(self, i, h, rows) * (1 + 1e-6))
    finding = self_check()
    assert finding.state == "missing" and "other logits" in finding.detail


def test_versions_out_of_range(monkeypatch):
    for version, state in (("5.16.1", "missing"), ("5.25.0", "warn"), ("5.17.0", "ok")):
        monkeypatch.setattr(transformers, "__version__", version)
        finding = by_name(examine())["transformers"]
        assert finding.state == state and version in finding.detail


def test_optional_packages_warn_and_needed_ones_are_missing(monkeypatch):
    stock = importlib.metadata.version

    def version(name):
        if name in ("datasets", "gguf"):
            raise importlib.metadata.PackageNotFoundError(name)
        return stock(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name(examine())
    assert (found["datasets"].state, found["gguf"].state) == ("warn", "missing")
    assert found["datasets"].remedy == "pip install 'ridgefill[datasets]'"


def test_a_cache_folder_in_a_file_is_not_writable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "file" / "cache"))
    assert doctor._disk().state == "missing"


def test_report_prints_states_and_remedies_verbatim():
    out = io.StringIO()
    findings = [
        Finding("alpha", "ok", "1.0"),
        Finding("beta", "warn", "not here", "pip install 'ridgefill[datasets]'"),
    ]
    Console(file=out, width=100).print(report(findings))
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["ok", "alpha", "1.0"]
    assert lines[1].split()[:2] == ["warn", "beta"]
    assert "pip install 'ridgefill[datasets]'" in lines[2]
