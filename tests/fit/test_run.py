from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ridgefill.errors import CorpusError, OutputError, SettingError, UnsupportedModelError
from ridgefill.fit import fit
from ridgefill.fit.job import count_tokens
from ridgefill.fit.memory import estimate_memory, show_bytes
from ridgefill.fit.windows import Window
from ridgefill.maps import RidgeMaps
from tests.tiny import tiny_model, tiny_tokenizer

SMALL = {"tokens": 6000, "length": 256, "progress": False, "form": "plain"}  # the paper's; others: test_forms


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "the", "of", "and", "42", "x = y\n", "déjà"]
    for i in range(20):
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(words, k=300)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def done(texts, tmp_path_factory):
    """A finished fit: (folder, maps)."""
    out = tmp_path_factory.mktemp("out")
    return out, fit(tiny_model(), tiny_tokenizer(), [texts], [2, 0.5, 3, 5], out, **SMALL)


def test_every_split_is_saved_and_loads(done):
    out, maps = done
    assert sorted(maps) == [2, 3, 5]  # 0.5 of 6 layers is layer 3 again
    assert sorted(p.name for p in out.iterdir()) == ["split-02", "split-03", "split-05"]
    for split, each in maps.items():
        assert sorted(each.maps) == list(range(split + 1, 6))
        loaded = RidgeMaps.load(out / f"split-{split:02d}")
        assert loaded.split == split
        loaded.check_model(tiny_model(), tiny_tokenizer())
        for layer, one in each.maps.items():
            assert torch.equal(loaded.maps[layer].weight, one.weight)
            assert torch.equal(loaded.maps[layer].bias, one.bias)


def test_maps_predict_better_than_identity_on_new_text(done):
    maps = done[1]
    ids = torch.tensor([tiny_tokenizer()("x = y and beta of alpha 42 déjà gamma the " * 8).input_ids])
    with torch.no_grad():
        h = tiny_model()(ids, output_hidden_states=True).hidden_states
    for layer in (3, 4, 5):
        x, y = h[2][0, 16:], h[layer][0, 16:]
        error = (maps[2].predict(layer, x) - y).square().sum()
        assert error < 0.6 * (x - y).square().sum()


