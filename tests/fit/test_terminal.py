from __future__ import annotations

import pytest
import torch

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.fit.terminal import Terminal, compare_states, recurrent_layers
from ridgefill.fit.windows import Window
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from tests.tiny import HYBRIDS, tiny_model

LEADING, EVERY = 5, 40


def window(n, seed):
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Window(ids, 0, f"document {seed}", str(seed), False)


def random_maps(split, seed=0):
    g = torch.Generator().manual_seed(seed)
    maps = {
        i: AffineMap(torch.eye(64) + 0.05 * torch.randn(64, 64, generator=g), torch.randn(64, generator=g))
        for i in range(split + 1, 6)
    }
    return RidgeMaps(split, maps)


def stock_state(model, ids, layer, x=None):
    """The recurrent state of one layer after ids [m] in the stock model; with its input replaced by x [m, d]."""
    hook = None
    if x is not None:

        def replace(_, args, kwargs):
            return ((x[None], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x[None]})

        hook = model.model.layers[layer].register_forward_pre_hook(replace, with_kwargs=True)
    cache = new_cache(model)
    model(ids.long()[None], **cache_kwarg(cache))
    if hook is not None:
        hook.remove()
    return cache.layers[layer].recurrent_states[0][0]


def slow_differences(model, windows, maps, positions):
    """layer -> exact - filled states at the first positions[k] tokens of window k, each from a run of its own."""
    found = {}
    for each, ends in zip(windows, positions, strict=True):
        for end in ends:
            ids = each.ids[:end]
            hidden = model(ids.long()[None], output_hidden_states=True).hidden_states
            for layer in (
                i for i in range(maps.split, 6) if model.config.layer_types[i] == "linear_attention"
            ):
                x = maps.predict(layer, hidden[maps.split][0])
                x = torch.cat([hidden[layer][0, :LEADING], x[LEADING:]])
                difference = stock_state(model, ids, layer) - stock_state(model, ids, layer, x)
                found.setdefault(layer, []).append(difference)
    return found


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_offsets_are_the_mean_over_slow_references(family):
    model = tiny_model(family)
    windows = [window(100, 1), window(81, 2), window(30, 3)]  # two stretches, two, and quarters of 7 tokens
    positions = [(40, 80), (40, 80), (7, 14, 21, 28)]
    maps = {1: random_maps(1), 2: random_maps(2, seed=9)}
    found = compare_states(Decoder(model), windows, maps, leading=LEADING, every=EVERY)
    for split, terminal in found.items():
        expected = slow_differences(model, windows, maps[split], positions)
        offsets = terminal.offsets()
        assert list(offsets) == sorted(expected) and terminal.states == 8
        for layer, differences in expected.items():
            assert offsets[layer].dtype == torch.float32 and offsets[layer].shape == (4, 8, 12)
            stacked = torch.stack(differences)
            torch.testing.assert_close(offsets[layer], stacked.mean(0), rtol=1e-3, atol=2e-5)
            if layer > split:
                assert stacked.mean(0).norm() > 0.01  # there is something to compare


@torch.no_grad()
def test_true_inputs_leave_no_difference():
    model = tiny_model("qwen3_next")
    windows = [window(100, 1)]
    found = compare_states(Decoder(model), windows, {1: random_maps(1)}, leading=100, every=EVERY)[1]
    assert all(not delta.any() for delta in found.offsets().values())
    assert {found.error(layer) for layer in found.sums} == {0.0}
    found = compare_states(Decoder(model), windows, {1: random_maps(1)}, leading=60, every=EVERY)[1]
    assert found.error(4) > 0  # its first stretch was exact, its second only in part
    assert found.error(1) == 0  # the split layer's input is the split state


@torch.no_grad()
def test_models_without_recurrent_layers_and_late_parts_without_one():
    assert (
        compare_states(Decoder(tiny_model()), [window(50, 1)], {1: random_maps(1)}, leading=4, every=9) == {}
    )
    decoder = Decoder(tiny_model("qwen3_next"))
    assert recurrent_layers(decoder, 1) == [1, 3, 4] and recurrent_layers(decoder, 5) == []
    maps = {4: random_maps(4), 5: RidgeMaps(5, {})}
    assert list(compare_states(decoder, [window(50, 1)], maps, leading=4, every=9)) == [4]


def gathered(differences, exact=2.0):
    terminal = Terminal()
    for d in differences:
        terminal.states += 1
        state = torch.full_like(d, exact)
        terminal.add(3, state[None], (state - d)[None])
    return terminal


def test_error_is_relative_to_the_exact_state():
    terminal = gathered([torch.full((1, 2, 2), 0.5), torch.full((1, 2, 2), -0.5)])
    assert terminal.error(3) == pytest.approx(0.25)
    assert torch.equal(terminal.offsets()[3], torch.zeros(1, 2, 2))


def test_gain_leaves_each_state_out_of_its_own_offset():
    g = torch.Generator().manual_seed(0)
    differences = [1 + 0.5 * torch.randn(2, 3, 4, generator=g) for _ in range(5)]
    left = sum(
        float((d - torch.stack([o for o in differences if o is not d]).mean(0)).square().sum())
        for d in differences
    )
    expected = 1 - left / sum(float(d.square().sum()) for d in differences)
    assert gathered(differences).gain(3) == pytest.approx(expected, abs=1e-5)
    assert 0.6 < expected < 0.9
    noise = [torch.randn(2, 3, 4, generator=g) for _ in range(3)]
    assert gathered(noise).gain(3) < 0.1  # nothing in common
    assert gathered(noise[:1]).gain(3) is None
