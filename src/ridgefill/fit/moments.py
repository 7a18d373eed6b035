"""Streamed second moments of layer inputs: all that a ridge map needs of the calibration text (paper 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Centred:
    """Moments of one split's states X and one later layer's inputs Y, each less its mean; fp64.

    Attributes:
        cross: Y^T X, [d, W].
        x_mean: [W].
        y_mean: [d].
    """

    cross: Tensor
    x_mean: Tensor
    y_mean: Tensor


class Moments:
    """Sums over rows of x, y and y x^T, in fp64, for every split's X and every later layer's Y.

    One pass serves all splits: layer l's inputs meet the states of every split up to l in one product. All
    are taken less a constant (their mean over the first window), which centring removes again exactly; so a
    mean far larger than the spread costs no digits.

    In most models the state that enters the split layer is the layer's input: X is its Y, held once and
    multiplied once. Where several streams enter a layer (paper 2.2), X is all of them, W wide, and apart from
    the layer's input, d wide; so is what richer maps read, and Y then may be what the layer writes.

    Args:
        splits: ascending layers S.
        n_layers: L; moments are kept for layers min(splits) .. L-1.
        devices: layer -> where its sums rest. Products are computed beside the states all the same.
        apart: X is another state than the split layer's input.
        single: products of one window are made in fp32, before they are added up in fp64: enough for states of the
            size that a norm gives them, and half the time.
    """

    def __init__(
        self,
        splits: Sequence[int],
        n_layers: int,
        devices: Mapping[int, torch.device],
        *,
        apart: bool = False,
        single: bool = False,
    ) -> None:
        self.splits, self.n_layers, self.devices = tuple(splits), n_layers, dict(devices)
        self.apart, self.dtype = apart, torch.float32 if single else torch.float64
        self.rows = 0
        self.shift: dict[int, Tensor] = {}  # layer -> [d]
        self.sums: dict[int, Tensor] = {}  # layer -> [d], of y - shift
        self.products: dict[int, Tensor] = {}  # layer -> [d, W of every split up to that layer]
        self.x_shift: dict[int, Tensor] = {}  # split -> [W]; these three only where X is apart
        self.x_sums: dict[int, Tensor] = {}  # split -> [W]
        self.grams: dict[int, Tensor] = {}  # split -> [W, W]
        self._x: Tensor | None = None  # [m, k W] this window's states at the splits passed so far

    @property
    def layers(self) -> range:
        """Layers whose inputs are wanted."""
        return range(self.splits[0], self.n_layers)

    def add(self, layer: int, inputs: Tensor, state: Tensor | None = None) -> bool:
        """Adds one window's rows of one layer; call it for every one of `layers`, in ascending order.

        Args:
            inputs: Y, [m, d] inputs of the layer, any float dtype.
            state: X, [m, W] the state that enters the layer, for a split of moments that keep X apart.

        Returns:
            False if the rows are not all finite; the moments are spoilt then.
        """
        if layer == self.splits[0]:
            self.rows += len(inputs)
            self._x = None
        rest = self.devices[layer]
        y, total = _less_shift(inputs, layer, self.shift, rest, self.dtype)
        finite = bool(torch.isfinite(total).all())
        if layer in self.splits and self.apart:
            finite &= self._add_state(layer, inputs if state is None else state)
        elif layer in self.splits:
            self._join(y)
        if (x := self._x) is not None:  # always: the first of `layers` is a split
            _add(self.sums, layer, total, rest)
            _add_product(self.products, layer, y, x.to(y.device), rest)
        return finite

    def _add_state(self, split: int, state: Tensor) -> bool:
        rest = self.devices[split]
        x, total = _less_shift(state, split, self.x_shift, rest, self.dtype)
        self._join(x)
        _add(self.x_sums, split, total, rest)
        _add_product(self.grams, split, x, x, rest)
        return bool(torch.isfinite(total).all())

    def _join(self, x: Tensor) -> None:
        self._x = x if self._x is None else torch.cat([self._x.to(x.device), x], dim=1)

    def centred(self, split: int, layer: int) -> Centred:
        """Moments of layer ``layer`` against split ``split`` less their means, [d, W], [W] and [d]."""
        sums, shift = self._of_states()
        width = len(sums[split])
        at = sum(len(sums[s]) for s in self.splits[: self.splits.index(split)])
        product = self.products[layer][:, at : at + width]
        x = sums[split].to(product.device) / self.rows
        y = self.sums[layer] / self.rows
        cross = torch.addr(product, y, x, alpha=-self.rows)
        return Centred(cross, x + shift[split].to(x.device), y + self.shift[layer].to(y.device))

    def gram(self, split: int) -> Tensor:
        """X^T X of split ``split`` less its mean, [W, W]."""
        if not self.apart:
            return self.centred(split, split).cross
        x = self.x_sums[split] / self.rows
        return torch.addr(self.grams[split], x, x, alpha=-self.rows)

    def _of_states(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return (self.x_sums, self.x_shift) if self.apart else (self.sums, self.shift)

    def _named(self) -> dict[str, tuple[dict[int, Tensor], Sequence[int]]]:
        """name -> the sums of that name and the layers that have one."""
        named: dict[str, tuple[dict[int, Tensor], Sequence[int]]] = {
            "shift": (self.shift, self.layers),
            "sum": (self.sums, self.layers),
            "product": (self.products, self.layers),
        }
        if self.apart:
            named["x_shift"] = self.x_shift, self.splits
            named["x_sum"] = self.x_sums, self.splits
            named["gram"] = self.grams, self.splits
        return named

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a checkpoint; `rows` is kept beside them."""
        return {
            f"{name}.{layer}": t for name, (each, _) in self._named().items() for layer, t in each.items()
        }

    def restore(self, tensors: Mapping[str, Tensor], rows: int) -> None:
        """Takes up `tensors` and `rows` again.

        Raises:
            KeyError: a tensor is missing; nothing is changed then.
        """
        named = self._named()
        # Copies, so that the alignment (and with it the last bit of a product) is a fresh tensor's.
        found = {
            name: {k: tensors[f"{name}.{k}"].to(self.devices[k], copy=True) for k in layers}
            for name, (_, layers) in named.items()
        }
        for name, (each, _) in named.items():
            each.clear()
            each.update(found[name])
        self.rows = rows


