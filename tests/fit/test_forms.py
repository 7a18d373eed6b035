"""Forms of maps end to end: keys and values given directly, several states read, reduced, saved, filled."""

from __future__ import annotations

import json

import pytest
import torch

from ridgefill.compat import new_cache
from ridgefill.errors import CorpusError, SettingError, UnsupportedModelError
from ridgefill.fit import fit
from ridgefill.fit.forms import FORMS, Form, form_of
from ridgefill.fit.job import Job
from ridgefill.fit.moments import Moments
from ridgefill.fit.report import Report
from ridgefill.fit.settings import Settings
from ridgefill.fit.solve import Spectrum, in_basis
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.prefill import prefill
from ridgefill.reading import Reading
from tests.models.test_qwen4 import HAS, tiny_qwen4
from tests.tiny import FAMILIES, HYBRIDS, tiny_model, tiny_tokenizer

SPLIT, TAIL, N = 2, 8, 44
SETTINGS = Settings(4000, 4096, 0.1, (0.1,), 16, 0.0, 0)


def prompt(n=N, seed=0):
    return torch.randint(8, 200, (1, n), generator=torch.Generator().manual_seed(seed))


def entering(model, ids):
    """layer -> the state [1, n, d] that enters it."""
    decoder = Decoder(model)
    h, cache, found = decoder.embed(ids), new_cache(model), {}
    rows = decoder.rows(h, torch.arange(ids.shape[1])[None], None, cache, ids)
    for i in range(decoder.n_layers):
        found[i] = h
        h = decoder.run_layer(i, h, rows, cache)
    return found, rows


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join(f"word{(i * 7 + j) % 50}" for j in range(300)))
    return [folder]


def fitted(model, texts, out, form, **kwargs):
    settings = {"tokens": 2000, "length": 256, "progress": False} | kwargs
    return fit(model, tiny_tokenizer(), texts, [SPLIT], out, form=form, **settings)[SPLIT]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_direct_maps_are_fitted_to_is_what_the_layer_writes(family):
    model = tiny_model(family, seed=1).eval()
    states, rows = entering(model, prompt())
    decoder, seen = Decoder(model), 0
    for i, x in states.items():
        if decoder.recurrent(i):
            assert torch.equal(decoder.target(i, x, "writes"), x)
            continue
        target = decoder.target(i, x, "writes")
        assert target.shape[-1] == decoder.map_width(i, "writes")
        for wanted, found in zip(decoder.writes(i, x, rows), decoder.finish(i, target, rows), strict=True):
            assert torch.allclose(wanted, found, atol=2e-5), (i, (wanted - found).abs().max())
        seen += 1
    assert seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_5_text"])
