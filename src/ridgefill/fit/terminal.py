"""How far the filled states of Gated DeltaNet layers lie from the exact ones, on average (paper 2.3).

    Delta_bar = mean over calibration positions of (exact state - filled state)

per late recurrent layer. Both states are carried through the held-out windows, whose documents no map was fitted
on (they chose the penalty), and compared every `every` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.fill.base import SplitRows
from ridgefill.fit.windows import Window
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.reading import Follower

PAPER_STATES = 62  # compared states of each layer there
SHARES = 4  # a window shorter than a stretch is compared at its quarters


@dataclass
class Terminal:
    """What the comparisons of one split have gathered.

    Attributes:
        states: compared states of each layer.
        sums: layer -> sum of exact - filled, [H_v, dk, dv] fp64.
        squares: layer -> sum of its squared norm.
        exact: layer -> sum of the exact state's squared norm.
    """

    states: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    exact: dict[int, float] = field(default_factory=dict)

    def add(self, layer: int, exact: Tensor, filled: Tensor) -> None:
        """Adds one comparison of states [1, H_v, dk, dv]."""
        exact = exact[0].cpu().double()
        difference = exact - filled[0].cpu().double()
        if layer not in self.sums:
            self.sums[layer] = torch.zeros_like(difference)
            self.squares[layer] = self.exact[layer] = 0.0
        self.sums[layer] += difference
        self.squares[layer] += float(difference.square().sum())
        self.exact[layer] += float(exact.square().sum())

    def offsets(self) -> dict[int, Tensor]:
        """Layer -> Delta_bar [H_v, dk, dv], fp32."""
        return {layer: (total / self.states).float() for layer, total in self.sums.items()}

    def error(self, layer: int) -> float:
        """Root of the mean squared error of the filled state, over that of the exact state."""
        return (self.squares[layer] / self.exact[layer]) ** 0.5 if self.exact[layer] else 0.0

    def gain(self, layer: int) -> float | None:
        """Share of the squared error that the offset removes from a state it was not made of; None with one state.

        Each state is left out of its own offset in turn: d_i - mean of the others = n / (n - 1) (d_i - mean).
        A negative share says that the differences have no common part worth adding.
        """
        n, squares = self.states, self.squares[layer]
        if n < 2 or not squares:
            return None
        spread = squares - float(self.sums[layer].square().sum()) / n
        return 1 - (n / (n - 1)) ** 2 * spread / squares

    def to_json(self) -> dict[str, Any]:
        """For the provenance."""
        gains = {layer: self.gain(layer) for layer in self.sums}
        return {
            "states": self.states,
            "error": {str(layer): round(self.error(layer), 6) for layer in self.sums},
            "gain": {str(k): None if gain is None else round(gain, 6) for k, gain in gains.items()},
        }


def recurrent_layers(decoder: Decoder, split: int) -> list[int]:
    """Layers from ``split`` on that keep a recurrent state."""
    return [i for i in range(split, decoder.n_layers) if decoder.recurrent(i)]


def compare_states(
    decoder: Decoder,
    windows: Sequence[Window],
    maps: Mapping[int, RidgeMaps],
    *,
    leading: int,
    every: int,
) -> dict[int, Terminal]:
    """Carries exact and filled states through ``windows`` and compares them; one walk serves every split.

    Args:
        windows: of text that the maps were not fitted on.
        maps: split -> its maps.
        leading: first rows of a window, which enter the filled state exactly, as in a prefill.
        every: tokens between comparisons; a shorter window is compared at its quarters.

    Returns:
        split -> what its late recurrent layers showed; a split that has none is left out.
    """
    maps = {split: each for split, each in maps.items() if recurrent_layers(decoder, split)}
    found = {split: Terminal() for split in maps}
    for window in windows if found else ():
        stretch = every if len(window.ids) >= every else max(1, len(window.ids) // SHARES)
        walk = _Walk(decoder, maps, leading)
        for start in range(0, len(window.ids) - stretch + 1, stretch):
            walk.advance(window.ids[start : start + stretch].long()[None], start)
            for split, terminal in found.items():
                terminal.states += 1
                for layer in recurrent_layers(decoder, split):
                    terminal.add(layer, walk.state(layer), walk.state(layer, split))
    return found


class _Walk:
    """The exact model over one window, stretch by stretch, and beside it each split's filled states."""

    def __init__(self, decoder: Decoder, maps: Mapping[int, RidgeMaps], leading: int) -> None:
        self.decoder, self.maps, self.leading = decoder, maps, leading
        self.exact = new_cache(decoder.model)
        self.filled = {split: new_cache(decoder.model) for split in maps}
        self.followers = {split: Follower(each) for split, each in maps.items()}
        self.last = max(recurrent_layers(decoder, min(maps)))  # nothing is read of later layers

    def advance(self, ids: Tensor, start: int) -> None:
        """Runs tokens [1, m], the first at position ``start``."""
        decoder, at, states = self.decoder, {}, {}
        wanted = {i for each in self.maps.values() for i in each.reading.layers}
        ids = ids.to(decoder.device(0))
        h = decoder.embed(ids)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        rows = decoder.rows(h, positions, None, self.exact, ids)
        true = max(0, self.leading - start)
        for layer in range(self.last + 1):
            if layer in wanted:
                states[layer] = h
            if layer in self.maps:
                own = {i: states[i] for i in self.maps[layer].reading.layers}
                at[layer] = SplitRows(h, self.followers[layer].of(own), rows)
            if at and decoder.recurrent(layer):
                x = decoder.layer_input(layer, h, rows, self.exact)
                for split, known in at.items():
                    self._fill(layer, split, known, _mixed(h, known.h, true), x, true)
            h = decoder.run_layer(layer, h, rows, self.exact)

    def _fill(self, layer: int, split: int, known: SplitRows, state: Tensor, x: Tensor, true: int) -> None:
        """Carries a filled state on.

        Args:
            known: the rows at the split.
            state: [1, m, W] the split's state; in the first ``true`` rows the one that enters the layer.
            x: [1, m, d] the layer's input.
        """
        maps = self.maps[split]
        if layer in maps.maps:  # the split layer needs none
            x = _mixed(x, maps.predict(layer, known.read.to(x.device)).to(x.dtype), true)
        self.decoder.write_state(layer, x, known.rows, self.filled[split], state)

    def state(self, layer: int, split: int | None = None) -> Tensor:
        """[1, H_v, dk, dv] recurrent state so far, exact or of a split's fill."""
        cache: Any = self.exact if split is None else self.filled[split]
        return cache.layers[layer].recurrent_states[0]


def _mixed(true: Tensor, filled: Tensor, rows: int) -> Tensor:
    """[1, m, d]: the first ``rows`` rows of one, and then those of the other."""
    return torch.cat([true[:, :rows].to(filled.device), filled[:, rows:]], dim=1) if rows else filled
