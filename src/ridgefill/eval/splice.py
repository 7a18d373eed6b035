"""Which part of the filled cache carries the error: exact keys, exact values or both in its place (paper 6.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ridgefill.correct import Correction, KeyRescale, ValueRescale
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import BASELINE, Arm
from ridgefill.eval.intervals import Interval, share_closed
from ridgefill.fill import Fill
from ridgefill.fill.base import predicting
from ridgefill.plan import FillPlan

if TYPE_CHECKING:
    from ridgefill.walk import Prefix

# part -> places in what an attention layer writes; an indexer's keys, the third place, stay filled
PARTS: dict[str, tuple[int, ...]] = {"keys": (0,), "values": (1,), "both": (0, 1)}
_WORDS = {"keys": "exact keys", "values": "exact values", "both": "exact keys and values"}
SCALES: dict[str, type[KeyRescale] | type[ValueRescale]] = {
    "key scale (tail)": KeyRescale,
    "value scale (tail)": ValueRescale,
}
WINDOW = 512  # tail rows that the scales are measured on, as in 2.3


@dataclass(frozen=True)
class Spliced:
    """A fill whose keys, values or both are the exact ones in every filled attention layer (paper 6.6, Table 23).

    The exact parts come from the true inputs of an exact prefix, keys rotated at their own positions. Recurrent
    layers and an indexer's keys stay filled. Rows that run every layer write their own, computed over the spliced
    cache; a selector's probe sees the fill without the splice, so that it chooses the rows that it would choose
    there. The plan's corrections act before the splice: what is exact is not corrected.

    A measurement, not a way to save time: every late layer runs for every prefix row besides.

    Attributes:
        fill: what writes the rest.
        part: "keys", "values" or "both".
        layers: the late attention layers that are spliced; None: all of them.

    Raises:
        SettingError: an unknown part, or a fill that leaves nothing to replace.
    """

    fill: Fill
    part: str = "both"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise SettingError(
                f"a splice of {self.part!r}", "there is no such part", f"use one of {', '.join(PARTS)}"
            )
        if self.fill.name in ("exact", "true", "none"):
            raise SettingError(
                f"a splice into the {self.fill.name!r} arm",
                "it has no filled keys and values to replace",
                "splice into a fill such as ridge or identity",
            )

    @property
    def name(self) -> str:
        """Such as "ridge+exact keys"."""
        where = "" if self.layers is None else f" in {','.join(map(str, self.layers))}"
        return f"{self.fill.name}+{_WORDS[self.part]}{where}"

    @property
    def maps(self) -> Any:
        """The fill's, for corrections; absent where the fill has none."""
        return self.fill.maps  # type: ignore[attr-defined]

    def write(self, prefix: Prefix) -> None:
        """Writes what the fill writes, the spliced part apart.

        Raises:
            SettingError: a layer that is no late attention layer, or a model that has none.
            PromptError: a later turn: the exact keys and values of the turns before it are not there to attend to.
        """
        layers = self._layers(prefix)
        if any(prefix.cache.layers[i].get_seq_length() for i in layers):
            raise PromptError(
                f"the {self.name!r} arm on a later turn",
                "its exact part needs the exact cache of the turns before it",
                "fill the first turn only, or the whole conversation as one prompt",
            )
        splice = _Splice(_TrueLayers.of(prefix), PARTS[self.part], layers)
        plan = replace(prefix.plan, fill=self.fill, corrections=(*prefix.plan.corrections, splice))
        self.fill.write(
            replace(prefix, plan=plan)
        )  # shares the cache, the exact rows and the first sweep's writes

    def _layers(self, prefix: Prefix) -> tuple[int, ...]:
        found = tuple(i for i in prefix.late_layers if not prefix.decoder.recurrent(i))
        wrong = found == () or set(self.layers or found) - set(found)
        if wrong or self.layers == ():
            raise SettingError(
                f"a splice in layers {'of attention' if self.layers is None else list(self.layers)}",
                f"the attention layers from split {prefix.plan.split} up are {list(found) or 'none'}",
                "name some of these, or none for all of them",
            )
        return found if self.layers is None else self.layers