def product_elements(
    splits: Sequence[int], n_layers: int, width: int, widths: Mapping[int, int] | None = None
) -> int:
    """fp64 numbers that the moments of these splits hold, without building them.

    Args:
        width: d, of what the layers' maps give.
        widths: split -> what is read there, where that is apart from the layers' inputs.
    """
    read = dict.fromkeys(splits, width) if widths is None else widths
    layers = n_layers - min(splits, default=n_layers)
    total = 2 * width * layers + sum(width * read[s] * (n_layers - s) for s in splits)
    return total if widths is None else total + sum(w * w + 2 * w for w in read.values())


def _less_shift(
    states: Tensor, layer: int, shifts: dict[int, Tensor], rest: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy of states [m, d] less the layer's constant, and its fp64 sum over rows [d]."""
    rows = _copy(states, dtype)
    if layer not in shifts:
        shifts[layer] = rows.mean(0).double().to(rest)
    rows -= shifts[layer].to(
        rows.device, dtype
    )  # a constant of that precision: centring removes what is added
    return rows, rows.sum(0, dtype=torch.float64)


def _add(sums: dict[int, Tensor], layer: int, total: Tensor, rest: torch.device) -> None:
    if layer not in sums:
        sums[layer] = torch.zeros(len(total), dtype=torch.float64, device=rest)
    sums[layer] += total.to(rest)


def _add_product(products: dict[int, Tensor], layer: int, y: Tensor, x: Tensor, rest: torch.device) -> None:
    """products[layer] += y^T x."""
    if layer not in products:
        products[layer] = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, device=rest)
    if rest == y.device and y.dtype == torch.float64:
        products[layer].addmm_(y.T, x)
    else:
        products[layer] += (y.T @ x).to(rest)


def _copy(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of [m, d]; on the host where the device has no fp64."""
    if states.device.type == "mps":
        states = states.cpu()
    return states.to(dtype, copy=True)