def test_provenance_is_complete_and_public(done, texts):
    p = done[1][2].provenance
    assert set(p["heldout"]) == {"0.0001", "0.0003", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1"}
    assert (
        set(p["heldout"]["0.01"]) == set(p["heldout_identity"]) == set(p["explained_variance"]) == set("345")
    )
    best = max(p["heldout"], key=lambda v: sum(p["heldout"][v].values()))
    assert p["lambda_rel"] == float(best)
    assert p["heldout_mean"] > p["heldout_identity_mean"] + 0.1
    assert p["sources"][0]["name"] == texts.name
    assert p["rows"] == p["sources"][0]["fit"]["tokens"] - 16 * p["sources"][0]["fit"]["windows"]
    assert p["moments_ratio"] == pytest.approx(
        1 + p["seconds"]["moments"] / p["seconds"]["forward"], abs=0.01
    )
    assert p["total_ratio"] >= p["moments_ratio"]
    assert str(texts.parent) not in json.dumps(p)
    json.dumps(p, allow_nan=False)


def test_same_call_same_maps(done, texts, tmp_path):
    again = fit(tiny_model(), tiny_tokenizer(), [texts], [2, 3, 5], tmp_path, **SMALL)
    same_maps(again, done[1])


def same_maps(a, b):
    assert a.keys() == b.keys()
    for split in a:
        assert torch.equal(a[split].tokens.counts, b[split].tokens.counts)
        assert a[split].terminal.keys() == b[split].terminal.keys()
        assert all(torch.equal(t, b[split].terminal[k]) for k, t in a[split].terminal.items())
        assert a[split].provenance.get("heldout") == b[split].provenance.get("heldout")
        for layer, one in a[split].maps.items():
            assert torch.equal(one.weight, b[split].maps[layer].weight)
            assert torch.equal(one.bias, b[split].maps[layer].bias)


def test_maps_carry_the_calibration_text_s_token_counts(done):
    out, maps = done
    table = maps[2].tokens
    source = maps[2].provenance["sources"][0]
    assert len(table.counts) == 320 and table.total == source["fit"]["tokens"]
    (beta,) = tiny_tokenizer().encode("x", add_special_tokens=False)
    (rare,) = tiny_tokenizer().encode("Z", add_special_tokens=False)
    assert table.counts[beta] > 10 and table.counts[rare] == 0
    assert table.eligible(torch.tensor([rare, beta, 257])).tolist() == [True, True, False]
    for split in (2, 3):
        loaded = RidgeMaps.load(out / f"split-{split:02d}").tokens
        for name, column in table.tensors().items():
            assert torch.equal(loaded.tensors()[name], column)
    assert maps[5].tokens is table  # the last layer needs no maps, but row selectors read the table


def test_count_tokens_counts_every_token_of_every_window():
    windows = [Window(torch.tensor(ids, dtype=torch.int32), 0, "", "", False) for ids in ([1, 1, 3], [3, 0])]
    assert count_tokens(windows, 5).tolist() == [1, 2, 0, 2, 0]


def test_moments_may_rest_elsewhere(done, texts, tmp_path):
    again = fit(tiny_model(), tiny_tokenizer(), [texts], [2, 3, 5], tmp_path, moments_device="cpu", **SMALL)
    same_maps(again, done[1])


KILLED = """
import sys
from ridgefill.fit import fit
from tests.tiny import tiny_model, tiny_tokenizer
fit(tiny_model(), tiny_tokenizer(), [sys.argv[1]], [2, 3, 5], sys.argv[2],
    tokens=6000, length=256, progress=False, form="plain", checkpoint_seconds=0)
"""


@pytest.mark.parametrize("windows", [3, 23])  # among the fit windows, and among the held-out ones
def test_sigkill_and_resume_give_the_same_maps(done, texts, tmp_path, caplog, windows):
    state = tmp_path / ".capture" / "state.json"
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(texts), str(tmp_path)], env=env)
    give_up = time.monotonic() + 120
    while child.poll() is None and time.monotonic() < give_up:
        if state.exists() and json.loads(state.read_text())["position"] >= windows:
            os.kill(child.pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    assert child.wait() == -signal.SIGKILL  # it had not finished
    assert not list(tmp_path.glob("split-*"))
    with caplog.at_level(logging.INFO, "ridgefill.fit"):
        again = fit(tiny_model(), tiny_tokenizer(), [texts], [2, 3, 5], tmp_path, **SMALL)
    assert "Resuming an earlier capture after" in caplog.text
    same_maps(again, done[1])
    assert not (tmp_path / ".capture").exists()


def test_another_model_starts_afresh(texts, tmp_path, caplog):
    class Stop(Exception):
        pass

    settings = {**SMALL, "checkpoint_seconds": 0}
    model = tiny_model(seed=1)
    model.model.layers[4].register_forward_hook(stop_after(12, Stop))
    with pytest.raises(Stop):
        fit(model, tiny_tokenizer(), [texts], [2], tmp_path, **settings)
    assert (tmp_path / ".capture" / "state.json").exists()
    with caplog.at_level(logging.INFO, "ridgefill.fit"):
        maps = fit(tiny_model(), tiny_tokenizer(), [texts], [2], tmp_path, **settings)
    assert "starting afresh" in caplog.text
    assert maps[2].provenance["rows"] > 4000


def stop_after(calls, error):
    left = [calls]

    def hook(*_):
        left[0] -= 1
        if left[0] == 0:
            raise error

    return hook


def test_only_the_last_layer_needs_no_text(tmp_path):
    maps = fit(tiny_model(), tiny_tokenizer(), ["no such file.txt"], [5], tmp_path, **SMALL)
    assert maps[5].maps == {} and maps[5].tokens is None
    assert RidgeMaps.load(tmp_path / "split-05").maps == {}


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_encodings(texts, tmp_path, encoding):
    maps = fit(tiny_model(), tiny_tokenizer(), [texts], [4], tmp_path, encoding=encoding, **SMALL)
    stored = RidgeMaps.load(tmp_path / "split-04").maps[5].weight.float()
    weight = maps[4].maps[5].weight
    assert 0 < (stored - weight).abs().max() < 0.01 * weight.abs().max()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def test_hybrids_get_maps_and_terminal_states(texts, tmp_path, family):
    model = tiny_model(family)
    maps = fit(model, tiny_tokenizer(), [texts], [2, 4], tmp_path, terminal_every=100, **SMALL)
    p = maps[2].provenance
    assert p["heldout_mean"] > p["heldout_identity_mean"]
    assert set(p["heldout_identity"]) == set("345")
    assert list(maps[2].terminal) == [3, 4] and list(maps[4].terminal) == [4]
    held = p["sources"][0]["heldout"]
    windows, states = held["windows"], p["terminal"]["states"]
    assert p["terminal"]["windows"] == windows and 2 * windows - 2 <= states <= 4 * windows
    assert set(p["terminal"]["error"]) == {"3", "4"} and 0 < p["terminal"]["error"]["3"] < 1.5
    assert not maps[4].terminal[4].any()  # the split layer's input is not predicted
    loaded = RidgeMaps.load(tmp_path / "split-02")
    assert all(torch.equal(loaded.terminal[k], t) for k, t in maps[2].terminal.items())
    loaded.check_model(model, tiny_tokenizer())


def test_few_terminal_states_are_warned_of(texts, tmp_path, caplog):
    settings = {**SMALL, "tokens": 2000}
    maps = fit(tiny_model("qwen3_next"), tiny_tokenizer(), [texts], [2], tmp_path, **settings)
    assert "the paper has 62" in caplog.text and maps[2].provenance["terminal"]["states"] < 8


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2", "mixtral", "gpt_oss"])
def test_families(texts, tmp_path, family):
    maps = fit(tiny_model(family), tiny_tokenizer(), [texts], [3], tmp_path, **SMALL)
    p = maps[3].provenance
    assert p["heldout_mean"] > p["heldout_identity_mean"]


def test_bfloat16_model(texts, tmp_path):
    model = tiny_model().to(torch.bfloat16)
    maps = fit(model, tiny_tokenizer(), [texts], [3], tmp_path, **SMALL)
    assert maps[3].maps[4].weight.dtype == torch.float32
    assert maps[3].provenance["heldout_mean"] > 0.8


def test_model_spread_by_a_device_map(done, texts, tmp_path):
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(6)}
    model = dispatch_model(tiny_model(), places, main_device="cpu", offload_dir=tmp_path / "weights")
    assert model.model.layers[4].mlp.up_proj.weight.is_meta
    again = fit(model, tiny_tokenizer(), [texts], [2, 3, 5], tmp_path / "out", **SMALL)
    same_maps(again, done[1])


