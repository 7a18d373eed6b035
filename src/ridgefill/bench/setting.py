"""A setting to count: which rows run the late layers, and what the others cost there (paper 2.5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ridgefill.bench.shape import ModelShape
from ridgefill.errors import SettingError
from ridgefill.plan import layer_of
from ridgefill.reading import GIVES

FILLS = ("ridge", "identity", "none", "exact")
MAPS = ("full", "none")


@dataclass(frozen=True)
class Setting:
    """Which rows run the late layers, what choosing them costs, and what the other rows cost there.

    The terminal-state correction is not among them: it adds one state per layer and prompt, which is less than
    the work of one row.

    Attributes:
        split: S, the first late layer; or a depth in (0, 1), for layer floor(depth * L).
        tail: T, the number of last prompt tokens that run every layer.
        rows: the remaining prefix rows that run every layer, as a share (float) or a count (int), scattered
            uniformly. The count is the expected one: at share p each such row costs p of an exact row and the
            rest of a filled one.
        leading: the number of first prompt tokens that run every layer.
        fill: "ridge" (map, keys and values, or the recurrent state's update), "identity" (the same without the
            map), "none" (filled rows write nothing in late layers, and nobody attends to them there), or
            "exact" (every row runs every layer).
        map: "full" counts the ridge fill's maps, "none" leaves them out.
        blocks, rank, gives: what the maps are (`ridgefill.reading.Reading`): how many states of a row they read; to
            how many columns these are reduced once for all layers, 0 for no reduction; and whether they give
            "inputs" of layers, whose keys and values are still to be projected, or what attention layers write.
        map_at_split: count a map in layer S itself too. The published figures do; an engine need not apply
            one there, since layer S's true input is known.
        probe: the number of last rows that run the late layers once over the filled prefix, to rank its rows
            (2.4); 0 for none. Prefill then takes two sweeps: the first one also fills the late attention
            layers of the rows that turn out to be exact.
        score_rows: the number of last rows whose attention scores in the layers below the split rank the
            prefix: one product per key, query head and layer, without values, beside the layer's own attention.
        score_layers: how many attention layers below the split are scored, the last ones; 0 for all.
        value_rescale, key_rescale: w, the first tail rows whose values (keys) are predicted as well, to compare
            with the true ones (2.3): a projection, and a map for both, per late attention layer; 0 for none.

    Raises:
        SettingError: a value out of range.
    """

    split: int | float = 0.5
    tail: int = 4096
    rows: int | float = 0.0
    leading: int = 0
    fill: str = "ridge"
    map: str = "full"
    map_at_split: bool = True
    blocks: int = 1
    rank: int = 0
    gives: str = "inputs"
    probe: int = 0
    score_rows: int = 0
    score_layers: int = 0
    value_rescale: int = 0
    key_rescale: int = 0

    def __post_init__(self) -> None:
        _choice("fill", self.fill, FILLS)
        _choice("map", self.map, MAPS)
        _choice("gives", self.gives, GIVES)
        check_count("blocks", self.blocks, 1)
        if isinstance(self.split, float) and not 0 < self.split < 1:
            raise SettingError(
                f"split {self.split}", "a depth lies between 0 and 1", "give a depth such as 0.5, or a layer"
            )
        if not isinstance(self.split, float):
            check_count("split", self.split, 1)
        check_count("tail", self.tail, 1)
        for name in ("leading", "rank", *_SELECTING):
            check_count(name, getattr(self, name), 0)
        if not isinstance(self.rows, float):
            check_count("rows", self.rows, 0)
        elif not 0 <= self.rows <= 1:
            raise SettingError(
                f"rows {self.rows}",
                "it is a share of the prefix",
                "give a share from 0 to 1, or a whole number of rows",
            )

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
            SettingError: the split is not one of layers 1 to L - 1, or fewer attention layers than are to be
                scored lie below it.
        """
        if self.fill == "exact":
            return self
        split = layer_of(self.split, shape.layers)
        below = sum(bool(layer.value) for layer in shape.costs[:split])
        if self.score_rows and max(self.score_layers, 1) > below:
            raise SettingError(
                f"score {max(self.score_layers, 1)} attention layers below the split at {split}",
                f"there are {below}",
                "score fewer layers, or give a later split",
            )
        return replace(self, split=split)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object; for "exact" all but the fill are null, since none is used."""
        return {key: None if self.fill == "exact" and key != "fill" else v for key, v in asdict(self).items()}

    def __str__(self) -> str:
        """The setting as `parse_versus` reads it; selectors and corrections only where there are any."""
        if self.fill == "exact":
            return "exact"
        flag = {True: "yes", False: "no"}
        fields = asdict(self) | {"map_at_split": flag[self.map_at_split]}
        plain = {"blocks": 1, "rank": 0, "gives": "inputs"} | dict.fromkeys(_SELECTING, 0)
        return ",".join(f"{key}={value}" for key, value in fields.items() if value != plain.get(key))


_SELECTING = ("probe", "score_rows", "score_layers", "value_rescale", "key_rescale")


def count_or_share(text: str) -> int | float:
    """A count of rows ("300") or a share of them ("0.1", "1.0").

    Raises:
        ValueError: neither.
    """
    return int(text) if text.strip().isdecimal() else float(text)


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


_READERS: dict[str, Callable[[str], Any]] = {
    "split": count_or_share,  # a layer or a depth reads as rows or a share do
    "tail": int,
    "rows": count_or_share,
    "leading": int,
    "fill": str,
    "map": {"yes": "full", "no": "none", "full": "full", "none": "none"}.__getitem__,
    "map_at_split": {"yes": True, "no": False}.__getitem__,
    "blocks": int,
    "rank": int,
    "gives": str,
    **dict.fromkeys(_SELECTING, int),
}


def describe(shape: ModelShape, setting: Setting) -> str:
    """One line for a reader; ``setting`` has its split as a layer."""
    if setting.fill == "exact":
        return "exact prefill"
    named = "POP" if setting == Setting.pop(shape.layers) else f"{setting.fill} fill"
    rows = f"{setting.rows:,} rows" if isinstance(setting.rows, int) else f"{setting.rows:.3g}"
    scored = setting.score_layers or "all"
    parts = [f"{named} from layer {setting.split} of {shape.layers}", f"tail {setting.tail:,}"]
    parts += [f"{setting.leading:,} leading rows exact"] * bool(setting.leading)
    parts += [f"{rows} of the prefix exact"] * bool(setting.rows)
    parts += [f"probe of {setting.probe:,} rows"] * bool(setting.probe)
    parts += [f"{scored} lower layers scored from {setting.score_rows:,} rows"] * bool(setting.score_rows)
    parts += [f"values rescaled over {setting.value_rescale:,} rows"] * bool(setting.value_rescale)
    parts += [f"keys rescaled over {setting.key_rescale:,} rows"] * bool(setting.key_rescale)
    if setting.fill == "ridge" and setting.map == "full" and (setting.blocks, setting.gives) != (1, "inputs"):
        reduced = f" reduced to {setting.rank:,} columns" if setting.rank else ""
        what = "keys and values" if setting.gives == "writes" else "inputs"
        parts.append(f"maps give {what} from {setting.blocks} states{reduced}")
    parts += ["maps not counted"] * (setting.fill == "ridge" and setting.map == "none")
    return ", ".join(parts)


def check_count(name: str, value: Any, least: int) -> None:
    """Raises SettingError unless ``value`` is a whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name} {value!r}", "it is a count", f"give a whole number of {least} or more")


def _choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{name} {value!r}", "there is none of that name", f"use {', '.join(known)}")
