from __future__ import annotations

import pytest
import torch

from ridgefill.compat import new_cache
from ridgefill.fit.moments import Moments
from ridgefill.fit.penalty import Heldout, choose_penalty, cosine, explained_variance, write
from ridgefill.fit.solve import Spectrum, ridge
from ridgefill.models.decoder import Decoder
from tests.tiny import HYBRIDS, tiny_model

GRID = (1e-3, 0.03, 1.0)
SPLIT = 3


@pytest.fixture(scope="module")
def scene():
    decoder = Decoder(tiny_model("qwen3"))
    moments = Moments((SPLIT,), 6, dict.fromkeys(range(6), torch.device("cpu")))
    g = torch.Generator().manual_seed(0)
    shapes = {layer: torch.randn(64, 64, generator=g) / 8 for layer in range(4, 6)}

    def draw(m):
        x = torch.randn(m, 64, generator=g)
        return {SPLIT: x} | {k: x @ a.T + 0.5 * torch.randn(m, 64, generator=g) for k, a in shapes.items()}

    fit = draw(150)
    for layer in moments.layers:
        moments.add(layer, fit[layer])
    sample = draw(90)
    spectrum = Spectrum.of(moments.centred(SPLIT, SPLIT).cross)
    with torch.no_grad():
        heldout = choose_penalty(decoder, moments, spectrum, SPLIT, sample, GRID)
    return decoder, moments, spectrum, sample, heldout


@torch.no_grad()
def test_scores_are_those_of_the_maps(scene):
    decoder, moments, spectrum, sample, heldout = scene
    for value in GRID:
        for layer in (4, 5):
            weight, bias = ridge(spectrum, moments.centred(SPLIT, layer), value)
            predicted = sample[SPLIT] @ weight.T.float() + bias.float()
            cosines = []
            for true, other in zip(
                decoder.project(layer, sample[layer][None]),
                decoder.project(layer, predicted[None]),
                strict=True,
            ):
                for row in range(len(predicted)):  # one row at a time, heads side by side
                    a, b = true[0, :, row].flatten(), other[0, :, row].flatten()
                    cosines.append(float(a @ b / (a.norm() * b.norm())))
            assert heldout.ridge[value][layer] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
            y = sample[layer]
            explained = 1 - (y - predicted).square().sum() / (y - y.mean(0)).square().sum()
            assert heldout.explained[value][layer] == pytest.approx(float(explained), abs=1e-5)


def test_best_is_the_largest_mean(scene):
    heldout = scene[-1]
    assert heldout.best == max(GRID, key=heldout.mean)
    assert heldout.best == 0.03  # 150 noisy rows for 64 columns: neither end
    assert not heldout.at_end
    assert heldout.mean(heldout.best) > sum(heldout.identity.values()) / 2 + 0.2


@torch.no_grad()
def test_identity_score_is_of_the_split_state(scene):
    decoder, _, _, sample, heldout = scene
    written = [decoder.project(4, sample[layer][None]) for layer in (4, SPLIT)]
    pair = [tuple(t[0].transpose(0, 1).flatten(1) for t in w) for w in written]
    assert heldout.identity[4] == pytest.approx(cosine(*pair), abs=1e-6)


@torch.no_grad()
def test_wide_states_are_scored_by_their_maps(scene):
    decoder, _, _, sample, _ = scene
    g = torch.Generator().manual_seed(5)
    mix = torch.randn(64, 160, generator=g) / 8
    moments = Moments((SPLIT,), 6, dict.fromkeys(range(6), torch.device("cpu")), reads={SPLIT: ((SPLIT, 0),)})
    fit = {k: torch.randn(300, 64, generator=g) for k in range(SPLIT, 6)}
    for layer in moments.layers:
        moments.add(layer, fit[layer], {(SPLIT, 0): fit[5] @ mix})
    spectrum, state = Spectrum.of(moments.gram(SPLIT)), sample[5] @ mix
    apart = NarrowIdentity(decoder.model)
    heldout = choose_penalty(apart, moments, spectrum, SPLIT, sample, GRID, state=state)
    weight, bias = ridge(spectrum, moments.centred(SPLIT, 5), GRID[0])
    predicted = state @ weight.T.float() + bias.float()
    expected = cosine(write(decoder, 5, sample[5]), write(decoder, 5, predicted))
    assert heldout.ridge[GRID[0]][5] == pytest.approx(expected, abs=1e-5)
    assert heldout.ridge[GRID[0]][5] > heldout.ridge[GRID[0]][4] + 0.2  # only layer 5 depends on the state
    same = cosine(write(decoder, 4, sample[4]), write(decoder, 4, state[:, :64]))
    assert heldout.identity[4] == pytest.approx(same, abs=1e-6)


class NarrowIdentity(Decoder):
    """A decoder whose layers read the first 64 columns of a wider state."""

    def layer_input(self, i, h, rows=None, cache=None):
        return h[..., :64]


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_a_recurrent_layer_is_scored_by_what_enters_its_convolution(family):
    model = tiny_model(family)
    decoder, x = Decoder(model), torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    layer = next(i for i in range(6) if decoder.recurrent(i))
    written = write(decoder, layer, x)
    assert [t.shape for t in written] == [(7, 16), (7, 48)]
    cache = new_cache(model)
    decoder.run_layer(layer, x[None], decoder.rows(x[None], torch.arange(7)[None], None, cache), cache)
    kept = cache.layers[layer].conv_states[0][0, 16:, -3:]
    assert torch.equal(torch.cat(written, dim=1)[-3:].T, kept)


def test_cosine_averages_keys_and_values():
    ones, e1 = torch.ones(3, 4), torch.eye(4)[:1].expand(3, 4)
    assert cosine((ones, ones), (2 * ones, -ones)) == pytest.approx(0.0)
    assert cosine((ones, ones), (e1, ones)) == pytest.approx(0.75)


def test_explained_variance():
    y = torch.randn(50, 4)
    assert explained_variance(y, y) == 1.0
    assert explained_variance(y, y.mean(0).expand_as(y)) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(y, -y) < -1


def test_grid_end_is_noticed():
    scores = {v: {1: v} for v in GRID}
    assert Heldout(scores, {1: 0.0}, scores, 1.0).at_end
    assert Heldout(scores, {1: 0.0}, scores, 1e-3).at_end
    assert not Heldout({0.1: {1: 0.5}}, {1: 0.0}, {}, 0.1).at_end
