"""Forms of maps, whatever the split: what they read, give and are reduced to (docs/decisions/0009)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgefill.errors import SettingError, UnsupportedModelError

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder
    from ridgefill.reading import Reading


@dataclass(frozen=True)
class Form:
    """What the maps of a fit are like.

    Attributes:
        about: for ``--help`` and the documentation.
        shares: layers read beside the split, as shares of it; 0 is the embedding.
        previous: whether the row before is read at the split as well.
        normed, gives: as in `Reading`.
        rank: columns of the reduction that all layers share (`fit.reduce`), as a share of one state's width; None
            for no reduction.
    """

    about: str
    shares: tuple[float, ...] = ()
    previous: bool = False
    normed: bool = True
    gives: str = "writes"
    rank: float | None = None

    def reading(self, split: int) -> Reading:
        """What maps of this split read."""
        from ridgefill.reading import (
            Reading,
        )  # torch only where it is needed: the command line shows the forms

        layers = tuple(sorted({round(share * split) for share in self.shares} | {split}))
        return Reading(layers, (split,) if self.previous else (), self.normed, self.gives)

    def columns(self, split: int, width: int) -> int | None:
        """Columns of the reduction, of states ``width`` wide; None where there is nothing to reduce."""
        if self.rank is None:
            return None
        wanted = round(self.rank * width)
        return wanted if wanted < self.reading(split).blocks * width else None


FORMS = {
    "plain": Form("the paper's: a layer's input from the split state", normed=False, gives="inputs"),
    "direct": Form("keys and values from the split state: less than half the work"),
    "rich": Form(
        "keys and values from the split state, that of the row before and three lower layers', reduced",
        (0, 1 / 3, 2 / 3),
        True,
        rank=1.0,
    ),
}
DEFAULT = "rich"


def form_of(name: str | None, preset: str | None, decoder: Decoder) -> Form:
    """The form of a name; by default `DEFAULT`, and the plain one for the paper's presets.

    Raises:
        SettingError: there is none of that name.
        UnsupportedModelError: keys and values of a model whose attention layers keep more than these.
    """
    if name is None:
        name = "plain" if preset is not None or decoder.wide else DEFAULT
    if name not in FORMS:
        raise SettingError(f"maps of the form {name!r}", "there is none", f"use {', '.join(FORMS)}")
    form = FORMS[name]
    if form.gives == "writes" and decoder.wide:
        raise UnsupportedModelError(
            f"maps of the form {name!r} for {decoder.config.model_type}",
            "its attention layers keep an indexer's keys beside keys and values",
            "use form='plain'",
        )
    return form
