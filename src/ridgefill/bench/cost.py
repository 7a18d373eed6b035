"""Multiply-accumulates of a prefill, counted from a model's config alone (paper 2.5, Figure 7).

One exact row in one layer costs its query, key, value and output projections, its gated MLP, and
``2 * heads * head_dim`` for each key it attends to. A filled row in a late layer costs its map
(``hidden * hidden``) and its key and value projections. Norms, rotary embedding, the embedding and the
``lm_head`` are not counted, nor is what a filled row saves where a sliding window hides it from every reader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from rich.table import Table

from ridgefill.bench.shape import ModelShape
from ridgefill.errors import SettingError
from ridgefill.plan import layer_of

FILLS = ("ridge", "identity", "none", "exact")
MAPS = ("full", "none")
LIMIT = 1 << 20  # tokens up to which a crossing is looked for


@dataclass(frozen=True)
class Setting:
    """Which rows run the late layers, and what the others cost there.

    Attributes:
        split: S, the first late layer; or a depth in (0, 1), for layer floor(depth * L).
        tail: T, the number of last prompt tokens that run every layer.
        rows: share of the remaining prefix rows that run every layer, scattered uniformly. The count is the
            expected one: each such row costs ``rows`` of an exact row and the rest of a filled one.
        leading: the number of first prompt tokens that run every layer.
        fill: "ridge" (map, keys and values), "identity" (keys and values), "none" (filled rows write nothing
            in late layers, and nobody attends to them there), or "exact" (every row runs every layer).
        map: "full" counts the ridge fill's maps, "none" leaves them out.
        map_at_split: count a map in layer S itself too. The published figures do; an engine need not apply
            one there, since layer S's true input is known.

    Raises:
        SettingError: a value out of range.
    """

    split: int | float = 0.5
    tail: int = 4096
    rows: float = 0.0
    leading: int = 0
    fill: str = "ridge"
    map: str = "full"
    map_at_split: bool = True

    def __post_init__(self) -> None:
        _choice("fill", self.fill, FILLS)
        _choice("map", self.map, MAPS)
        if isinstance(self.split, float) and not 0 < self.split < 1:
            raise SettingError(
                f"split {self.split}", "a depth lies between 0 and 1", "give a depth such as 0.5, or a layer"
            )
        if not isinstance(self.split, float):
            _count("split", self.split, 1)
        _count("tail", self.tail, 1)
        _count("leading", self.leading, 0)
        if not isinstance(self.rows, int | float) or not 0 <= self.rows <= 1:
            raise SettingError(f"rows {self.rows}", "it is a share of the prefix", "give a share from 0 to 1")

    @classmethod
    def exact(cls) -> Setting:
        """The unmodified model: every row runs every layer."""
        return cls(fill="exact")

    @classmethod
    def pop(cls, n_layers: int) -> Setting:
        """POP as published: the identity fill from layer ceil(2L/3), a one-token tail, no map."""
        return cls(split=math.ceil(2 * n_layers / 3), tail=1, fill="identity", map="none")

    def at(self, shape: ModelShape) -> Setting:
        """The same setting with its split as a layer of ``shape``.

        Raises:
            SettingError: the split is not one of layers 1 to L - 1.
        """
        return self if self.fill == "exact" else replace(self, split=layer_of(self.split, shape.layers))

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object; for "exact" all but the fill are null, since none is used."""
        return {key: None if self.fill == "exact" and key != "fill" else v for key, v in asdict(self).items()}

    def __str__(self) -> str:
        """The setting as `parse_versus` reads it."""
        if self.fill == "exact":
            return "exact"
        flag = {True: "yes", False: "no"}
        fields = asdict(self) | {"map_at_split": flag[self.map_at_split]}
        return ",".join(f"{key}={value}" for key, value in fields.items())


def macs(shape: ModelShape, n: int, setting: Setting) -> int:
    """Multiply-accumulates of prefilling ``n`` tokens; a prompt not longer than the tail is exact.

    Rounded to the nearest whole one where a share of rows leaves a part.

    Raises:
        SettingError: n < 1, or the split is not one of layers 1 to L - 1.
    """
    _count("a prompt length", n, 1)
    return round(_prefill(shape, n, setting.at(shape)))


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
    _count("a prompt length", n, 1)
    _count("tail", tail, 1)
    tail = min(tail, n)
    return ((n - tail) * layer_of(split, layers) + tail * layers) / (n * layers)


def layer_pass_ceiling(n: int, split: int | float, tail: int, layers: int) -> float:
    """1 / r: the largest speedup if all layers cost the same and maps nothing (paper 2.5)."""
    return 1 / layer_pass_share(n, split, tail, layers)