@torch.no_grad()
def test_maps_that_know_a_prompt_by_heart_fill_it_exactly(family):
    """More columns than rows: the least-squares map gives back every row, so the cache must be the exact one."""
    model = tiny_model(family, seed=2).eval()
    ids = prompt()
    states, _ = entering(model, ids)
    decoder, m = Decoder(model), N - TAIL
    reading = Reading((0, 1, SPLIT), (SPLIT,), True, "writes")
    read = reading.of(states)[0, :m]
    maps = {}
    for i in range(SPLIT + 1, decoder.n_layers):
        y = decoder.target(i, states[i], "writes")[0, :m]
        weight = torch.linalg.lstsq(read.double(), y.double(), driver="gelsd").solution.T.float()
        maps[i] = AffineMap(weight, torch.zeros(len(weight)))
    filled = prefill(
        model, ids, RidgeMaps(SPLIT, maps, ModelIdentity.of(model), reading=reading), tail=TAIL, leading=2
    )
    exact = prefill(model, ids, fill="exact", split=SPLIT, tail=TAIL)
    for a, b in zip(filled.layers, exact.layers, strict=True):
        if hasattr(a, "recurrent_states"):
            assert torch.allclose(a.recurrent_states[0], b.recurrent_states[0], atol=1e-3)
        else:
            assert torch.allclose(a.keys, b.keys, atol=1e-3) and torch.allclose(a.values, b.values, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@torch.no_grad()
def test_the_cache_holds_what_the_maps_give(family, texts, tmp_path):
    model = tiny_model(family, seed=3).eval()
    maps = fitted(model, texts, tmp_path / "maps", "rich")
    again = RidgeMaps.load(tmp_path / "maps")
    assert again.reading == maps.reading == Reading((0, 1, 2), (2,), True, "writes")
    assert torch.equal(again.down, maps.down) and again.down.shape == (64, 4 * 64)
    ids = prompt(seed=4)
    for given in (maps, again):
        cache = prefill(model, ids, given, tail=TAIL, leading=3)
        states, rows = entering(model, ids[:, :-TAIL])
        decoder, read = Decoder(model), given.read(states)
        for i in range(SPLIT + 1, decoder.n_layers):
            if not decoder.recurrent(i):
                keys, values = decoder.finish(i, given.predict(i, read), rows)
                held = cache.layers[i].keys.shape[-2]  # a window forgets
                first = max(3, N - TAIL - held)
                assert torch.allclose(
                    cache.layers[i].keys[..., -(N - TAIL - first) :, :], keys[..., first:, :], atol=1e-5
                )
                assert torch.allclose(
                    cache.layers[i].values[..., -(N - TAIL - first) :, :], values[..., first:, :], atol=1e-5
                )


@torch.no_grad()
def test_exact_rows_and_corrections_work_with_every_form(texts, tmp_path):
    model = tiny_model("llama", seed=3).eval()
    ids = prompt(60, seed=5)
    for name in FORMS:
        maps = fitted(model, texts, tmp_path / name, name)
        full = prefill(model, ids, maps, tail=TAIL, leading=3, rows="random(1.0)")
        exact = prefill(model, ids, fill="exact", split=SPLIT, tail=TAIL)
        for a, b in zip(full.layers, exact.layers, strict=True):
            assert torch.allclose(a.keys, b.keys, atol=1e-4), name  # every row selected: exact
        plain = prefill(model, ids, maps, tail=TAIL, leading=3)
        scaled = prefill(model, ids, maps, tail=TAIL, leading=3, corrections="value_rescale(4)")
        late, m = SPLIT + 1, 60 - TAIL
        ratio = scaled.layers[late].values[..., 5:m, :] / plain.layers[late].values[..., 5:m, :]
        assert torch.allclose(ratio, ratio[..., :1, :1].expand_as(ratio), rtol=1e-3), name
        assert not torch.allclose(ratio[..., 0, 0], torch.ones(ratio.shape[:2])), name


def test_richer_maps_predict_better_and_say_so(texts, tmp_path):
    model = tiny_model("llama", seed=6).eval()
    share = {}
    for name in ("direct", "rich"):
        maps = fitted(model, texts, tmp_path / name, name)
        explained = maps.provenance["explained_variance"]
        share[name] = sum(explained.values()) / len(explained)
        assert maps.provenance["heldout_mean"] > maps.provenance["heldout_identity_mean"]
    assert share["rich"] > share["direct"]


def test_bf16_and_int8_keep_the_form(texts, tmp_path):
    model = tiny_model("llama", seed=3).eval()
    maps = fitted(model, texts, tmp_path / "maps", "rich")
    for encoding, close in (("bf16", 1e-2), ("int8", 2e-2)):
        maps.save(tmp_path / encoding, encoding)
        again = RidgeMaps.load(tmp_path / encoding)
        assert again.reading == maps.reading and again.encoding == encoding
        assert torch.allclose(again.down.float(), maps.down, atol=close * maps.down.abs().max())
        again.check_model(model)
    assert len({RidgeMaps.load(tmp_path / e).content_hash for e in ("maps", "bf16", "int8")}) == 3


def test_a_wrong_width_is_refused_by_name():
    model = tiny_model("llama", seed=3)
    reading = Reading((0, SPLIT), (), True, "writes")
    widths = {"none": (64, 64), "reduced": (64, 128)}
    late = range(SPLIT + 1, Decoder(model).n_layers)
    for down, (rows, columns) in zip((None, torch.zeros(64, 128)), widths.values(), strict=True):
        maps = {i: AffineMap(torch.zeros(rows, columns), torch.zeros(rows)) for i in late}
        with pytest.raises(Exception, match="of which it reads 2"):
            RidgeMaps(SPLIT, maps, reading=reading, down=down).check_model(model)


def test_forms_by_default_and_by_name():
    decoder = Decoder(tiny_model("llama"))
    assert form_of(None, None, decoder) is FORMS["rich"] and form_of(None, "27b", decoder) is FORMS["plain"]
    assert form_of("direct", "27b", decoder) is FORMS["direct"]
    with pytest.raises(SettingError, match="plain, direct, rich"):
        form_of("richest", None, decoder)
    assert FORMS["rich"].reading(15) == Reading((0, 5, 10, 15), (15,), True, "writes")
    assert FORMS["rich"].columns(15, 576) == 576 and FORMS["direct"].columns(15, 576) is None
    assert Form("", rank=1.0).columns(15, 576) is None  # one state: nothing to reduce


def test_streams_get_plain_maps():
    if not HAS:
        pytest.skip("this transformers has no qwen4_exp")
    decoder = Decoder(tiny_qwen4())
    assert form_of(None, None, decoder) is FORMS["plain"]
    with pytest.raises(UnsupportedModelError, match="form='plain'"):
        form_of("rich", None, decoder)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_fit_and_fill_with_rich_maps(family, texts, tmp_path):
    model = tiny_model(family, seed=3).eval()
    maps = fitted(model, texts, tmp_path / "maps", "rich")
    decoder = Decoder(model)
    for i, m in maps.maps.items():
        assert m.weight.shape[0] == decoder.map_width(i, "writes")
    assert maps.terminal.keys() == {i for i in range(SPLIT, decoder.n_layers) if decoder.recurrent(i)}
    cache = prefill(model, prompt(), maps, tail=TAIL, leading=2, corrections="terminal_state")
    assert cache.stats.filled == N - TAIL - 2


def test_a_killed_fit_goes_on_to_the_same_maps(texts, tmp_path):
    class Stop(Exception):
        pass

    left = [6]

    def stop(*_):
        left[0] -= 1
        if left[0] == 0:
            raise Stop

    model = tiny_model("llama", seed=3).eval()
    handle = model.model.layers[4].register_forward_hook(stop)
    with pytest.raises(Stop):
        fitted(model, texts, tmp_path / "maps", "rich", checkpoint_seconds=0)
    handle.remove()
    kept = json.loads((tmp_path / "maps" / ".capture" / "state.json").read_text())
    assert kept["position"] == 5
    again = fitted(model, texts, tmp_path / "maps", "rich")
    whole = fitted(model, texts, tmp_path / "other", "rich")
    for i, m in whole.maps.items():
        assert torch.equal(again.maps[i].weight, m.weight) and torch.equal(again.maps[i].bias, m.bias)
    assert torch.equal(again.down, whole.down)
    fitted(model, texts, tmp_path / "maps", "direct")  # another form does not go on from it
    assert RidgeMaps.load(tmp_path / "maps").down is None


def test_too_little_text_names_the_simpler_forms(tmp_path):
    (tmp_path / "short.txt").write_text("word " * 300)
    with pytest.raises(CorpusError, match="fit maps that read one state"):
        fitted(tiny_model("llama"), [tmp_path / "short.txt"], tmp_path / "maps", "rich", tokens=560)


@torch.no_grad()
def test_reduced_maps_give_the_mean_row_the_mean(tmp_path):
    """States whose mean is large: an intercept of the map before its reduction would leave a part of it out."""
    decoder, form, g = Decoder(tiny_model()), FORMS["rich"], torch.Generator().manual_seed(9)
    job = Job(decoder, ModelIdentity.of(decoder.model), SETTINGS, tmp_path, Report(False), None, form=form)
    moments = Moments([SPLIT], decoder.n_layers, job.devices([SPLIT]), reads=job.reads([SPLIT]))
    states = {source: 30 + torch.randn(500, 64, generator=g) for source in form.reading(SPLIT).sources}
    for layer in moments.layers:
        moments.add(layer, torch.randn(500, decoder.map_width(layer, "writes"), generator=g) - 2, states)
    spectrum, late = Spectrum.of(moments.gram(SPLIT)), range(SPLIT + 1, decoder.n_layers)
    bases = {i: in_basis(spectrum, moments.centred(SPLIT, i)) for i in late}
    down, maps = job.reduced(spectrum, moments, SPLIT, 0.01, 8, bases)
    for i, (weight, bias) in maps.items():
        centred = moments.centred(SPLIT, i)
        torch.testing.assert_close(weight @ (down @ centred.x_mean) + bias, centred.y_mean)