def test_training_mode_is_put_back(texts, tmp_path):
    model = tiny_model().train()
    fit(model, tiny_tokenizer(), [texts], [4], tmp_path, **SMALL)
    assert model.training


def test_grid_end_is_warned_of(texts, tmp_path, caplog):
    maps = fit(
        tiny_model(), tiny_tokenizer(), [texts], [2], tmp_path, lambda_grid=(30.0, 100.0, 300.0), **SMALL
    )
    assert "end of the grid" in caplog.text
    assert any("end of the grid" in w for w in maps[2].provenance["warnings"])


def test_few_rows_are_warned_of(texts, tmp_path, caplog):
    fit(tiny_model(), tiny_tokenizer(), [texts], [4], tmp_path, **{**SMALL, "tokens": 700})
    assert "make better maps" in caplog.text


@pytest.mark.parametrize(
    "setting",
    [
        {"splits": []},
        {"splits": [0]},
        {"splits": [6]},
        {"splits": [0.01]},
        {"splits": [float("nan")]},
        {"splits": [True]},
        {"tokens": 10},
        {"length": 79},
        {"holdout": 0.0},
        {"holdout": 0.6},
        {"lambda_grid": ()},
        {"lambda_grid": (0.1, -1.0)},
        {"leading": -1},
        {"chat_share": 1.5},
        {"encoding": "fp4"},
        {"terminal_every": 0},
    ],
)
def test_settings_out_of_range(texts, tmp_path, setting):
    given = {"splits": [2], **SMALL, **setting}
    with pytest.raises(SettingError):
        fit(tiny_model(), tiny_tokenizer(), [texts], given.pop("splits"), tmp_path / "o", **given)
    assert not (tmp_path / "o").exists()


