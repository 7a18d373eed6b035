"""What to compute exactly and what to fill (paper 2.1, Table 3, Table 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ridgefill import presets
from ridgefill.correct import Correction
from ridgefill.errors import SettingError
from ridgefill.fill import Exact, Fill, Identity, NoFill, Ridge, TrueInputs
from ridgefill.rows.base import Selector

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps
    from ridgefill.rows.token_table import TokenTable

DEFAULT_TAIL = presets.DEFAULT_TAIL
DEFAULT_LEADING = 16
FILLS = ("ridge", "identity", "none", "exact", "true", "pop")


@dataclass(frozen=True)
class FillPlan:
    """One prompt's division into exact and filled rows.

    Attributes:
        fill: the arm that writes the late layers of filled rows.
        split: S, the first late layer; layers below it run exactly for every row.
        tail: T, the number of last prompt tokens that run every layer.
        leading: the number of first prompt tokens that run every layer. They hold the attention sink, whose
            state no affine map predicts; 0 is the paper's setting.
        rows: which further prefix rows run every layer (2.4), or None.
        corrections: what is done to the filled cache (2.3), in this order.
        table: the maps' token table, which some selectors read; another arm of the same plan keeps it.
    """

    fill: Fill
    split: int
    tail: int = DEFAULT_TAIL
    leading: int = DEFAULT_LEADING
    rows: Selector | None = None
    corrections: tuple[Correction, ...] = ()
    table: TokenTable | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.table is None and isinstance(self.fill, Ridge):
            object.__setattr__(self, "table", self.fill.maps.tokens)
        for correction in self.corrections:
            correction.check(self)
        if self.fill.name == "none" and self.rows is not None and self.rows.probes:
            raise SettingError(
                "the probe with the no-fill arm",
                "it reads the late layers' attention over filled rows, and there are none",
                "use fill='ridge' or 'identity', or another selector",
            )
        if self.tail < 1:
            raise SettingError(
                f"a tail of {self.tail} tokens",
                "the last prompt token must run every layer, or there is nothing to predict the first token from",
                "give a tail of 1 or more",
            )
        if self.leading < 0:
            raise SettingError(f"{self.leading} exact leading rows", "it is a count", "give 0 or more")

    @property
    def fill_is_exact(self) -> bool:
        """Whether every row runs every layer whatever else the plan says."""
        return self.fill.name in ("exact", "true")

    @property
    def joint(self) -> bool:
        """Whether the tail runs in the walk, with the prefix: something reads its rows before the late layers do."""
        reads = any(c.reads_tail for c in self.corrections) or (self.rows is not None and self.rows.attends)
        return reads and not self.fill_is_exact

    @property
    def left_to_model(self) -> int:
        """Last tokens that the model's own forward gets: the tail, or one if the tail runs in the walk."""
        return 1 if self.joint else self.tail

    def to_json(self) -> dict[str, Any]:
        """The settings as a JSON object; rows and corrections in words, where there are any."""
        from ridgefill.correct.parse import written

        made = {"fill": self.fill.name, "split": self.split, "tail": self.tail, "leading": self.leading}
        rows = {} if self.rows is None else {"rows": str(self.rows)}
        corrections = {"corrections": written(self.corrections)} if self.corrections else {}
        return made | rows | corrections

    @property
    def shortest(self) -> int:
        """The shortest prompt, in tokens, with a row to fill."""
        return self.tail + self.leading + 1


def layer_of(split: int | float, n_layers: int) -> int:
    """A split given as layer, or as depth d in (0, 1): layer floor(d * L).

    Raises:
        SettingError: not a layer from 1 to L - 1.
    """
    depth = isinstance(split, float) and 0 < split < 1
    # As written in decimals: 0.7 * 90 is 62.99... in binary, and depth 0.7 of 90 layers is layer 63.
    layer = math.floor(Fraction(str(split)) * n_layers) if depth else split
    whole = isinstance(layer, int) or (isinstance(layer, float) and layer.is_integer())
    if not whole or not 1 <= layer <= n_layers - 1:
        raise SettingError(
            f"a split at {split}",
            f"the model has {n_layers} layers, and at least one must lie below the split and one above",
            f"give a layer from 1 to {n_layers - 1}, or a depth such as 0.5",
        )
    return int(layer)


