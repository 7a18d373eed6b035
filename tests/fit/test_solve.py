from __future__ import annotations

import pytest
import torch

from ridgefill.fit.moments import Moments, product_elements
from ridgefill.fit.solve import Spectrum, in_basis, intercept, ridge

CPU = torch.device("cpu")
D, L, SPLITS = 12, 6, (1, 3)


def states(seed=0, windows=4, dtype=torch.float32):
    """windows x layers of [m, D]: correlated, far from zero, one dimension a hundred times larger."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.ones(D)
    scale[2] = 100
    out = []
    for n in range(windows):
        h = torch.randn(30 + n, D, generator=g) * scale + 5 * scale
        layers = []
        for _ in range(L):
            h = h + 0.3 * torch.tanh(h @ torch.randn(D, D, generator=g) / 10) * scale
            layers.append(h.to(dtype))
        out.append(layers)
    return out


def moments_of(data, splits=SPLITS):
    moments = Moments(splits, L, dict.fromkeys(range(L), CPU))
    for window in data:
        for layer in moments.layers:
            assert moments.add(layer, window[layer])
    return moments


def stacked(data, layer):
    return torch.cat([w[layer] for w in data]).double()


def direct(x, y, lambda_rel):
    """The normal equations on the states themselves."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    gram = xc.T @ xc
    penalised = gram + lambda_rel * gram.trace() / D * torch.eye(D, dtype=torch.float64)
    weight = torch.linalg.solve(penalised, xc.T @ yc).T
    return weight, y.mean(0) - weight @ x.mean(0)


