"""What a search tries: maps that are given or fitted, each with every tail and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgefill.bench.cost import ModelShape
from ridgefill.errors import SettingError
from ridgefill.eval.arms import Arm
from ridgefill.fit import fit
from ridgefill.fit.forms import form_of
from ridgefill.maps import RidgeMaps
from ridgefill.maps_folder import MANIFEST
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from ridgefill.tune.measure import CONTEXT, Budget, OutOfTime, Pace

_FIT_SHARE = 1.5  # of the forward passes alone, roughly


@dataclass(frozen=True)
class Found:
    """Maps, and where they lie.

    Attributes:
        folder: a folder or hub name; None where time did not allow to fit them, and then they are empty.
        given: by the user.
    """

    maps: RidgeMaps
    folder: str | Path | None
    given: bool = False


@dataclass(frozen=True)
class Candidate:
    """One setting to try.

    Attributes:
        arm: named by the setting in words.
        plan: of every prompt.
        found: its maps.
        counted: multiply-accumulates over exact's, or None.
        refused: why the model cannot run it, such as rows by attention that it has not below the split.
    """

    arm: Arm
    plan: FillPlan
    found: Found
    counted: float | None
    refused: str = ""

    @property
    def worth_measuring(self) -> bool:
        """It has maps, the model can run it, and it is not known to compute as much as exact."""
        cheaper = self.counted is None or self.counted < 1
        return self.found.folder is not None and not self.refused and cheaper


def load(folder: str | Path, model: Any, tokenizer: Any, given: bool) -> Found:
    """Maps as they lie in their folder, for their hash is of its files.

    Raises:
        MapsFileError, MapsMismatchError: by name.
    """
    loaded = RidgeMaps.load(folder)
    loaded.check_model(model, tokenizer)
    return Found(loaded, folder, given)


@dataclass(frozen=True)
class Fitting:
    """Fits what is missing, in one pass, within the time.

    Attributes:
        folder: of the maps.
        tokens: to fit on.
    """

    model: Any
    tokenizer: Any
    folder: Path
    tokens: int
    leading: int
    seed: int
    budget: Budget
    pace: Pace
    tick: Callable[[str], None]

    def maps(self, splits: Sequence[int], texts: Sequence[Path]) -> tuple[list[Found], list[str]]:
        """Maps of these layers, fitted now or by an earlier call, and remarks.

        Raises:
            CorpusError, OutputError, UnsupportedModelError: as `ridgefill.fit`.
        """
        to_fit = [split for split in splits if not (self._path(split) / MANIFEST).exists()]
        remarks = []
        if to_fit:
            layers = ", ".join(map(str, to_fit))
            try:
                self.budget.take("the fit", self._estimate)
            except OutOfTime as error:
                empty = [Found(self._unfitted(split), None) for split in to_fit]
                there = [self._load(split) for split in splits if split not in to_fit]
                return [*empty, *there], [f"No maps were fitted for layers {layers}: {error}."]
            self.tick(f"fitting maps for layers {layers}")
            remarks = self._fit(to_fit, texts)
        return [self._load(split) for split in splits], remarks

    def _unfitted(self, split: int) -> RidgeMaps:
        """No maps yet, but what they would read, so that their work can be counted."""
        decoder = Decoder(self.model)
        if split == decoder.n_layers - 1:  # its input is known: there are no maps to read anything
            return RidgeMaps(split, {})
        form, width = form_of(None, None, decoder), decoder.width_in
        reading, columns = form.reading(split), form.columns(split, width)
        down = None if columns is None else torch.zeros(columns, reading.blocks * width)
        return RidgeMaps(split, {}, reading=reading, down=down)

    def _fit(self, splits: Sequence[int], texts: Sequence[Path]) -> list[str]:
        made = fit(
            self.model,
            self.tokenizer,
            texts,
            splits,
            self.folder,
            tokens=self.tokens,
            length=min(CONTEXT, self.pace.tokens),
            leading=self.leading,
            seed=self.seed,
            progress=False,
        )
        warned = {line for each in made.values() for line in each.provenance.get("warnings", ())}
        return [f"The fit says: {line}." for line in sorted(warned)]

    def _estimate(self) -> float:
        return _FIT_SHARE * self.pace.prefill() * self.tokens / self.pace.tokens

    def _load(self, split: int) -> Found:
        return load(self._path(split), self.model, self.tokenizer, given=False)

    def _path(self, split: int) -> Path:
        return self.folder / f"split-{split:02d}"


def candidates_of(
    maps: Sequence[Found],
    tails: Sequence[int],
    rows: Sequence[str | None],
    *,
    leading: int,
    shape: ModelShape,
    tokens: int,
) -> list[Candidate]:
    """Every map with every tail and rows, the least counted compute first; those without a count last.

    Raises:
        SettingError: rows that cannot be read, or the same maps twice.
    """
    made = [
        _candidate(found, tail, each, leading, shape, tokens)
        for found in maps
        for tail in tails
        for each in rows
    ]
    names = [candidate.arm.name for candidate in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(
            "tune", f"the setting {twice!r} is named twice", "name each maps folder and rows once"
        )
    return sorted(made, key=lambda c: (c.counted is None, c.counted, c.arm.name))


def _candidate(
    found: Found, tail: int, rows: str | None, leading: int, shape: ModelShape, tokens: int
) -> Candidate:
    maps = found.maps
    plan = make_plan(shape.layers, maps, tail=tail, leading=leading, rows=rows or "none")
    chosen = "" if plan.rows is None else str(plan.rows)
    name = f"split {plan.split}, tail {tail}" + (f", rows {chosen}" if chosen else "")
    if found.given:  # there may be several of one split
        name += f", maps {maps.content_hash[:8]}"
    words = f"ridge split={plan.split} tail={tail}" + (f" rows={chosen}" if chosen else "")
    notes = "" if found.folder is None else f"maps {maps.content_hash}"
    arm = Arm(name, lambda n: plan, words, notes=notes)
    try:
        return Candidate(arm, plan, found, arm.macs_over_exact(shape, tokens))
    except SettingError as error:
        return Candidate(arm, plan, found, None, f"{error.asked}: {error.why}")
