"""The count of paper 2.5 by its definition: row by row, key by key. Slow, and independent of the closed form."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from ridgefill.bench.cost import ModelShape, Setting
from ridgefill.bench.layers import LayerCost, attention, delta_net


def dense(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    windows: tuple[int | None, ...] | None = None,
    model_type: str = "",
) -> ModelShape:
    """A model of attention layers with a gated MLP."""
    mlp = 3 * hidden * intermediate
    costs = tuple(
        attention(hidden, heads, kv_heads, head_dim, mlp, window) for window in windows or (None,) * layers
    )
    return ModelShape(hidden, costs, hidden * hidden, model_type)


def loop(shape: ModelShape, n: int, setting: Setting) -> Fraction:
    """Multiply-accumulates of prefilling n tokens, before rounding."""
    exact = setting.fill == "exact" or n <= setting.tail
    total = Fraction(0)
    for i, layer in enumerate(shape.costs):
        if exact or i < int(setting.split):
            total += sum(layer.row + _read(layer, _reach(row)) for row in range(n))
        else:
            total += _late(shape, i, n, setting)
    if not exact and setting.fill == "ridge" and setting.map == "full":
        chance, width = _chance(n, setting), shape.map // shape.hidden
        for row in range(n):  # what all the layers' maps share
            total += (1 - chance(row)) * setting.rank * setting.blocks * width
    if not exact and setting.score_rows:
        below = [layer for layer in shape.costs[: int(setting.split)] if layer.value]
        for layer in below if setting.score_layers == 0 else below[-setting.score_layers :]:
            both, window = layer.reads[0]
            for row in range(n)[-setting.score_rows :]:
                total += Fraction(both, 2) * _reach(row)(window)
    return total


def _late(shape: ModelShape, i: int, n: int, setting: Setting) -> Fraction:
    layer, prefix = shape.costs[i], n - setting.tail
    known = i == setting.split and not setting.map_at_split
    mapped = setting.fill == "ridge" and not known
    writes = (
        mapped and setting.gives == "writes" and layer.value > 0
    )  # keys and values, two of what `value` makes
    columns = setting.rank or setting.blocks * (shape.map // shape.hidden)
    a_map = columns * (2 * layer.value // shape.hidden if writes else shape.hidden)
    a_map = a_map if mapped and setting.map == "full" else 0
    filled = Fraction(layer.filled + a_map - 2 * layer.value * writes)
    filled = Fraction(0) if setting.fill == "none" else filled
    chance = _chance(n, setting)

    def written(row: int, window: int | None) -> Fraction:
        """What an exact row sees where filled rows write nothing."""
        return 1 + sum((chance(other) for other in range(row) if _within(row, other, window)), Fraction(0))

    total = Fraction(0)
    for row in range(n):
        reach = partial(written, row) if setting.fill == "none" else _reach(row)
        total += chance(row) * (layer.row + _read(layer, reach)) + (1 - chance(row)) * filled
        if setting.probe and layer.value and setting.leading <= row < prefix:
            total += chance(row) * filled
    probing = range(n)[-setting.probe :] if setting.probe else range(0)
    there = min(setting.leading, prefix) if setting.fill == "none" else prefix

    def probed(row: int, window: int | None) -> int:
        seen = (other for other in range(row + 1) if other < there or other in probing)
        return sum(_within(row, other, window) for other in seen)

    for row in probing:
        total += layer.row + _read(layer, partial(probed, row))
    if layer.value and setting.fill != "none" and not known:
        for row in range(setting.tail):
            if row < max(setting.value_rescale, setting.key_rescale):
                total += a_map
            if not writes:
                total += layer.value * ((row < setting.value_rescale) + (row < setting.key_rescale))
    return total


def _chance(n: int, setting: Setting) -> Callable[[int], Fraction]:
    """How likely a row runs every layer."""
    prefix = n - setting.tail

    def chance(row: int) -> Fraction:
        if row >= prefix or row < setting.leading:
            return Fraction(1)
        if isinstance(setting.rows, int):
            rest = prefix - setting.leading
            return Fraction(min(setting.rows, rest), rest)
        return Fraction(str(setting.rows))

    return chance


def _within(row: int, other: int, window: int | None) -> bool:
    return window is None or other > row - window


def _reach(row: int) -> Callable[[int | None], int]:
    return lambda window: sum(_within(row, other, window) for other in range(row + 1))


def _read(layer: LayerCost, seen: Callable[[int | None], int | Fraction]) -> Fraction:
    return sum((cost * Fraction(seen(window)) for cost, window in layer.reads), Fraction(0))


def some_shape(rng: random.Random, thin: bool = False) -> ModelShape:
    """A small model of any kinds of layers; with a thin MLP a map may cost more than an exact row."""
    hidden, width = (rng.choice([4, 16]), rng.choice([1, 16])) if thin else (4, rng.choice([4, 16]))
    mlp = 3 * hidden * width
    layers = []
    for _ in range(rng.randint(2, 4)):
        heads, kv_heads = rng.choice([2, 4]), rng.choice([1, 2])
        layer = attention(hidden, heads, kv_heads, 4, mlp, rng.choice([None, None, 2, 5, 9]))
        if rng.random() < 0.2:
            layer = delta_net(hidden, 1, 2, 3, 5, 4, mlp)
        elif rng.random() < 0.2:  # sparse attention beside its indexer
            layer = LayerCost(layer.row, layer.filled, (*layer.reads, (3, None)), layer.value)
        layers.append(layer)
    return ModelShape(hidden, tuple(layers), hidden * hidden * rng.choice([1, 1, 2]))


def some_setting(rng: random.Random, shape: ModelShape, longest: int, counts: bool = True) -> Setting:
    """Any setting that ``shape`` allows.

    Args:
        counts: rows may be a count.
    """
    split = rng.randint(1, shape.layers - 1)
    below = sum(bool(layer.value) for layer in shape.costs[:split])
    shares = [0.0, 0.0, 0.25, 0.5, 1.0]
    return Setting(
        split=split,
        tail=rng.randint(1, longest),
        rows=rng.choice([*shares, 1, 3, 7, 50] if counts else shares),
        leading=rng.choice([0, 0, 1, 2, 7]),
        fill=rng.choice(["ridge", "ridge", "identity", "none", "exact"]),
        map=rng.choice(["full", "none"]),
        map_at_split=rng.random() < 0.5,
        blocks=rng.choice([1, 1, 3]),
        rank=rng.choice([0, 0, 5]),
        gives=rng.choice(["inputs", "writes"]),
        probe=rng.choice([0, 0, 1, 4, 30]),
        score_rows=rng.choice([0, 1, 6, 30]) if below else 0,
        score_layers=rng.randint(0, below),
        value_rescale=rng.choice([0, 0, 2, 40]),
        key_rescale=rng.choice([0, 0, 3]),
    )
