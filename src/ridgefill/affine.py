"""An affine map, and where it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def beside(weight: Tensor, rows: Tensor) -> Tensor:
    """A weight where the rows are; on an accelerator in their dtype, on the CPU in its own."""
    return weight.to(device=rows.device, dtype=None if rows.device.type == "cpu" else rows.dtype)


@dataclass(frozen=True)
class AffineMap:
    """A z + b, of what is read of a row, z; h^_l = A h_S + b for the paper's maps (2.2).

    Attributes:
        weight: A, [d_out, d_in].
        bias: b, [d_out].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """h [..., d_in] -> [..., d_out], on the map's device and in its dtype."""
        return torch.nn.functional.linear(h, self.weight, self.bias)

    def beside(self, rows: Tensor) -> AffineMap:
        """The same map where the rows are; on an accelerator in their dtype, on the CPU in its own."""
        return AffineMap(beside(self.weight, rows), beside(self.bias, rows))

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> AffineMap:
        """The same map elsewhere or in another dtype; nothing is copied where nothing changes."""
        return AffineMap(self.weight.to(device=device, dtype=dtype), self.bias.to(device=device, dtype=dtype))
