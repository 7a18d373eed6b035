"""Choosing lambda_rel on held-out rows, by what the layers would write from predicted inputs (paper 2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.fit.moments import Moments
from ridgefill.fit.solve import Spectrum, in_basis
from ridgefill.models import attention, indexed, updates
from ridgefill.models.decoder import Decoder


@dataclass(frozen=True)
class Heldout:
    """Held-out scores of one split.

    Attributes:
        ridge: lambda_rel -> layer -> cosine of what the layer writes.
        identity: layer -> the same cosine for the identity fill; layers whose input depends on neighbouring
            rows' tokens are left out.
        explained: lambda_rel -> layer -> share of the input's variance that the map explains.
        best: the lambda_rel with the largest mean cosine.
    """

    ridge: dict[float, dict[int, float]]
    identity: dict[int, float]
    explained: dict[float, dict[int, float]]
    best: float

    @property
    def at_end(self) -> bool:
        """Whether the best penalty lies at an end of the grid, so that a wider grid may hold a better one."""
        return len(self.ridge) > 1 and self.best in (min(self.ridge), max(self.ridge))

    def mean(self, lambda_rel: float) -> float:
        """Mean cosine over the layers."""
        return sum(self.ridge[lambda_rel].values()) / len(self.ridge[lambda_rel])

    @property
    def identity_mean(self) -> float:
        """The same for the identity fill; not a number where no layer has a score."""
        return sum(self.identity.values()) / len(self.identity) if self.identity else math.nan


def choose_penalty(
    decoder: Decoder,
    moments: Moments,
    spectrum: Spectrum,
    split: int,
    sample: dict[int, Tensor],
    grid: Sequence[float],
    on_layer: Callable[[], None] = lambda: None,
    state: Tensor | None = None,
    gives: str = "inputs",
    split_state: Tensor | None = None,
    bases: Mapping[int, Tensor] | None = None,
) -> Heldout:
    """Scores every lambda_rel of ``grid`` on held-out rows.

    Predictions are made in the eigenbasis, in fp32: with Z = (X - x_bar) V computed once, a layer and a
    penalty cost one [m, W] x [W, d] product.

    Args:
        sample: layer -> held-out rows [m, d] of its input, in the model's dtype.
        on_layer: called after each layer.
        state: what is read of the same rows at the split, X, [m, W]; by default the split layer's input.
        gives: what the maps give (`Reading.gives`).
        split_state: the same rows of the split state, [m, W], for the identity fill; by default ``state``.
        bases: layer -> `in_basis` of its moments, where they are at hand.
    """
    ridge: dict[float, dict[int, float]] = {value: {} for value in grid}
    explained: dict[float, dict[int, float]] = {value: {} for value in grid}
    identity: dict[int, float] = {}
    device = spectrum.vectors.device
    x_mean = moments.centred(split, split).x_mean.to(device)
    state = sample[split] if state is None else state
    split_state = state if split_state is None else split_state
    z = ((state.to(device, torch.float64) - x_mean) @ spectrum.vectors).float()
    for layer in range(split + 1, decoder.n_layers):
        centred = moments.centred(split, layer)
        basis = in_basis(spectrum, centred) if bases is None else bases[layer]
        true = sample[layer].to(device)
        written, target = write(decoder, layer, true), decoder.target(layer, true[None], gives)[0]
        as_given = finished if decoder.given_ready(layer, gives) else write
        if (unchanged := _identity(decoder, layer, split_state)) is not None:
            identity[layer] = cosine(written, write(decoder, layer, unchanged))
        for value in grid:
            folded = (basis * spectrum.shrinkage(value)).float()
            predicted = z @ folded.T + centred.y_mean.to(device, torch.float32)
            explained[value][layer] = explained_variance(target, predicted)
            ridge[value][layer] = cosine(written, as_given(decoder, layer, predicted.to(true.dtype)))
        on_layer()
    return Heldout(ridge, identity, explained, _best(ridge))


def write(decoder: Decoder, layer: int, x: Tensor) -> tuple[Tensor, ...]:
    """What rows x [m, d] of ``layer``'s input would write, each row by itself; [m, width] each, fp32.

    An attention layer writes keys (before rotary embedding) and values, one with an indexer its keys too. A
    Gated DeltaNet layer updates its state; what its update is made from stands for it: the keys and values that
    enter its convolution.
    """
    module, x = decoder.layers[layer], x[None].to(decoder.device(layer))
    if decoder.recurrent(layer):
        written: tuple[Tensor, ...] = updates.project(module, x)
    else:
        written = decoder.project(layer, x)
        if hasattr(module.self_attn, "indexer"):
            written = (*written, indexed.index_keys(module, x))
    return _rows(written)


def finished(decoder: Decoder, layer: int, both: Tensor) -> tuple[Tensor, ...]:
    """As `write`, of rows [m, 2 H_kv D] of what a map gives that gives keys and values."""
    where = decoder.device(layer)
    return _rows(attention.heads(decoder.layers[layer], *both[None].to(where).chunk(2, -1)))


def _rows(written: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple((t[0] if t.ndim == 3 else t[0].transpose(0, 1).flatten(1)).float() for t in written)


def cosine(true: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> float:
    """Mean over rows and over what is written (keys, values) of the cosine."""
    each = [torch.cosine_similarity(a, b, dim=-1) for a, b in zip(true, other, strict=True)]
    return float(torch.stack(each).double().mean())


def explained_variance(true: Tensor, predicted: Tensor) -> float:
    """1 - |Y - Y^|^2 / |Y - mean Y|^2 over rows [m, d]."""
    y = true.double()
    spread = (y - y.mean(0)).square().sum()
    return float(1 - (y - predicted.double()).square().sum() / spread) if spread > 0 else 0.0


def _identity(decoder: Decoder, layer: int, state: Tensor) -> Tensor | None:
    """The layer's input [m, d] if the split's state [m, W] entered it."""
    try:
        return decoder.layer_input(layer, state.to(decoder.device(layer))[None])[0]
    except SettingError:  # it looks tokens up, and these rows are scattered
        return None


def _best(scores: dict[float, dict[int, float]]) -> float:
    """The penalty of the largest mean score; of equals the larger, which overfits less."""
    return max(scores, key=lambda value: (sum(scores[value].values()), value))