def test_refusals_leave_nothing(texts, tmp_path):
    out = tmp_path / "new" / "o"
    with pytest.raises(CorpusError):
        fit(tiny_model(), tiny_tokenizer(), [tmp_path / "missing.txt"], [2], out, **SMALL)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(CorpusError, match="128 are the least"):
        fit(tiny_model(), tiny_tokenizer(), [tmp_path / "short.txt"], [2], out, **SMALL)
    bad = tiny_model()
    bad.model.layers[1].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(CorpusError, match="layer 2"):
        fit(bad, tiny_tokenizer(), [texts], [2], out, **SMALL)
    assert not (tmp_path / "new").exists()


def test_unusable_output_folder(texts, tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "o"):
        with pytest.raises(OutputError):
            fit(tiny_model(), tiny_tokenizer(), [texts], [2], out, **SMALL)
    (tmp_path / "o" / "split-02").mkdir(parents=True)
    (tmp_path / "o" / "split-02" / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="no maps folder"):
        fit(tiny_model(), tiny_tokenizer(), [texts], [2], tmp_path / "o", **SMALL)


def test_unsupported_model_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=320))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        fit(model, tiny_tokenizer(), ["x"], [1], "unused", **SMALL)


def test_windows_never_exceed_the_context(texts, tmp_path, caplog):
    model = tiny_model(max_position_embeddings=128)
    with caplog.at_level(logging.INFO, "ridgefill.fit"):
        maps = fit(model, tiny_tokenizer(), [texts], [4], tmp_path, **SMALL)
    assert "128 tokens, which is the model's context" in caplog.text
    assert maps[4].provenance["settings"]["length"] == 128


def test_memory_is_stated(texts, tmp_path, capfd):
    fit(tiny_model(), tiny_tokenizer(), [texts], [2], tmp_path, **{**SMALL, "progress": True})
    said = capfd.readouterr()
    assert "Memory at most" in said.err and "times the forward passes" in said.err
    assert said.out == ""


def test_estimate_scales_as_it_should():
    model = tiny_model()
    one, two = (estimate_memory(model, s, length=256) for s in ([2], [2, 3]))
    assert one.model == model.get_memory_footprint()
    assert one.moments == 8 * (4 * 64 * 64 + 2 * 64 * 4)
    assert two.moments == 8 * (7 * 64 * 64 + 2 * 64 * 4)
    assert estimate_memory(model, [5], length=256).moments == 0
    assert [show_bytes(n) for n in (5, 1500, 98_400_000, 2 * 10**15)] == [
        "5 B",
        "1.5 kB",
        "98.4 MB",
        "2000 TB",
    ]


def test_the_package_exports_the_function():
    import ridgefill
    import ridgefill.fit.run  # binds the subpackage `fit`, which the function must survive

    assert ridgefill.fit is fit
