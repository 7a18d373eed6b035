"""Multiply-accumulates of a prefill, counted from a model's config alone (paper 2.5).

A row in a layer costs its projections, its MLP (or the routed experts), and one read of each key it attends to
(``2 * heads * head_dim``) or of its recurrent state. A filled row in a late layer costs its map and what the layer
keeps of it. On top come what the selectors and corrections run. Norms, rotary embedding, the embedding and the
``lm_head`` are not counted, nor is what a filled row saves where a sliding window hides it from every reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ridgefill.bench.layers import LayerCost
from ridgefill.bench.setting import Setting, check_count
from ridgefill.bench.shape import ModelShape
from ridgefill.plan import layer_of

Window = int | None
Blocks = tuple[tuple[int, int, Fraction], ...]  # (start, stop, share of exact rows)


def macs(shape: ModelShape, n: int, setting: Setting) -> int:
    """Multiply-accumulates of prefilling ``n`` tokens; a prompt not longer than the tail is exact.

    Rounded to the nearest whole one where a share of rows leaves a part.

    Raises:
        SettingError: n < 1, or the split is not one of layers 1 to L - 1.
    """
    check_count("a prompt length", n, 1)
    return round(expected_macs(shape, n, setting.at(shape)))


def macs_ceiling(shape: ModelShape, n: int, setting: Setting) -> float:
    """Largest speedup over exact prefill of ``n`` tokens if time goes with multiply-accumulates."""
    return macs(shape, n, Setting.exact()) / macs(shape, n, setting)


def layer_pass_share(n: int, split: int | float, tail: int, layers: int) -> float:
    """r = ((n - T) S + T L) / (n L): the share of layer passes that remain (paper 2.5).

    Args:
        n, tail: tokens.
        split: layer, or depth in (0, 1).

    Raises:
        SettingError: a value out of range.
    """
    check_count("a prompt length", n, 1)
    check_count("tail", tail, 1)
    tail = min(tail, n)
    return ((n - tail) * layer_of(split, layers) + tail * layers) / (n * layers)


def layer_pass_ceiling(n: int, split: int | float, tail: int, layers: int) -> float:
    """1 / r: the largest speedup if all layers cost the same and maps nothing (paper 2.5)."""
    return 1 / layer_pass_share(n, split, tail, layers)


def expected_macs(shape: ModelShape, n: int, setting: Setting) -> Fraction:
    """The count before rounding; ``setting`` has its split as a layer."""
    exact = setting.fill == "exact" or n <= setting.tail
    split = shape.layers if exact else int(setting.split)
    early: Blocks = ((0, n, Fraction(1)),)
    total = Fraction(0)
    for layer, times in Counter(shape.costs[:split]).items():
        total += times * (n * layer.row + _reads(layer, lambda window: _all(early, window)))
    if exact:
        return total
    blocks = _blocks(n, setting)
    for late, times in _late(shape, setting).items():
        total += times * _late_layer(late, n, blocks, setting)
    total += _reduction(shape, n, blocks, setting)
    return total + _scores(shape.costs[:split], n, setting)


@dataclass(frozen=True)
class _Late:
    """A late layer, the cost of its map, whether anything is predicted (layer S's input may be known), and whether
    that is what the layer writes, with no key and value left to project.
    """

    layer: LayerCost
    map: int
    predicted: bool
    ready: bool

    @property
    def filled(self) -> int:
        """What a filled row costs."""
        return self.layer.filled - 2 * self.layer.value * self.ready + self.map


def _late(shape: ModelShape, setting: Setting) -> Counter[_Late]:
    split, found = int(setting.split), Counter[_Late]()
    for i in range(split, shape.layers):
        layer, predicted = shape.costs[i], setting.map_at_split or i != split
        ready = predicted and setting.fill == "ridge" and setting.gives == "writes" and layer.value > 0
        mapped = predicted and setting.fill == "ridge" and setting.map == "full"
        cost = _map(shape, layer, setting) if mapped else 0
        found[_Late(layer, cost, predicted, ready)] += 1
    return found


def _kept(blocks: Blocks) -> Fraction:
    """How many rows run every layer."""
    return sum(((stop - start) * share for start, stop, share in blocks), Fraction(0))


def _map(shape: ModelShape, layer: LayerCost, setting: Setting) -> int:
    """One layer's map of one row."""
    width = shape.map // shape.hidden  # of a state
    given = 2 * layer.value // shape.hidden if setting.gives == "writes" and layer.value else shape.hidden
    return (setting.rank or setting.blocks * width) * given


def _reduction(shape: ModelShape, n: int, blocks: Blocks, setting: Setting) -> Fraction:
    """What all maps share: the filled rows' states reduced once."""
    if setting.fill != "ridge" or setting.map != "full":
        return Fraction(0)
    return (n - _kept(blocks)) * setting.rank * setting.blocks * (shape.map // shape.hidden)


def _late_layer(late: _Late, n: int, blocks: Blocks, setting: Setting) -> Fraction:
    """All rows of one late layer: exact, filled, the probe's, and those that a rescale compares."""
    layer, writes = late.layer, setting.fill != "none"
    kept = _kept(blocks)
    seen = _all if writes else _written
    total = kept * layer.row + _reads(layer, lambda window: seen(blocks, window))
    total += _probe(layer, n, n - setting.tail if writes else blocks[0][1], setting.probe)
    if not writes:
        return total
    total += (n - kept) * late.filled
    if layer.value and setting.probe:  # the first sweep fills the rows that the second runs
        start, stop, share = blocks[1]
        total += (stop - start) * share * late.filled
    if layer.value and late.predicted:
        values, keys = (min(w, setting.tail) for w in (setting.value_rescale, setting.key_rescale))
        total += max(values, keys) * late.map + (values + keys) * layer.value * (not late.ready)
    return total


def _probe(layer: LayerCost, n: int, written: int, rows: int) -> Fraction:
    """The last rows, run over the rows 0..written-1 and one another; a recurrent state starts empty."""
    rows = min(rows, n)
    start = n - rows
    written = min(written, start)

    def seen(window: Window) -> int:
        over = _keys(start, n, 0, window) - _keys(start, n, written, window)
        return over + _keys(start, n, start, window)

    return rows * layer.row + _reads(layer, seen)


def _scores(early: tuple[LayerCost, ...], n: int, setting: Setting) -> Fraction:
    """Attention scores of the last rows in layers below the split; half of a read, for the values are left out."""
    read = [layer for layer in early if layer.value][-setting.score_layers :]
    start = max(0, n - setting.score_rows)
    total = Fraction(0)
    for layer in read:
        cost, window = layer.reads[0]
        total += Fraction(cost, 2) * _keys(start, n, 0, window)
    return total


# Keys read by a range of rows: every sum below is a difference of _triangle.


def _reads(layer: LayerCost, seen: Callable[[Window], int | Fraction]) -> Fraction:
    return sum((cost * Fraction(seen(window)) for cost, window in layer.reads), Fraction(0))


def _triangle(n: int, window: Window) -> int:
    """sum of min(i + 1, window) over i = 0..n-1."""
    full = n if window is None else min(n, window)
    return full * (full + 1) // 2 + (n - full) * (window or 0)


def _keys(start: int, stop: int, first: int, window: Window) -> int:
    """Keys at or after row ``first`` that the rows start..stop-1 attend to; first <= start."""
    return _triangle(stop - first, window) - _triangle(start - first, window)


def _blocks(n: int, setting: Setting) -> Blocks:
    """The leading rows, the rest of the prefix, and the tail."""
    prefix = n - setting.tail
    leading = min(setting.leading, prefix)
    share = Fraction(str(setting.rows))  # the decimal that was written, not its binary neighbour
    if isinstance(setting.rows, int):
        rest = max(prefix - leading, 1)
        share = Fraction(min(setting.rows, rest), rest)
    return (0, leading, Fraction(1)), (leading, prefix, share), (prefix, n, Fraction(1))


def _all(blocks: Blocks, window: Window) -> Fraction:
    """Keys that the exact rows attend to in a late layer where every row wrote."""
    return sum((share * _keys(start, stop, 0, window) for start, stop, share in blocks), Fraction(0))


def _written(blocks: Blocks, window: Window) -> Fraction:
    """Keys that the exact rows attend to in a late layer where only exact rows wrote."""
    total = Fraction(0)
    for i, (start, stop, share) in enumerate(blocks):
        total += (stop - start) * share * (1 - share)  # an exact row surely sees itself
        total += share * share * _keys(start, stop, start, window)
        for first, end, written in blocks[:i]:
            total += share * written * (_keys(start, stop, first, window) - _keys(start, stop, end, window))
    return total