def make_plan(
    n_layers: int,
    maps: RidgeMaps | None = None,
    *,
    preset: str | None = None,
    fill: str | Fill | None = None,
    split: int | float | None = None,
    tail: int | None = None,
    leading: int | None = None,
    rows: Selector | str | None = None,
    corrections: Sequence[Correction] | str | None = None,
) -> FillPlan:
    """A plan from the settings that users name.

    What is not named comes from the preset, then from the plan that the maps were made for, then from the defaults:
    the ridge fill at the maps' split, a tail of `DEFAULT_TAIL`, `DEFAULT_LEADING` leading rows, nothing else.

    Args:
        n_layers: L.
        maps: fitted maps; their split is the default one, and ``fill="ridge"`` needs them.
        preset: a deployment of the paper (`ridgefill.presets`).
        fill: one of ``FILLS``, or an arm. ``"pop"`` is the preset of that name.
        split: layer, or depth in (0, 1); defaults to the maps' split, and without maps to the preset's.
        tail, leading: tokens.
        rows: a selector, or its text (`ridgefill.rows.parse_rows`); "none" for none.
        corrections: of `ridgefill.correct`, or their text; "" for none.

    Raises:
        SettingError: what is missing or out of range, by name.
    """
    if fill == "pop":
        fill, preset = None, "pop"
    made_for: Mapping[str, Any] = (None if maps is None else maps.preset) or {}
    base = _base(made_for.get("preset") if preset is None else preset)
    if preset is None:
        base |= {key: value for key, value in made_for.items() if key in base}
    given = {"fill": fill, "tail": tail, "leading": leading, "rows": rows, "corrections": corrections}
    chosen = base | {key: value for key, value in given.items() if value is not None}
    arm = _arm(chosen["fill"], maps) if isinstance(chosen["fill"], str) else chosen["fill"]
    if split is None:
        split = _split(arm, maps, base, n_layers)
    split = layer_of(split, n_layers)
    if isinstance(arm, Ridge) and split != arm.maps.split:
        raise SettingError(
            f"the ridge fill at split {split}",
            f"the maps were fitted for split {arm.maps.split}",
            "fit maps for that split (`ridgefill fit --splits`), or leave the split to the maps",
        )
    return FillPlan(
        arm,
        split,
        chosen["tail"],
        chosen["leading"],
        _rows(chosen["rows"]),
        _corrections(chosen["corrections"]),
        None if maps is None else maps.tokens,
    )


def _base(name: str | None) -> dict[str, Any]:
    """A preset's settings, or the defaults."""
    if name is None:
        plain = {"fill": "ridge", "tail": DEFAULT_TAIL, "leading": DEFAULT_LEADING}
        return plain | {"rows": None, "corrections": "", "depth": None, "pop": False}
    found = vars(presets.preset(name)).copy()
    found["leading"] = DEFAULT_LEADING if found["leading"] is None else found["leading"]
    return found


def _split(arm: Fill, maps: RidgeMaps | None, base: Mapping[str, Any], n_layers: int) -> int | float:
    if base["pop"]:
        return math.ceil(2 * n_layers / 3)
    if maps is not None:
        return maps.split
    if base["depth"] is not None:
        return base["depth"]
    raise SettingError(f"the {arm.name} fill", "no split was given", "name a split, or give maps")


def _rows(rows: Selector | str | None) -> Selector | None:
    if not isinstance(rows, str):
        return rows
    from ridgefill.rows import parse_rows

    return None if rows.strip() in ("", "none") else parse_rows(rows)


def _corrections(given: Sequence[Correction] | str) -> tuple[Correction, ...]:
    from ridgefill.correct.parse import parse_corrections

    return parse_corrections(given) if isinstance(given, str) else tuple(given)


def _arm(name: str, maps: Any) -> Fill:
    plain: dict[str, type] = {"identity": Identity, "none": NoFill, "exact": Exact, "true": TrueInputs}
    if name in plain:
        return plain[name]()
    if name != "ridge":
        raise SettingError(
            f"the fill {name!r}", "there is none of that name", f"use one of {', '.join(FILLS)}"
        )
    if maps is None:
        raise SettingError(
            "the ridge fill",
            "it needs maps and none were given",
            "fit them with `ridgefill fit`, or use fill='identity'",
        )
    return Ridge(maps)
