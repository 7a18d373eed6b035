"""What the operator asks for; none of this needs vLLM."""

import json
import shlex
from types import SimpleNamespace

import pytest

from ridgefill.engines import vllm
from ridgefill.engines.vllm.settings import FAMILIES, EngineSettings, key_of, refuse_engine
from ridgefill.errors import EngineMissingError, RidgeFillError, SettingError, UnsupportedModelError
from ridgefill.fit import fit
from ridgefill.maps import RidgeMaps
from tests.command import call
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    text = folder / "text.txt"
    text.write_text("Maps are fitted on text like this. " * 400)
    fit(tiny_model(), tiny_tokenizer(), [text], [3], folder / "maps", tokens=3000, length=128)
    return folder / "maps" / "split-03"


def test_the_flags_name_everything_that_the_server_needs(maps, capsys):
    assert call("vllm-args", maps, "--tail", "32", "--rows", "random(0.2, seed=3)", "--on-request") == 0
    line = capsys.readouterr().out
    words = line.split()  # as a shell splits $( ): quotes are kept
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert list(flags) == ["--worker-cls", "--scheduler-cls", "--logits-processors", "--additional-config"]
    settings = EngineSettings.of(json.loads(flags["--additional-config"]))
    assert settings.default is False and settings.tail == 32
    plan, loaded, least = settings.plan(6)
    assert (plan.tail, plan.split, str(plan.rows)) == (32, 3, "random(0.2, seed=3)")
    assert least == 32 + 16 + 256 and loaded.content_hash == RidgeMaps.load(maps).content_hash
    assert call("vllm-args", maps, "--json") == 0
    assert json.loads(capsys.readouterr().out)["worker_cls"] == flags["--worker-cls"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs them"),
        (["MAPS", "--rows", "probe(0.1)"], "paged"),
        (["MAPS", "--fill", "none"], "only ridge, identity and exact"),
        (["MAPS", "--tail", "0"], "tail"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before(options, words, maps, capsys):
    assert call("vllm-args", *(maps if o == "MAPS" else o for o in options)) == 2
    assert words in capsys.readouterr().err


def test_a_path_that_a_shell_would_cut_is_refused(maps, tmp_path, capsys):
    (tmp_path / "my maps").symlink_to(maps)
    elsewhere = tmp_path / "my other maps"
    RidgeMaps.load(maps).save(elsewhere)
    assert call("vllm-args", elsewhere) == 2
    assert "blank" in capsys.readouterr().err
    assert call("vllm-args", elsewhere, "--json") == 0
    assert shlex.quote(str(elsewhere)) != str(elsewhere)


@pytest.mark.parametrize(
    "given",
    [{"map": "x"}, [1], {"maps": "x", "tail": "32"}, {"maps": "x", "tail": True}, {"maps": "x", "stream": 1}],
)
def test_a_wrong_setting_is_named(given):
    with pytest.raises(SettingError, match="additional-config"):
        EngineSettings.of({"ridgefill": given})


def test_a_config_that_says_nothing_of_the_fill_has_none():
    assert EngineSettings.of({}) is None and EngineSettings.of(None) is None
    assert EngineSettings.of({"ridgefill": "DIR"}) == EngineSettings(maps="DIR")


def test_cached_blocks_are_told_apart_by_everything_but_the_tail(maps):
    def key(**settings):
        plan, loaded, _ = EngineSettings(maps=str(maps), **settings).plan(6)
        return key_of(plan, loaded)

    assert key(tail=8) == key(tail=16)
    others = [
        key(),
        key(leading=4),
        key(fill="identity"),
        key(rows="random(0.1)"),
        key(corrections="value_rescale(8)"),
    ]
    assert len(set(others)) == len(others)


def engine(**changes):
    """Stands for a VllmConfig that the fill takes, with changes."""
    made = {
        "architecture": "LlamaForCausalLM", "quantization": None, "cache_dtype": "auto", "lora": None, "pipeline": 1,
        "dbo": False, "data": 1, "experts": False, "kv": None, "v2": False, "eager": True, "caching": True,
        "windowed": False,
        "scheduler": "ridgefill.engines.vllm.scheduler.RidgeScheduler", **changes,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"] if made["windowed"] else None
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=made["architecture"], quantization=made["quantization"],
            hf_text_config=SimpleNamespace(layer_types=kinds), get_sliding_window=lambda: None,
            enforce_eager=made["eager"],
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=made["pipeline"], enable_dbo=made["dbo"], data_parallel_size=made["data"],
            enable_expert_parallel=made["experts"],
        ),
        cache_config=SimpleNamespace(cache_dtype=made["cache_dtype"], enable_prefix_caching=made["caching"]),
        lora_config=made["lora"], kv_transfer_config=made["kv"], use_v2_model_runner=made["v2"],
        scheduler_config=SimpleNamespace(scheduler_cls=made["scheduler"]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "PhiForCausalLM"}, "PhiForCausalLM"),
        ({"quantization": "awq"}, "awq"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"lora": object()}, "LoRA"),
        ({"pipeline": 2}, "pipeline"),
        ({"dbo": True}, "dual batch"),
        ({"data": 2}, "data parallelism"),
        ({"experts": True}, "expert parallelism"),
        ({"kv": object()}, "connector"),
        ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"scheduler": None}, "--scheduler-cls"),
    ],
)
def test_what_vllm_was_started_with_is_refused_by_name(changes, words, maps):
    plan, *_ = EngineSettings(maps=str(maps)).plan(6)
    with pytest.raises((SettingError, UnsupportedModelError)) as refusal:
        refuse_engine(engine(**changes), plan)
    assert words in str(refusal.value)
    refuse_engine(engine(), plan)
    refuse_engine(engine(scheduler=None, caching=False), plan)


def test_the_second_runner_needs_a_word_that_says_untested(maps):
    plan, *_ = EngineSettings(maps=str(maps)).plan(6)
    refuse_engine(engine(v2=True), plan, untested_v2=True)
    with pytest.raises(SettingError, match="never run there"):
        refuse_engine(engine(v2=True, eager=False), plan, untested_v2=True)


def test_rows_that_read_the_tail_are_refused_where_windows_forget(maps):
    plan, *_ = EngineSettings(maps=str(maps), rows="attention(0.1)").plan(6)
    refuse_engine(engine(), plan)
    with pytest.raises(SettingError, match="sliding window"):
        refuse_engine(engine(windowed=True), plan)
    static, *_ = EngineSettings(maps=str(maps), rows="protected(0.25)").plan(6)
    refuse_engine(engine(windowed=True), static)


@pytest.mark.parametrize(
    ("found", "fine"), [("0.32.0", True), ("0.32.4+cpu", True), ("0.31.9", False), ("0.33.0", False)]
)
def test_another_version_is_refused_by_name(found, fine, monkeypatch):
    monkeypatch.setattr(vllm, "version", lambda name: found)
    if fine:
        assert vllm.check_version() == found
        return
    with pytest.raises(EngineMissingError) as refusal:
        vllm.check_version()
    assert found in str(refusal.value)


def test_a_missing_vllm_is_named(monkeypatch):
    def nothing(name):
        raise vllm.PackageNotFoundError(name)

    monkeypatch.setattr(vllm, "version", nothing)
    with pytest.raises(RidgeFillError, match="pip install"):
        vllm.check_version()


def test_every_family_is_one_that_the_transformers_engine_fills_too():
    from ridgefill.models.decoder import FAMILIES as OURS

    names = {family.removesuffix("_text").replace("_", "") for family in OURS}
    assert {family.removesuffix("ForCausalLM").replace("_", "").lower() for family in FAMILIES} <= names
