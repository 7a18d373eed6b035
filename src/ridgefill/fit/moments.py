"""Streamed second moments of layer inputs: all that a ridge map needs of the calibration text (paper 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Centred:
    """Moments of one split's states X and one later layer's states Y, each less its mean; fp64.

    Attributes:
        cross: Y^T X, [d, d]; the Gram matrix X^T X where the layer is the split itself.
        x_mean, y_mean: [d].
    """

    cross: Tensor
    x_mean: Tensor
    y_mean: Tensor


class Moments:
    """Sums over rows of x, y and y x^T, in fp64, for every split's X and every later layer's Y.

    One pass serves all splits: layer l's states meet those of every split up to l in one product. Each
    layer's states are taken less a constant (its mean over the first window), which centring removes again
    exactly; so a mean far larger than the spread costs no digits.

    Args:
        splits: ascending layers S.
        n_layers: L; moments are kept for layers min(splits) .. L-1.
        devices: layer -> where its sums rest. Products are computed beside the states all the same.
    """

    def __init__(self, splits: Sequence[int], n_layers: int, devices: Mapping[int, torch.device]) -> None:
        self.splits, self.n_layers, self.devices = tuple(splits), n_layers, dict(devices)
        self.rows = 0
        self.shift: dict[int, Tensor] = {}  # layer -> [d]
        self.sums: dict[int, Tensor] = {}  # layer -> [d], of y - shift
        self.products: dict[int, Tensor] = {}  # layer -> [d, k d], k the number of splits up to that layer
        self._x: Tensor | None = None  # [m, k d] this window's states at the splits passed so far

    @property
    def layers(self) -> range:
        """Layers whose states are wanted."""
        return range(self.splits[0], self.n_layers)

    def add(self, layer: int, states: Tensor) -> bool:
        """Adds one window's states of one layer; call it for every one of `layers`, in ascending order.

        Args:
            states: [m, d] inputs of the layer, any float dtype.

        Returns:
            False if the states are not all finite; the moments are spoilt then.
        """
        y = _double(states)
        if layer not in self.shift:
            self.shift[layer] = y.mean(0).to(self.devices[layer])
        y -= self.shift[layer].to(y.device)
        total = y.sum(0)
        if layer == self.splits[0]:
            self.rows += len(y)
            self._x = None
        x = None if self._x is None else self._x.to(y.device)
        if layer in self.splits:
            x = y if x is None else torch.cat([x, y], dim=1)
            self._x = x
        if x is not None:  # always: the first of `layers` is a split
            self._accumulate(layer, y, x, total)
        return bool(torch.isfinite(total).all())

    def _accumulate(self, layer: int, y: Tensor, x: Tensor, total: Tensor) -> None:
        rest = self.devices[layer]
        if layer not in self.sums:
            self.sums[layer] = torch.zeros(y.shape[1], dtype=torch.float64, device=rest)
            self.products[layer] = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, device=rest)
        self.sums[layer] += total.to(rest)
        if rest == y.device:
            self.products[layer].addmm_(y.T, x)
        else:
            self.products[layer] += (y.T @ x).to(rest)

    def centred(self, split: int, layer: int) -> Centred:
        """Moments of layer ``layer`` against split ``split`` less their means, [d, d] and [d]."""
        d = len(self.sums[layer])
        at = self.splits.index(split) * d
        product = self.products[layer][:, at : at + d]
        x = self.sums[split].to(product.device) / self.rows
        y = self.sums[layer] / self.rows
        cross = torch.addr(product, y, x, alpha=-self.rows)
        return Centred(cross, x + self.shift[split].to(x.device), y + self.shift[layer].to(y.device))

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a checkpoint; `rows` is kept beside them."""
        named = {"shift": self.shift, "sum": self.sums, "product": self.products}
        return {f"{name}.{layer}": t for name, each in named.items() for layer, t in each.items()}

    def restore(self, tensors: Mapping[str, Tensor], rows: int) -> None:
        """Takes up `tensors` and `rows` again.

        Raises:
            KeyError: a tensor is missing; nothing is changed then.
        """
        # Copies, so that the alignment (and with it the last bit of a product) is a fresh tensor's.
        found = {
            name: {k: tensors[f"{name}.{k}"].to(self.devices[k], copy=True) for k in self.layers}
            for name in ("shift", "sum", "product")
        }
        self.shift, self.sums, self.products, self.rows = found["shift"], found["sum"], found["product"], rows


def product_elements(splits: Sequence[int], n_layers: int, width: int) -> int:
    """fp64 numbers that the moments of these splits hold, without building them."""
    blocks = sum(n_layers - s for s in splits)
    return width * width * blocks + 2 * width * (n_layers - min(splits, default=n_layers))


def _double(states: Tensor) -> Tensor:
    """fp64 copy of [m, d]; on the host where the device has no fp64."""
    if states.device.type == "mps":
        states = states.cpu()
    return states.to(torch.float64, copy=True)