def fitted(moments, split, layer, lambda_rel):
    spectrum = Spectrum.of(moments.centred(split, split).cross)
    return ridge(spectrum, moments.centred(split, layer), lambda_rel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_equal_stacked_states(dtype):
    data = states(dtype=dtype)
    moments = moments_of(data)
    assert moments.rows == len(stacked(data, 0))
    for split in SPLITS:
        x = stacked(data, split)
        for layer in range(split, L):
            y = stacked(data, layer)
            found = moments.centred(split, layer)
            expected = (y - y.mean(0)).T @ (x - x.mean(0))
            torch.testing.assert_close(found.cross, expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found.y_mean, y.mean(0), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.x_mean, x.mean(0), rtol=1e-12, atol=1e-12)


def test_a_huge_mean_costs_no_digits():
    data = [[h.double() + 1e6 for h in window] for window in states()]
    x, y = stacked(data, 1), stacked(data, 4)
    found = moments_of(data).centred(1, 4).cross
    expected = (y - y.mean(0)).T @ (x - x.mean(0))
    assert (found - expected).norm() / expected.norm() < 1e-12


@pytest.mark.parametrize("lambda_rel", [1e-4, 1e-2, 0.3, 1.0, 30.0])
@pytest.mark.parametrize(("split", "layer"), [(1, 2), (1, 5), (3, 4)])
def test_ridge_equals_direct_solution(split, layer, lambda_rel):
    data = states()
    weight, bias = fitted(moments_of(data), split, layer, lambda_rel)
    expected = direct(stacked(data, split), stacked(data, layer), lambda_rel)
    torch.testing.assert_close(weight, expected[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(bias, expected[1], rtol=1e-8, atol=1e-7)


def test_no_penalty_is_least_squares():
    data = states()
    x, y = stacked(data, 1), stacked(data, 5)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y).solution
    weight, bias = fitted(moments_of(data), 1, 5, 0.0)
    torch.testing.assert_close(weight, solution[:-1].T, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(bias, solution[-1], rtol=1e-6, atol=1e-6)


def test_large_penalty_predicts_the_mean():
    data = states()
    weight, bias = fitted(moments_of(data), 1, 5, 1e12)
    y = stacked(data, 5)
    torch.testing.assert_close(
        stacked(data, 1) @ weight.T + bias, y.mean(0).expand_as(y), rtol=1e-6, atol=1e-6
    )


def test_a_linear_layer_is_recovered():
    g = torch.Generator().manual_seed(3)
    a, b = (
        torch.randn(D, D, generator=g, dtype=torch.float64),
        torch.randn(D, generator=g, dtype=torch.float64),
    )
    data = states(dtype=torch.float64)
    for window in data:
        window[4] = window[1] @ a.T + b
    weight, bias = fitted(moments_of(data), 1, 4, 1e-13)
    torch.testing.assert_close(weight, a, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(bias, b, rtol=1e-4, atol=1e-4)


def test_directions_that_no_state_spans_stay_zero():
    data = states(windows=1)
    for window in data:
        for layer in range(L):
            window[layer][:, 5] = window[layer][:, 4]  # one direction is missing
    weight, bias = fitted(moments_of(data), 1, 2, 0.0)
    x, y = stacked(data, 1), stacked(data, 2)
    residual = y - (x @ weight.T + bias)
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y, driver="gelsd").solution
    least = y - torch.cat([x, torch.ones(len(x), 1)], 1) @ best
    assert torch.isfinite(weight).all()
    assert residual.square().sum() <= least.square().sum() * (1 + 1e-6) + 1e-9
    torch.testing.assert_close(weight[:, 4], weight[:, 5])


def test_eigenbasis_product_is_the_map():
    moments = moments_of(states())
    spectrum = Spectrum.of(moments.centred(1, 1).cross)
    centred = moments.centred(1, 4)
    with_basis = ridge(spectrum, centred, 0.03, in_basis(spectrum, centred))
    torch.testing.assert_close(with_basis, ridge(spectrum, centred, 0.03))


@pytest.mark.parametrize("columns", [None, 3])
def test_the_mean_row_is_given_the_mean_reduced_or_not(columns):
    g = torch.Generator().manual_seed(8)
    centred = moments_of(states()).centred(1, 4)
    down = None if columns is None else torch.randn(columns, D, generator=g, dtype=torch.float64)
    weight = torch.randn(D, columns or D, generator=g, dtype=torch.float64)
    mean = centred.x_mean if down is None else down @ centred.x_mean
    torch.testing.assert_close(weight @ mean + intercept(centred, weight, down), centred.y_mean)


def test_one_pass_serves_every_split():
    data = states()
    both, alone = moments_of(data), moments_of(data, (3,))
    torch.testing.assert_close(both.centred(3, 5).cross, alone.centred(3, 5).cross, rtol=1e-10, atol=1e-9)


def test_restored_moments_go_on_bit_for_bit():
    data = states()
    whole = moments_of(data)
    half = moments_of(data[:2])
    again = Moments(SPLITS, L, dict.fromkeys(range(L), CPU))
    again.restore({k: v.clone() for k, v in half.tensors().items()}, half.rows)
    for window in data[2:]:
        for layer in again.layers:
            again.add(layer, window[layer])
    assert again.rows == whole.rows
    assert all(torch.equal(v, again.tensors()[k]) for k, v in whole.tensors().items())
    with pytest.raises(KeyError):
        again.restore({}, 0)


def test_not_finite_is_reported():
    data = states()
    data[0][2][3, 4] = float("nan")
    moments = Moments(SPLITS, L, dict.fromkeys(range(L), CPU))
    assert [moments.add(layer, data[0][layer]) for layer in moments.layers][:2] == [True, False]


# --- a state apart from the layer's input: several streams enter a layer, W wide


WIDE = 3 * D
APART = {s: (s,) for s in SPLITS}  # one block a split


def wide_states(data):
    """windows x splits of [m, W] that later layers' inputs depend on."""
    g = torch.Generator().manual_seed(7)
    mix = torch.randn(D, WIDE, generator=g)
    return [{s: w[s].float() @ mix + torch.randn(len(w[s]), WIDE, generator=g) for s in SPLITS} for w in data]


def wide_moments(data, states, splits=SPLITS):
    moments = Moments(splits, L, dict.fromkeys(range(L), CPU), reads={s: (s,) for s in splits})
    for window, each in zip(data, states, strict=True):
        for layer in moments.layers:
            assert moments.add(layer, window[layer], each)
    return moments


@pytest.mark.parametrize(("split", "layer"), [(1, 2), (1, 3), (1, 5), (3, 4)])
def test_wide_maps_equal_the_direct_solution(split, layer):
    data = states()
    wide = wide_states(data)
    moments = wide_moments(data, wide)
    x, y = torch.cat([w[split] for w in wide]).double(), stacked(data, layer)
    xc, yc = x - x.mean(0), y - y.mean(0)
    gram = xc.T @ xc
    torch.testing.assert_close(moments.gram(split), gram, rtol=1e-9, atol=1e-8)
    penalised = gram + 0.03 * gram.trace() / WIDE * torch.eye(WIDE, dtype=torch.float64)
    expected = torch.linalg.solve(penalised, xc.T @ yc).T
    weight, bias = ridge(Spectrum.of(moments.gram(split)), moments.centred(split, layer), 0.03)
    assert weight.shape == (D, WIDE)
    torch.testing.assert_close(weight, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(bias, y.mean(0) - expected @ x.mean(0), rtol=1e-8, atol=1e-7)


def test_a_state_apart_that_is_the_input_gives_the_same_moments():
    data = states()
    plain = moments_of(data)
    apart = wide_moments(data, [{s: window[s] for s in SPLITS} for window in data])
    for split in SPLITS:
        assert torch.equal(apart.gram(split), plain.gram(split))
        for layer in range(split, L):
            a, b = apart.centred(split, layer), plain.centred(split, layer)
            assert all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("cross", "x_mean", "y_mean"))
    assert not plain.grams and not plain.x_sums  # nothing is held twice


def test_wide_moments_go_on_bit_for_bit_and_report_what_is_not_finite():
    data = states()
    wide = wide_states(data)
    whole, half = wide_moments(data, wide), wide_moments(data[:2], wide[:2])
    again = Moments(SPLITS, L, dict.fromkeys(range(L), CPU), reads=APART)
    again.restore({k: v.clone() for k, v in half.tensors().items()}, half.rows)
    for window, each in zip(data[2:], wide[2:], strict=True):
        for layer in again.layers:
            again.add(layer, window[layer], each)
    assert again.rows == whole.rows
    assert again.tensors().keys() == whole.tensors().keys()
    assert all(torch.equal(v, again.tensors()[k]) for k, v in whole.tensors().items())
    with pytest.raises(KeyError):  # moments that hold no state apart
        again.restore(moments_of(data).tensors(), 1)
    wide[0][3][2, 5] = float("inf")
    spoilt = Moments(SPLITS, L, dict.fromkeys(range(L), CPU), reads=APART)
    found = [spoilt.add(k, data[0][k], wide[0]) for k in spoilt.layers]
    assert found == [True, True, False, True, True]


def test_size_is_what_is_held():
    wide = wide_moments(states(), wide_states(states()))
    assert product_elements(SPLITS, L, D, APART, WIDE) == sum(t.numel() for t in wide.tensors().values())
    moments = moments_of(states())
    assert product_elements(SPLITS, L, D) == sum(t.numel() for t in moments.tensors().values())


# --- what several splits read, in blocks


def shared(data):
    """windows of block -> [m, D]; "low" is read at both splits."""
    g = torch.Generator().manual_seed(11)
    mix = {name: torch.randn(D, D, generator=g) for name in ("low", "own", "other")}
    return [{name: w[0].float() @ m for name, m in mix.items()} for w in data]


SHARED = {1: ("low", "own"), 3: ("low", "other")}


def shared_moments(data, blocks, reads=SHARED, **kwargs):
    moments = Moments(sorted(reads), L, dict.fromkeys(range(L), CPU), reads=reads, **kwargs)
    for window, each in zip(data, blocks, strict=True):
        for layer in moments.layers:
            assert moments.add(layer, window[layer], each)
    return moments


@pytest.mark.parametrize("single", [False, True])
def test_splits_that_read_the_same_block_share_its_sums(single):
    data = states()
    blocks = shared(data)
    moments = shared_moments(data, blocks, single=single)
    scale = dict(rtol=1e-4, atol=1e-2) if single else dict(rtol=1e-9, atol=1e-8)
    for split, names in SHARED.items():
        x = torch.cat([torch.cat([w[name] for name in names], 1) for w in blocks]).double()
        xc = x - x.mean(0)
        torch.testing.assert_close(moments.gram(split), xc.T @ xc, **scale)
        for layer in range(split, L):
            y = stacked(data, layer)
            found = moments.centred(split, layer)
            torch.testing.assert_close(found.cross, (y - y.mean(0)).T @ xc, **scale)
            torch.testing.assert_close(found.x_mean, x.mean(0), rtol=1e-5, atol=1e-5)
    assert sorted(moments.grams) == [
        "0.0",
        "0.1",
        "0.2",
        "1.1",
        "2.2",
    ]  # half of each, and "low" with itself once
    assert [moments.products[layer].shape[1] for layer in (1, 2, 3, 5)] == [2 * D, 2 * D, 3 * D, 3 * D]
    assert product_elements((1, 3), L, D, SHARED, D) == sum(t.numel() for t in moments.tensors().values())


def test_blocks_go_on_bit_for_bit():
    data = states()
    blocks = shared(data)
    whole, half = shared_moments(data, blocks), shared_moments(data[:2], blocks[:2])
    again = Moments((1, 3), L, dict.fromkeys(range(L), CPU), reads=SHARED)
    again.restore({k: v.clone() for k, v in half.tensors().items()}, half.rows)
    for window, each in zip(data[2:], blocks[2:], strict=True):
        for layer in again.layers:
            again.add(layer, window[layer], each)
    assert all(torch.equal(v, again.tensors()[k]) for k, v in whole.tensors().items())
    assert torch.equal(again.gram(3), whole.gram(3))


def test_a_split_that_reads_nothing_new_adds_no_columns():
    data = states()
    blocks = shared(data)
    moments = shared_moments(data, blocks, {1: ("low", "own"), 3: ("own",)})
    x = torch.cat([w["own"] for w in blocks]).double()
    xc = x - x.mean(0)
    torch.testing.assert_close(moments.gram(3), xc.T @ xc, rtol=1e-9, atol=1e-8)
    assert moments.products[5].shape[1] == 2 * D and sorted(moments.grams) == ["0.0", "0.1", "1.1"]