@dataclass
class _TrueLayers:
    """The late layers with every prefix row exact, run beside the cache as far as they were asked for.

    Attributes:
        i: the next layer to run.
        h: [B, m, W] the true state that enters it.
    """

    prefix: Prefix
    beside: Any
    i: int
    h: Tensor

    @classmethod
    def of(cls, prefix: Prefix) -> _TrueLayers:
        return cls(prefix, prefix.empty_cache(), prefix.plan.split, prefix.h_split)

    def writes(self, i: int) -> tuple[Tensor, ...]:
        """What attention layer i, not below an earlier one asked for, writes from its true inputs."""
        decoder, rows = self.prefix.decoder, self.prefix.rows
        while self.i < i:
            self.h = decoder.run_layer(self.i, self.h, rows, self.beside)
            self.i += 1
        x = decoder.layer_input(i, self.h, rows, self.prefix.cache)[:, self.prefix.first_read(i) :]
        return decoder.writes(i, x, rows)


@dataclass(frozen=True)
class _Splice(Correction):
    """Puts the exact parts in the filled ones' places, after all other corrections."""

    true: _TrueLayers
    places: tuple[int, ...]
    layers: tuple[int, ...]
    name: ClassVar[str] = "splice"

    def written(self, prefix: Prefix, i: int, written: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``written`` of layer i with the exact parts."""
        if i not in self.layers:
            return written
        true = self.true.writes(i)
        return tuple(true[k] if k in self.places else part for k, part in enumerate(written))


def splice_arms(base: Arm, *, window: int = WINDOW, layers: Sequence[int] | None = None) -> list[Arm]:
    """The rows of Table 23: the fill, with exact keys, values and both, and with the key and value scale of 2.3.

    Args:
        base: an arm that fills.
        window: tail rows that the scales are measured on.
        layers: late attention layers to splice; the scales then are left out, for they act on all. None: all.

    Returns:
        Arms named as in the table, "ridge + exact keys". The scales are there if the fill predicts layer inputs.

    Raises:
        SettingError: the base fills nothing.
    """
    if base.is_exact or base.compact is not None:
        raise SettingError(
            f"splices into the arm {base.name!r}", "it fills no row", "name a fill such as ridge or identity"
        )
    where = None if layers is None else tuple(layers)
    arms = [base]
    for part, words in _WORDS.items():
        words += "" if where is None else f" in {','.join(map(str, where))}"
        arms.append(_beside(base, words, partial(_with_part, part=part, layers=where)))
    predicts = predicting(base.plan(1 << 20).fill) is not None
    if layers is None and predicts:
        arms += [_beside(base, words, partial(_scaled, kind=k, window=window)) for words, k in SCALES.items()]
    for arm in arms:
        arm.plan(1 << 20)  # refuses now what cannot be planned
    return arms


def _beside(base: Arm, words: str, change: Callable[[FillPlan], FillPlan]) -> Arm:
    return Arm(f"{base.name} + {words}", lambda n: change(base.plan(n)), f"{base.words} + {words}")


def _with_part(plan: FillPlan, part: str, layers: tuple[int, ...] | None) -> FillPlan:
    return replace(plan, fill=Spliced(plan.fill, part, layers))


def _scaled(plan: FillPlan, kind: type[KeyRescale] | type[ValueRescale], window: int) -> FillPlan:
    others = tuple(c for c in plan.corrections if not isinstance(c, kind))
    return replace(plan, corrections=(*others, kind(window)))


def removed(lines: Iterable[Mapping[str, Any]], base: str, metric: str = "novel_nll") -> dict[str, Interval]:
    """What share of the fill's added error each splice takes away, by `ridgefill.eval.intervals.share_closed`.

    Table 23's "loss removed"; for ``metric="score"`` its "gap closed". Items that exact, the fill and the splice all
    have are paired, and resampled within their stratum (paper 3.4).

    Args:
        lines: of items.jsonl.
        base: name of the fill's arm.

    Returns:
        Arm -> share, without exact and the fill. Negative where the arm makes it worse.
    """
    values: dict[str, dict[str, float]] = {}
    strata: dict[str, str] = {}
    for line in lines:
        if metric in line["metrics"]:
            values.setdefault(line["arm"], {})[line["item"]] = line["metrics"][metric]
            strata[line["item"]] = line["stratum"]
    found = {}
    for arm in values.keys() - {base, BASELINE} if base in values and BASELINE in values else ():
        three = [values[base], values[arm], values[BASELINE]]
        items = [item for item in strata if all(item in each for each in three)]
        fill, spliced, exact = ([each[item] for item in items] for each in three)
        if items:
            found[arm] = share_closed(fill, spliced, exact, [strata[item] for item in items])
    return {arm: found[arm] for arm in values if arm in found}
