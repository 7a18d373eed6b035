"""Terminal-state correction of Gated DeltaNet layers (paper 2.3, Appendix H)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ridgefill.correct.base import Correction
from ridgefill.errors import SettingError

if TYPE_CHECKING:
    from ridgefill.plan import FillPlan
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class TerminalState(Correction):
    """state += rho * Delta_bar, once, at the end of the prefix.

    Delta_bar, the mean of exact minus filled state, comes with the maps (`ridgefill fit` measures it where the model
    has Gated DeltaNet layers); rho is the filled rows' share of the state, from the request's own gates.

    Attributes:
        scale: multiplies the correction; 0 changes nothing, bit for bit.
    """

    scale: float = 1.0

    name: ClassVar[str] = "terminal state"

    def check(self, plan: FillPlan) -> None:
        """Raises SettingError if the maps hold no state differences."""
        if not getattr(getattr(plan.fill, "maps", None), "terminal", None):
            raise SettingError(
                "the terminal-state correction",
                "it needs maps that hold mean state differences, which `ridgefill fit` measures on models with "
                "Gated DeltaNet layers",
                "fit the maps again with this version, or leave the correction out",
            )

    def state(self, prefix: Prefix, i: int, x: Tensor) -> None:
        """Adds rho * Delta_bar to layer i's recurrent state [B, H_v, dk, dv]."""
        delta = prefix.plan.fill.maps.terminal.get(i)  # type: ignore[attr-defined]
        if self.scale == 0 or delta is None:
            return
        state = prefix.cache.layers[i].recurrent_states[0]
        rho = filled_share(prefix.decoder.gates(i, x, prefix.rows), ~prefix.exact_mask(), prefix.real_mask())
        state += (self.scale * rho[..., None, None] * delta.to(state.device)).to(state.dtype)


def filled_share(gates: Tensor, filled: Tensor, real: Tensor) -> Tensor:
    """rho: the share of the state's weight that comes from filled rows (FORMULAS 2.3).

    Args:
        gates: [B, m, H] log-gates; a row's weight is the product of the gates after it.
        filled, real: [B, m] bool; rows that are not real are padding and weigh nothing.

    Returns:
        [B, H] fp32 in [0, 1].
    """
    later = gates.float().flip(1).cumsum(1).flip(1) - gates.float()  # sum over j > i
    weight = later.exp() * real[..., None].to(gates.device)
    share = (weight * filled[..., None].to(gates.device)).sum(1) / weight.sum(1)
    return torch.nan_to_num(share).clamp(0, 1)
