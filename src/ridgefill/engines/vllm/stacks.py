"""A model's layers in two stacks, each compiled as vLLM compiles a whole model; eager where vLLM runs eagerly.

Without this a filled step would run layer by layer in Python beside a stock forward that is compiled, and lose there
what it gains (docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile

_ROWS = {"hidden_states": 0, "positions": -1}


@support_torch_compile(dynamic_arg_dims=_ROWS)
class Lower(nn.Module):
    """Layers below the split; gives the states that entered the wanted layers, ascending, then the split's."""

    def __init__(
        self, *, vllm_config: Any, prefix: str = "", layers: Sequence[nn.Module], wanted: Collection[int]
    ) -> None:
        super().__init__()
        self.layers, self.wanted = nn.ModuleList(layers), tuple(wanted)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """[n, d] embeddings -> [n, d] each."""
        residual, found = None, []
        for i, layer in enumerate(self.layers):
            if i in self.wanted:
                found.append(hidden_states if residual is None else hidden_states + residual)
            hidden_states, residual = layer(
                positions=positions, hidden_states=hidden_states, residual=residual
            )
        return (*found, hidden_states if residual is None else hidden_states + residual)


@support_torch_compile(dynamic_arg_dims=_ROWS)
class Upper(nn.Module):
    """Layers from the split up, and the last norm."""

    def __init__(
        self, *, vllm_config: Any, prefix: str = "", layers: Sequence[nn.Module], norm: nn.Module
    ) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """[e, d] states at the split -> [e, d], ready for the head."""
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(
                positions=positions, hidden_states=hidden_states, residual=residual
            )
        return self.norm(hidden_states, residual)[0]


def stacks(model: Any, split: int, wanted: Collection[int], config: Any) -> tuple[Lower, Upper]:
    """Both stacks of vLLM's ``model.model``; ``config`` is the ``VllmConfig``."""
    layers = list(model.layers)
    with set_model_tag("ridgefill_lower"):
        lower = Lower(vllm_config=config, layers=layers[:split], wanted=wanted)
    with set_model_tag("ridgefill_upper"):
        upper = Upper(vllm_config=config, layers=layers[split:], norm=model.norm)
    return lower, upper
