"""What llama.cpp cannot do is refused by name, before any weights are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgefill.engines.llamacpp.settings import (
    cache_type,
    model_file,
    numbered_types,
    refuse_plan,
    refuse_settings,
)
from ridgefill.errors import SettingError
from ridgefill.plan import make_plan

from ...command import call
from . import INSTALLED

Q8_0, Q4_0, F16 = 8, 2, 1


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"embedding": True}, "no cache to fill"),
        ({"lora_path": "x.gguf"}, "without the adapter"),
        ({"rope_freq_base": 10.0}, "from the file"),
        ({"rope_scaling_type": 2}, "from the file"),
        ({"kv_overrides": {"a": 1}}, "metadata"),
        ({"type_k": Q4_0}, "never written and compared"),
        ({"type_v": Q8_0}, "transposed"),
    ],
)
def test_settings_that_the_fill_would_not_know_of_are_refused(asked, why):
    with pytest.raises(SettingError, match=why):
        refuse_settings(asked)


@pytest.mark.parametrize(
    "asked", [{}, {"type_k": Q8_0}, {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True}]
)
def test_settings_that_it_honours_are_not(asked):
    refuse_settings(asked)


def test_cache_types_go_by_name_too():
    assert numbered_types({"type_k": "q8_0", "type_v": "F16", "n_ctx": 1}) == {
        "type_k": Q8_0,
        "type_v": F16,
        "n_ctx": 1,
    }
    assert cache_type("type_k", None) == "F16"
    with pytest.raises(SettingError, match="no such type"):
        numbered_types({"type_k": "q99"})


PLAIN = SimpleNamespace(window=None, softcap=0.0, path=Path("m.gguf"))


@pytest.mark.parametrize(
    ("plan", "model", "why"),
    [
        ({"fill": "none"}, {}, "only ridge, identity and exact"),
        ({"fill": "identity", "rows": "attention(0.1)"}, {"window": 512}, "sliding window keep no rows"),
        ({"fill": "identity", "rows": "attention(0.1)"}, {"softcap": 50.0}, "logits are capped"),
        ({"fill": "identity", "rows": "probe(0.1)"}, {}, "late attention is not read"),
        ({"fill": "identity", "corrections": "value_rescale(64)"}, {}, "not built there"),
    ],
)
def test_plans_that_llama_cpp_cannot_run_are_refused(plan, model, why):
    with pytest.raises(SettingError, match=why):
        refuse_plan(make_plan(8, split=4, **plan), SimpleNamespace(**vars(PLAIN) | model))


def test_only_gguf_files_run_there(tmp_path):
    with pytest.raises(SettingError, match="GGUF files alone"):
        model_file("org/name")
    assert model_file(tmp_path / "x.gguf").name == "x.gguf"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "other"], "no such engine"),
        (["--engine-args", "{}"], "takes none"),
        (["--engine", "llamacpp", "--dtype", "float16"], "settings of its own"),
        (["--engine", "llamacpp", "--stream-maps"], "the maps are already"),
    ],
)
def test_the_command_line_refuses_in_one_line(options, words, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a prompt")
    assert call("run", "x.gguf", "--prompt-file", tmp_path / "p.txt", *options) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said


@pytest.mark.skipif(INSTALLED, reason="llama-cpp-python is installed")
def test_a_missing_library_is_named():
    from ridgefill.engines.llamacpp.native import llama_cpp
    from ridgefill.errors import EngineMissingError

    with pytest.raises(EngineMissingError, match=r"ridgefill\[llamacpp\]"):
        llama_cpp()
