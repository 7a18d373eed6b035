"""What to compute exactly and what to fill (paper 2.1, Table 3, Table 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ridgefill.errors import SettingError
from ridgefill.fill import Exact, Fill, Identity, NoFill, Ridge, TrueInputs

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps

DEFAULT_TAIL = 2048  # paper section 9: "an exact tail of 2,048 to 4,096 tokens"
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
    """

    fill: Fill
    split: int
    tail: int = DEFAULT_TAIL
    leading: int = DEFAULT_LEADING

    def __post_init__(self) -> None:
        if self.tail < 1:
            raise SettingError(
                f"a tail of {self.tail} tokens",
                "the last prompt token must run every layer, or there is nothing to predict the first token from",
                "give a tail of 1 or more",
            )
        if self.leading < 0:
            raise SettingError(f"{self.leading} exact leading rows", "it is a count", "give 0 or more")

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
    fill: str | Fill = "ridge",
    split: int | float | None = None,
    tail: int = DEFAULT_TAIL,
    leading: int = DEFAULT_LEADING,
) -> FillPlan:
    """A plan from the settings that users name.

    Args:
        n_layers: L.
        maps: fitted maps; their split is the default one, and ``fill="ridge"`` needs them.
        fill: one of ``FILLS``, or an arm. ``"pop"`` is the published POP: the identity fill from layer
            ceil(2L/3) with a one-token tail; it sets split, tail and leading rows itself.
        split: layer, or depth in (0, 1); defaults to the maps' split.

    Raises:
        SettingError: what is missing or out of range, by name.
    """
    if fill == "pop":
        return FillPlan(Identity(), split=math.ceil(2 * n_layers / 3), tail=1, leading=0)
    arm = _arm(fill, maps) if isinstance(fill, str) else fill
    if split is None:
        if maps is None:
            raise SettingError(f"the {arm.name} fill", "no split was given", "name a split, or give maps")
        split = maps.split
    split = layer_of(split, n_layers)
    if isinstance(arm, Ridge) and split != arm.maps.split:
        raise SettingError(
            f"the ridge fill at split {split}",
            f"the maps were fitted for split {arm.maps.split}",
            "fit maps for that split (`ridgefill fit --splits`), or leave the split to the maps",
        )
    return FillPlan(arm, split, tail, leading)


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
