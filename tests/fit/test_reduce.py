"""Reduced-rank ridge, against the same reduction computed from the rows themselves."""

from __future__ import annotations

import pytest
import torch

from ridgefill.fit.reduce import reduce
from ridgefill.fit.solve import Spectrum

K, ROWS, LAMBDA = 10, 400, 0.01


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, K, generator=g, dtype=torch.float64) @ torch.randn(K, K, generator=g).double()
    # all layers follow the same three directions, and a little noise
    seen = x @ torch.randn(K, 3, generator=g).double()
    ys = {
        i: seen @ torch.randn(3, 8, generator=g).double() + 0.01 * torch.randn(ROWS, 8, generator=g).double()
        for i in (4, 5)
    }
    ys[5] = ys[5] * 1000
    return x - x.mean(0), {i: y - y.mean(0) for i, y in ys.items()}


def parts(x, ys, columns):
    spectrum = Spectrum.of(x.T @ x)
    bases = {i: y.T @ x @ spectrum.vectors for i, y in ys.items()}
    whole = {i: (b * spectrum.shrinkage(LAMBDA)) @ spectrum.vectors.T for i, b in bases.items()}
    return whole, reduce(spectrum, bases, LAMBDA, columns, dict.fromkeys(ys, 2), ROWS)


def test_all_columns_are_no_reduction():
    x, ys = data()
    whole, (down, maps) = parts(x, ys, K)
    for i, weight in whole.items():
        assert torch.allclose(maps[i] @ down, weight, rtol=1e-8, atol=1e-10 * weight.abs().max())


def test_as_many_columns_as_there_are_directions_suffice_at_any_scale():
    x, ys = data()
    whole, (down, maps) = parts(x, ys, 3)
    assert down.shape == (3, K)
    for i, weight in whole.items():
        lost = (x @ (maps[i] @ down - weight).T).norm() / (x @ weight.T).norm()
        assert lost < 0.01  # layer 4 is a thousand times smaller than layer 5, and counts alike
    assert (x @ down.T).std(0).mean() == pytest.approx(1, rel=0.1)


def test_no_other_reduction_keeps_more():
    x, ys = data(1)
    ys = {4: ys[4] + torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3)).double()}
    whole, (down, maps) = parts(x, ys, 2)
    gram = x.T @ x
    damped = gram + LAMBDA * gram.trace() / K * torch.eye(K, dtype=torch.float64)

    def error(
        weight,
    ):  # what the ridge minimises, up to a constant; one part alone, so that weights count alike
        difference = weight - whole[4]
        halves = [h @ gram @ h.T for h in whole[4].chunk(2)]
        return sum(
            (d @ damped @ d.T).trace() / h.trace() for d, h in zip(difference.chunk(2), halves, strict=True)
        )

    best = error(maps[4] @ down)
    g = torch.Generator().manual_seed(5)
    for _ in range(200):
        other = down + 0.1 * down.abs().mean() * torch.randn(down.shape, generator=g).double()
        fitted = whole[4] @ damped @ other.T @ torch.linalg.inv(other @ damped @ other.T)
        assert error(fitted @ other) >= best * (1 - 1e-9)
