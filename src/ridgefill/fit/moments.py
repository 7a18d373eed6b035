"""Streamed second moments of layer inputs: all that a ridge map needs of the calibration text (paper 2.2)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


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


Block = Any  # hashable, the name of a state that is read; splits that read the same state share its sums


class Moments:
    """Sums over rows of x, y and y x^T, in fp64, for every split's X and every later layer's Y.

    One pass serves all splits: layer l's inputs meet the states of every split up to l in one product. All
    are taken less a constant (their mean over the first window), which centring removes again exactly; so a
    mean far larger than the spread costs no digits.

    In most models the state that enters the split layer is the layer's input: X is its Y, held once and
    multiplied once. Where several streams enter a layer (paper 2.2), X is all of them, W wide, and apart from
    the layer's input, d wide; so is what richer maps read, and Y then may be what the layer writes. What is read
    apart is read in blocks: a block that several splits read is multiplied once, and X^T X is symmetric, so that
    half of its blocks are enough.

    Args:
        splits: ascending layers S.
        n_layers: L; moments are kept for layers min(splits) .. L-1.
        devices: layer -> where its sums rest. Products are computed beside the states all the same.
        reads: split -> names of the blocks that are X there, side by side; None where X is the split layer's input.
        single: sums and products of one window are made in fp32, before they are added up in fp64: enough for states
            of the size that a norm gives them, and half the time.
    """

    def __init__(
        self,
        splits: Sequence[int],
        n_layers: int,
        devices: Mapping[int, torch.device],
        *,
        reads: Mapping[int, Sequence[Block]] | None = None,
        single: bool = False,
    ) -> None:
        self.splits, self.n_layers, self.devices = tuple(splits), n_layers, dict(devices)
        self.apart, self.dtype = reads is not None, torch.float32 if single else torch.float64
        self.names = _names(splits, reads or {})
        self.blocks = {s: [self.names.index(b) for b in (reads or {}).get(s, ())] for s in splits}
        self.first = _first(self.blocks)  # block -> the split that reads it first, where its sums rest
        self.rows = 0
        self.shift: dict[int, Tensor] = {}  # layer -> [d]
        self.sums: dict[int, Tensor] = {}  # layer -> [d], of y - shift
        self.products: dict[int, Tensor] = {}  # layer -> [d, columns of what is read up to that layer]
        self.x_shift: dict[int, Tensor] = {}  # block -> [W]; these three only where X is apart
        self.x_sums: dict[int, Tensor] = {}  # block -> [W]
        self.grams: dict[str, Tensor] = {}  # "i.j", of blocks i <= j that one split reads -> [W, W]
        self._x: list[Tensor] = []  # this window's states at the splits passed so far, [m, W] each
        self._joined: Tensor | None = None  # the same side by side

    @property
    def layers(self) -> range:
        """Layers whose inputs are wanted."""
        return range(self.splits[0], self.n_layers)

    def add(self, layer: int, inputs: Tensor, states: Mapping[Block, Tensor] | None = None) -> bool:
        """Adds one window's rows of one layer; call it for every one of `layers`, in ascending order.

        Args:
            inputs: Y, [m, d] inputs of the layer, any float dtype.
            states: block -> [m, W], of what is read at a split, for moments that keep X apart.

        Returns:
            False if the rows are not all finite; the moments are spoilt then.
        """
        if layer == self.splits[0]:
            self.rows += len(inputs)
            self._x = []
        rest = self.devices[layer]
        y, total = _less_shift(inputs, layer, self.shift, rest, self.dtype)
        finite = bool(torch.isfinite(total).all())
        if layer in self.splits and self.apart:
            finite &= self._add_states(layer, states or {})
        elif layer in self.splits:
            self._join([y])
        if (x := self._joined) is not None:  # always: the first of `layers` is a split
            _add(self.sums, layer, total, rest)
            _add_product(self.products, layer, y, x.to(y.device), rest)
        return finite

    def _add_states(self, split: int, states: Mapping[Block, Tensor]) -> bool:
        """The blocks that no earlier split has read, and their products with all that this split reads."""
        rest, finite, new = self.devices[split], True, []
        for block in self.blocks[split]:
            if block < len(self._x):  # names are in order of their first reading
                continue
            x, total = _less_shift(states[self.names[block]], block, self.x_shift, rest, self.dtype)
            _add(self.x_sums, block, total, rest)
            finite &= bool(torch.isfinite(total).all())
            new.append(x)
        self._join(new)
        for i, j in self._pairs(split):
            left, right = self._x[i], self._x[j]
            _add_product(self.grams, f"{i}.{j}", left.to(right.device), right, rest)
        return finite

    def _pairs(self, split: int) -> list[tuple[int, int]]:
        """Pairs of blocks that this split reads, and no earlier one both."""
        earlier = [set(self.blocks[s]) for s in self.splits if s < split]
        every = [(i, j) for i in self.blocks[split] for j in self.blocks[split] if i <= j]
        return [(i, j) for i, j in every if not any(i in e and j in e for e in earlier)]

    def _join(self, new: list[Tensor]) -> None:
        """Puts blocks beside those of this window's earlier splits; all are parts of one tensor, held once."""
        if new:  # none where earlier splits read the same
            parts = [x.to(new[-1].device) for x in (*self._x, *new)]
            self._joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            self._x = list(self._joined.split([x.shape[1] for x in parts], 1))

    def centred(self, split: int, layer: int) -> Centred:
        """Moments of layer ``layer`` against split ``split`` less their means, [d, W], [W] and [d]."""
        product = torch.cat([self.products[layer][:, columns] for columns in self._columns(split)], 1)
        x, shift = self._of_states(split)
        x = x.to(product.device) / self.rows
        y = self.sums[layer] / self.rows
        cross = product.addr_(y, x, alpha=-self.rows)
        return Centred(cross, x + shift.to(x.device), y + self.shift[layer].to(y.device))

    def gram(self, split: int) -> Tensor:
        """X^T X of split ``split`` less its mean, [W, W]."""
        if not self.apart:
            return self.centred(split, split).cross
        blocks, rest = self.blocks[split], self.devices[split]

        def pair(i: int, j: int) -> Tensor:
            return (self.grams[f"{i}.{j}"] if i <= j else self.grams[f"{j}.{i}"].T).to(rest)

        gram = torch.cat([torch.cat([pair(i, j) for j in blocks], 1) for i in blocks])
        x = self._of_states(split)[0].to(rest) / self.rows
        return gram.addr_(x, x, alpha=-self.rows)

    def _columns(self, split: int) -> list[slice]:
        """Where what split ``split`` reads stands in the products."""
        order: Sequence[int] = range(len(self.names)) if self.apart else self.splits
        sums = self.x_sums if self.apart else self.sums
        ends = list(accumulate(len(sums[k]) for k in order if k in sums))
        wanted = self.blocks[split] if self.apart else [self.splits.index(split)]
        return [slice(ends[at] - len(sums[order[at]]), ends[at]) for at in wanted]

    def _of_states(self, split: int) -> tuple[Tensor, Tensor]:
        """Sums of what split ``split`` reads, and what was taken off."""
        if not self.apart:
            return self.sums[split], self.shift[split]
        rest = self.devices[split]
        sums, shift = (
            torch.cat([each[b].to(rest) for b in self.blocks[split]]) for each in (self.x_sums, self.x_shift)
        )
        return sums, shift

    def _named(self) -> dict[str, tuple[dict[Any, Tensor], dict[Any, torch.device]]]:
        """name -> the sums of that name and where each of them rests."""
        layers = {layer: self.devices[layer] for layer in self.layers}
        named: dict[str, tuple[dict[Any, Tensor], dict[Any, torch.device]]] = {
            "shift": (self.shift, layers),
            "sum": (self.sums, layers),
            "product": (self.products, layers),
        }
        if self.apart:
            blocks = {block: self.devices[split] for block, split in self.first.items()}
            named["x_shift"] = self.x_shift, blocks
            named["x_sum"] = self.x_sums, blocks
            named["gram"] = (
                self.grams,
                {f"{i}.{j}": self.devices[s] for s in self.splits for i, j in self._pairs(s)},
            )
        return named

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a checkpoint; `rows` is kept beside them."""
        return {f"{name}.{key}": t for name, (each, _) in self._named().items() for key, t in each.items()}

    def restore(self, tensors: Mapping[str, Tensor], rows: int) -> None:
        """Takes up `tensors` and `rows` again.

        Raises:
            KeyError: a tensor is missing; nothing is changed then.
        """
        named = self._named()
        # Copies, so that the alignment (and with it the last bit of a product) is a fresh tensor's.
        found = {
            name: {k: tensors[f"{name}.{k}"].to(where, copy=True) for k, where in keys.items()}
            for name, (_, keys) in named.items()
        }
        for name, (each, _) in named.items():
            each.clear()
            each.update(found[name])
        self.rows = rows


def product_elements(
    splits: Sequence[int],
    n_layers: int,
    width: int,
    reads: Mapping[int, Sequence[Block]] | None = None,
    block: int = 0,
) -> int:
    """fp64 numbers that the moments of these splits hold, without building them.

    Args:
        width: d, of what the layers' maps give.
        reads: as of `Moments`.
        block: W, columns of each block.
    """
    layers = n_layers - min(splits, default=n_layers)
    total = 2 * width * layers
    if reads is None:
        return total + sum(width * width * (n_layers - s) for s in splits)
    shell = Moments(splits, n_layers, dict.fromkeys(range(n_layers), torch.device("cpu")), reads=reads)
    columns = sum(block * (n_layers - split) for split in shell.first.values())
    pairs = sum(len(shell._pairs(s)) for s in splits)
    return total + width * columns + pairs * block * block + 2 * block * len(shell.names)


def _names(splits: Sequence[int], reads: Mapping[int, Sequence[Block]]) -> list[Block]:
    """Every block once, in the order of the first split that reads it."""
    return list(dict.fromkeys(block for s in splits for block in reads.get(s, ())))


def _first(blocks: Mapping[int, Sequence[int]]) -> dict[int, int]:
    return {block: split for split in sorted(blocks, reverse=True) for block in blocks[split]}


def _less_shift(
    states: Tensor, key: int, shifts: dict[int, Tensor], rest: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy of states [m, d] less the layer's constant, and its sum over rows [d], fp64."""
    rows = _copy(states, dtype)
    if key not in shifts:
        shifts[key] = rows.mean(0).double().to(rest)
    rows -= shifts[key].to(rows.device, dtype)  # a constant of that precision: centring removes what is added
    return rows, rows.sum(0).double()


def _add(sums: dict[int, Tensor], key: int, total: Tensor, rest: torch.device) -> None:
    if key not in sums:
        sums[key] = torch.zeros(len(total), dtype=torch.float64, device=rest)
    sums[key] += total.to(rest)


def _add_product(products: dict[Key, Tensor], key: Key, y: Tensor, x: Tensor, rest: torch.device) -> None:
    """products[key] += y^T x."""
    if key not in products:
        products[key] = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, device=rest)
    if rest == y.device and y.dtype == torch.float64:
        products[key].addmm_(y.T, x)
    else:
        products[key] += (y.T @ x).to(rest)


def _copy(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of [m, d]; on the host where the device has no fp64."""
    if states.device.type == "mps":
        states = states.cpu()
    return states.to(dtype, copy=True)
