"""Late recurrent layers in vLLM (paper 2.3): the mixer carries its state over all rows of the step, in order.

Filled rows enter it with their predicted inputs, exact rows with their true ones; of filled rows nothing else of the
layer runs. The stock layer is called for the exact rows alone, and hooks on its mixer put the others among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ridgefill.maps import AffineMap


class LateRecurrent:
    """One late Gated DeltaNet layer.

    Args:
        layer: vLLM's decoder layer.
        given: its map, or None: its input is the split state.
        streamed: the map rests on the host and is copied to the device each time.
    """

    def __init__(self, layer: Any, given: AffineMap | None, streamed: bool = False) -> None:
        self.layer, self.given = layer, given
        if given is not None:
            where = next(layer.parameters())
            self.given = given.to(torch.device("cpu") if streamed else where.device, where.dtype)

    def run(
        self, positions: Tensor, entering: Tensor, rest: Tensor | None, filled: Tensor, others: Others
    ) -> tuple[Tensor, Tensor | None]:
        """The layer for the exact rows; its state goes over all rows of the step.

        Args:
            positions, entering, rest: of the e exact rows, as the stock layer takes them.
            filled: [f, d] predicted inputs of the others.
            others: where both stand among the step's rows.
        """
        with self._among(self.layer.input_layernorm(filled), others):
            if len(entering):
                return self.layer(positions=positions, hidden_states=entering, residual=rest)
            self.layer.linear_attn(hidden_states=entering)
        return entering, rest

    def predicted(self, read: Tensor, h: Tensor) -> Tensor:
        """[f, d] the layer's predicted inputs, of what maps read [f, K] or of the split states [f, d]."""
        if self.given is None:
            return h
        return linear(
            read, *(t.to(read.device, non_blocking=True) for t in (self.given.weight, self.given.bias))
        )

    @contextmanager
    def _among(self, filled: Tensor, others: Others) -> Iterator[None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            exact = kwargs["hidden_states"]
            rows = exact.new_zeros(others.count, exact.shape[-1])
            rows[others.filled], rows[others.exact] = filled, exact
            return (), {"hidden_states": rows}

        handles = [
            self.layer.linear_attn.register_forward_pre_hook(before, with_kwargs=True),
            self.layer.linear_attn.register_forward_hook(lambda module, args, out: out[others.exact]),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Others:
    """Where rows stand among the ``count`` rows of a step.

    Args:
        filled, exact: [f], [e] their places.
    """

    def __init__(self, filled: Tensor, exact: Tensor, count: int) -> None:
        self.filled, self.exact, self.count = filled, exact, count