def crossing_tokens(shape: ModelShape, ours: Setting, versus: Setting, limit: int = LIMIT) -> int | None:
    """The prompt length from which ``ours`` costs no more than ``versus``; None if there is none.

    Equal costs count as no more: prompts within both tails are exact either way, so the answer is 1 for a
    setting that never loses. It holds for every length up to
    ``limit``: the difference is quadratic in n between the lengths
    at which a tail, the leading rows or a window begin to bind.

    Raises:
        SettingError: limit < 1, or a split out of range.
    """
    _count("the limit", limit, 1)
    ours, versus = ours.at(shape), versus.at(shape)

    def excess(n: int) -> Fraction:
        return _prefill(shape, n, ours) - _prefill(shape, n, versus)

    bends = {b for setting in (ours, versus) for b in _bends(shape, setting) if 1 < b < limit}
    ends = sorted({1, limit} | bends)
    for low, high in reversed(list(pairwise(ends)) or [(1, 1)]):
        last = _last_positive(excess, low, high)
        if last is not None:
            return last + 1 if last < limit else None
    return 1


@dataclass(frozen=True)
class LengthCost:
    """One prompt length's counts: ``tokens``, ``macs`` (ours) and ``macs_versus`` (theirs)."""

    tokens: int
    macs: int
    macs_versus: int

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.macs / self.macs_versus

    def to_json(self) -> dict[str, Any]:
        """The counts and their ratio as a JSON object."""
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class CostReport:
    """Two settings' counts on one model at some lengths, and where they cross."""

    shape: ModelShape
    ours: Setting
    versus: Setting
    crossing_tokens: int | None
    lengths: tuple[LengthCost, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object: crossing_tokens, lengths, setting, versus, model."""
        return {
            "crossing_tokens": self.crossing_tokens,
            "lengths": [length.to_json() for length in self.lengths],
            "setting": self.ours.to_json(),
            "versus": self.versus.to_json(),
            "model": asdict(self.shape) | {"windows": list(self.shape.windows)},
        }


def report(shape: ModelShape, lengths: Iterable[int], ours: Setting, versus: Setting) -> CostReport:
    """Counts both settings at each prompt length.

    Raises:
        SettingError: no length, a length < 1, or a split out of range.
    """
    ours, versus = ours.at(shape), versus.at(shape)
    counts = tuple(LengthCost(n, macs(shape, n, ours), macs(shape, n, versus)) for n in lengths)
    if not counts:
        raise SettingError(
            "a cost report", "no prompt length was given", "give one or more lengths in tokens"
        )
    return CostReport(shape, ours, versus, crossing_tokens(shape, ours, versus), counts)


def table(report: CostReport) -> Table:
    """The report as a table for the terminal, the crossing below it."""
    ours, theirs = _title(report.shape, report.ours), _title(report.shape, report.versus)
    crossing = report.crossing_tokens
    if crossing is None:
        caption = f"The first costs more than the second at {LIMIT:,} tokens."
    elif crossing == 1:
        caption = f"The first costs no more than the second at any length (up to {LIMIT:,} tokens)."
    else:
        caption = f"The first costs no more than the second from {crossing:,} tokens (up to {LIMIT:,})."
    drawn = Table(
        title=f"Multiply-accumulates of a prefill (10^12)\n{ours}\nagainst {theirs}", caption=caption
    )
    for heading in ("tokens", "ours", "theirs", "ours / theirs"):
        drawn.add_column(heading, justify="right")
    for row in report.lengths:
        counts = (f"{count / 1e12:,.3f}" for count in (row.macs, row.macs_versus))
        drawn.add_row(f"{row.tokens:,}", *counts, f"{row.ratio:.3f}")
    return drawn


def parse_versus(text: str, shape: ModelShape, ours: Setting) -> Setting:
    """Reads the setting to compare with.

    Args:
        text: "exact", "pop", or ``key=value`` pairs such as
            "split=16,tail=4096,rows=0.1,leading=16,fill=identity,map=no"; keys left out take the defaults
            of `Setting`.
        ours: the setting it will be compared with, shown as the example where ``text`` cannot be read.

    Raises:
        SettingError: the key that is unknown, repeated or has a bad value, by name.
    """
    name = text.strip().lower()
    if name == "exact":
        return Setting.exact()
    if name == "pop":
        return Setting.pop(shape.layers).at(shape)
    found: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        advice = f"write exact, pop, or pairs such as {ours}"
        if not equals:
            raise SettingError(f"compare with {text!r}", f"{pair.strip()!r} is not key=value", advice)
        if key not in _READERS or key in found:
            why = f"the key {key!r} is given twice" if key in found else f"there is no key {key!r}"
            raise SettingError(f"compare with {text!r}", why, f"{advice}; the keys are {', '.join(_READERS)}")
        try:
            found[key] = _READERS[key](value.lower())
        except (ValueError, KeyError):
            raise SettingError(
                f"compare with {text!r}", f"{value!r} is no value for {key!r}", advice
            ) from None
    return Setting(**found).at(shape)


# The count. Keys read by a range of rows: every sum below is a difference of _triangle.


def _triangle(n: int, window: int | None) -> int:
    """sum of min(i + 1, window) over i = 0..n-1."""
    full = n if window is None else min(n, window)
    return full * (full + 1) // 2 + (n - full) * (window or 0)


def _keys(start: int, stop: int, first: int, window: int | None) -> int:
    """Keys at or after row ``first`` that the rows start..stop-1 attend to; first <= start."""
    return _triangle(stop - first, window) - _triangle(start - first, window)


def _prefill(shape: ModelShape, n: int, setting: Setting) -> Fraction:
    """The count before rounding; ``setting`` has its split as a layer."""
    exact = setting.fill == "exact" or n <= setting.tail
    split = shape.layers if exact else int(setting.split)
    early, late = Counter(shape.windows[:split]), Counter(shape.windows[split:])
    total = Fraction(n * shape.row * split)
    total += sum(shape.key * _keys(0, n, 0, window) * layers for window, layers in early.items())
    if not late:
        return total
    blocks = _blocks(n, setting)
    kept = sum((stop - start) * share for start, stop, share in blocks)
    total += kept * shape.row * (shape.layers - split)
    attended = _written if setting.fill == "none" else _all
    total += sum(shape.key * attended(blocks, window) * layers for window, layers in late.items())
    return total + (n - kept) * _filled_row(shape, setting, shape.layers - split)


def _filled_row(shape: ModelShape, setting: Setting, layers: int) -> int:
    """One filled row in all late layers."""
    if setting.fill == "none":
        return 0
    maps = layers if setting.map_at_split else layers - 1
    mapped = setting.fill == "ridge" and setting.map == "full"
    return shape.kv * layers + (shape.map * maps if mapped else 0)


_Blocks = tuple[tuple[int, int, Fraction], ...]


def _blocks(n: int, setting: Setting) -> _Blocks:
    """(start, stop, share of exact rows) of the leading rows, the rest of the prefix, and the tail."""
    prefix = n - setting.tail
    leading = min(setting.leading, prefix)
    share = Fraction(str(setting.rows))  # the decimal that was written, not its binary neighbour
    return (0, leading, Fraction(1)), (leading, prefix, share), (prefix, n, Fraction(1))


def _all(blocks: _Blocks, window: int | None) -> Fraction:
    """Keys that the exact rows attend to in a late layer where every row wrote."""
    return sum((share * _keys(start, stop, 0, window) for start, stop, share in blocks), Fraction(0))


def _written(blocks: _Blocks, window: int | None) -> Fraction:
    """Keys that the exact rows attend to in a late layer where only exact rows wrote."""
    total = Fraction(0)
    for i, (start, stop, share) in enumerate(blocks):
        total += (stop - start) * share * (1 - share)  # an exact row surely sees itself
        total += share * share * _keys(start, stop, start, window)
        for first, end, written in blocks[:i]:
            total += share * written * (_keys(start, stop, first, window) - _keys(start, stop, end, window))
    return total


# The crossing: the last length at which ours costs more, piece by piece from the longest.


def _bends(shape: ModelShape, setting: Setting) -> set[int]:
    """Lengths between which the count is one quadratic in n: where a row count or a window begins to bind."""
    if setting.fill == "exact":
        return {window for window in set(shape.windows) if window is not None}
    starts = {0, setting.leading, setting.tail, setting.tail + setting.leading}
    return starts | {
        start + window for start in starts for window in set(shape.windows) if window is not None
    }


def _last_positive(f: Callable[[int], Fraction], low: int, high: int) -> int | None:
    """The largest n of low..high with f(n) > 0, for f quadratic there; None if there is none."""
    for start, stop in reversed(_monotone(f, low, high)):
        if f(stop) > 0:
            return stop
        if f(start) > 0:
            while stop - start > 1:  # f(start) > 0 >= f(stop)
                middle = (start + stop) // 2
                start, stop = (middle, stop) if f(middle) > 0 else (start, middle)
            return start
    return None


def _monotone(f: Callable[[int], Fraction], low: int, high: int) -> list[tuple[int, int]]:
    """low..high cut where the quadratic f turns."""
    if high - low < 2:
        return [(low, high)]
    step = f(low + 1) - f(low)
    bend = f(low + 2) - f(low + 1) - step
    turn = low + math.ceil(-step / bend) if bend else low
    return [(low, turn), (turn, high)] if low < turn < high else [(low, high)]


def _count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name} {value!r}", "it is a count", f"give a whole number of {least} or more")


def _choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{name} {value!r}", "there is none of that name", f"use {', '.join(known)}")


def _title(shape: ModelShape, setting: Setting) -> str:
    if setting.fill == "exact":
        return "exact prefill"
    named = "POP" if setting == Setting.pop(shape.layers) else f"{setting.fill} fill"
    parts = [f"{named} from layer {setting.split} of {shape.layers}", f"tail {setting.tail:,}"]
    parts += [f"{setting.leading:,} leading rows exact"] * bool(setting.leading)
    parts += [f"{setting.rows:.3g} of the prefix exact"] * bool(setting.rows)
    parts += ["maps not counted"] * (setting.fill == "ridge" and setting.map == "none")
    return ", ".join(parts)


_READERS: dict[str, Callable[[str], Any]] = {
    "split": lambda value: int(value) if value.isdecimal() else float(value),
    "tail": int,
    "rows": float,
    "leading": int,
    "fill": str,
    "map": {"yes": "full", "no": "none", "full": "full", "none": "none"}.__getitem__,
    "map_at_split": {"yes": True, "no": False}.__getitem__,
}
