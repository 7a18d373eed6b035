"""What the maps read of a row, and what they give for it (paper 2.2, and beyond it: docs/decisions/0009).

The paper's map reads the split state and gives a layer's input. Other forms cost as much or less: a map may read the
states that entered some lower layers too, and the same states of the row before, each divided by its root mean square
as a layer's norm would; and it may give the keys and values that the layer writes, with nothing left to project.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgefill.errors import SettingError

States = dict[int, Tensor]  # layer -> the states [..., m, W] that entered it
Source = tuple[int, int]  # a layer, and how many rows before: 0 or 1
GIVES = ("inputs", "writes")
EPS = 1e-6


def unit(h: Tensor, eps: float = EPS) -> Tensor:
    """h / rms(h) over the last dimension, computed in fp32, in h's dtype."""
    wide = h.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(h.dtype)


@dataclass(frozen=True)
class Reading:
    """What maps of one split read and give.

    Attributes:
        layers: ascending; the states that entered them are read, the last one's being the split state.
        previous: of these layers, those whose state of the row before is read as well; a prompt's first row has
            itself before it.
        normed: every state is divided by its root mean square, h / rms(h).
        gives: "inputs", a layer's input; or "writes", the keys (before their norm and rotary embedding) and values
            that an attention layer writes, where a recurrent layer's input is still given.

    Raises:
        SettingError: layers that are not ascending, or a name that there is not.
    """

    layers: tuple[int, ...]
    previous: tuple[int, ...] = ()
    normed: bool = False
    gives: str = "inputs"

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        # a split outside the model is refused by the maps' check, which knows the model
        if not self.layers or min(self.layers[:-1], default=0) < 0 or not ascending:
            raise SettingError(
                f"maps that read layers {list(self.layers)}",
                "they are not ascending layers",
                "name layers up to the split, which is the last, such as 0,8,15",
            )
        if strange := [i for i in self.previous if i not in self.layers]:
            raise SettingError(
                f"maps that read the row before in layers {strange}",
                "of the row itself those layers are not read",
                f"name some of {', '.join(map(str, self.layers))}",
            )
        if self.gives not in GIVES:
            raise SettingError(
                f"maps that give {self.gives!r}", "there is no such thing", f"use one of {', '.join(GIVES)}"
            )

    @classmethod
    def plain(cls, split: int) -> Reading:
        """The paper's: the split state alone gives a layer's input."""
        return cls((split,))

    @property
    def split(self) -> int:
        """S."""
        return self.layers[-1]

    @property
    def is_plain(self) -> bool:
        """Whether it is the paper's."""
        return self == Reading.plain(self.split)

    @property
    def blocks(self) -> int:
        """How many states are read, those of the row before included."""
        return len(self.layers) + len(self.previous)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is read, in order: every layer, and then those whose row before is read."""
        return (*((i, 0) for i in self.layers), *((i, 1) for i in self.previous))

    def parts(self, states: Mapping[int, Tensor]) -> dict[Source, Tensor]:
        """What is read, source by source, [..., m, W] each: `of` puts it side by side."""
        own = {i: self._normed(states[i]) for i in self.layers}
        return {(i, back): _before(own[i]) if back else own[i] for i, back in self.sources}

    def of(self, states: Mapping[int, Tensor], down: Tensor | None = None) -> Tensor:
        """The states side by side, those of the row before at the end; or what a reduction leaves of them.

        Args:
            states: layer -> the states that entered it, [..., m, W], of m rows that follow one another.
            down: [r, blocks * W], the reduction, or None.

        Returns:
            [..., m, blocks * W] or [..., m, r] in the states' dtype; the split state itself, not a copy, for plain
            maps.
        """
        if down is None:
            every = list(self.parts(states).values())
            return every[0] if len(every) == 1 else torch.cat(every, -1)
        own = {i: self._normed(states[i]) for i in self.layers}
        split = own[self.split]
        blocks = down.to(split.device, split.dtype).chunk(self.blocks, -1)
        parts = []  # block after block: they never lie side by side
        for (i, back), block in zip(self.sources, blocks, strict=True):
            part = torch.nn.functional.linear(own[i], block)
            parts.append(_before(part) if back else part)
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def _normed(self, h: Tensor) -> Tensor:
        return unit(h) if self.normed else h

    def to_json(self) -> dict[str, Any]:
        """JSON values, as `from_json` reads them."""
        return {
            "layers": list(self.layers),
            "previous": list(self.previous),
            "normed": self.normed,
            "gives": self.gives,
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Reading:
        """Reads `to_json`.

        Raises:
            KeyError, TypeError, ValueError, SettingError: something else.
        """
        normed, gives = obj["normed"], obj["gives"]
        if not isinstance(normed, bool):
            raise ValueError("normed")
        return cls(_whole(obj["layers"]), _whole(obj["previous"]), normed, gives)


class Reader(Protocol):
    """What a `Follower` reads for: maps, or anything with a reading."""

    @property
    def reading(self) -> Reading:
        """What is read of a row."""
        ...

    def read(self, states: States) -> Tensor:
        """It, of rows that follow one another."""
        ...


class Follower:
    """Reads rows part by part: the first row of a later part has the last one of the part before it.

    Attributes:
        reader: None reads the split state, as arms without maps do.
    """

    def __init__(self, reader: Reader | None) -> None:
        self.reader = reader
        self._last: States = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose entering states are wanted, the split apart."""
        return () if self.reader is None else self.reader.reading.layers[:-1]

    def of(self, states: States) -> Tensor:
        """What is read of the next rows, given [B, m, W] of each layer; the split is the last of them."""
        if self.reader is None:
            return states[max(states)]
        joined = {i: torch.cat([self._last[i], h], 1) if i in self._last else h for i, h in states.items()}
        previous, m = self.reader.reading.previous, states[max(states)].shape[1]
        self._last = {i: h[:, -1:] for i, h in states.items()} if previous else {}
        return self.reader.read(joined)[:, -m:]


def _before(h: Tensor) -> Tensor:
    """The row before each row [..., m, W]; the first has itself before it."""
    return torch.cat([h[..., :1, :], h[..., :-1, :]], -2)


def _whole(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
