"""Late keys and values of filled rows, on this tensor-parallel rank (paper 2.1, 2.2).

A map that gives a layer's input x^ = A z + b is folded with the layer's norm and this rank's projections, once:

    (k, v) = r W_kv diag(g) (A z + b) + bias,   r = 1 / rms(x^)

where each rank squares its own share of x^ and only the sum over ranks, one scalar a row, is exchanged. A map that
gives keys and values themselves is cut to this rank's heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from ridgefill.errors import MapsMismatchError
from ridgefill.maps import AffineMap


class LateLayer:
    """One late layer, as far as filled rows need it.

    Args:
        layer: vLLM's decoder layer.
        given: its map, or None: its input is the split state.
        gives: what the map gives (`Reading.gives`).
        streamed: the map rests on the host and is copied to the device each time.

    Raises:
        MapsMismatchError: the map's width is not the model's.
    """

    def __init__(self, layer: Any, given: AffineMap | None, gives: str, streamed: bool = False) -> None:
        self.layer, self.attention = layer, layer.self_attn
        self.streamed = streamed
        self.writes = given is not None and gives == "writes"
        self.norm: list[Tensor] | None = None
        self.folded: list[Tensor] | None = None
        if given is None:
            return
        where = next(layer.parameters())
        tensors = self._own_heads(given) if self.writes else self._fold(given)
        rests = torch.device("cpu") if streamed else where.device
        made = [t.to(rests, where.dtype) for t in tensors]
        if streamed and where.device.type == "cuda":
            made = [t.pin_memory() for t in made]
        self.folded, self.norm = made[:2], made[2:] or None

    def _own_heads(self, given: AffineMap) -> list[Tensor]:
        a = self.attention
        width = a.total_num_kv_heads * a.head_dim
        if given.weight.shape[0] != 2 * width:
            raise MapsMismatchError(
                f"a map that gives {given.weight.shape[0]} numbers a row",
                f"the layer's keys and values have {2 * width}",
                "use maps that were fitted for this model",
            )
        # with fewer heads than ranks, several ranks keep the same one
        first = get_tensor_model_parallel_rank() * a.total_num_kv_heads // get_tensor_model_parallel_world_size()
        own = slice(first * a.head_dim, first * a.head_dim + a.kv_size)
        cut = [torch.cat([t[:width][own], t[width:][own]]).float() for t in (given.weight, given.bias)]
        return cut

    def _fold(self, given: AffineMap) -> list[Tensor]:
        norm, device = self.layer.input_layernorm, next(self.layer.parameters()).device
        weight, bias = given.weight.to(device).float(), given.bias.to(device).float()
        one = torch.ones(1, len(bias), device=device, dtype=next(norm.parameters()).dtype)
        # whatever the family makes of its stored weights: norm(1) = g / sqrt(1 + eps)
        gain = norm(one).float() * (1 + norm.variance_epsilon) ** 0.5
        project, constant = key_value_weight(self.attention, len(bias), one)
        project = project * gain
        self.constant = constant.to(one.dtype)
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        rows = torch.arange(len(bias), device=device).tensor_split(ranks)[rank]
        return [project @ weight, project @ bias, weight[rows], bias[rows]]

    def keys_values(self, read: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before their norm and rotary embedding, and values, of this rank: [f, H_kv D] each.

        Args:
            read: [f, K] what the maps read of the rows; ``h`` [f, d] their split states.
        """
        a = self.attention
        if self.folded is None:
            qkv, _ = a.qkv_proj(self.layer.input_layernorm(h))
            return qkv[:, a.q_size : a.q_size + a.kv_size], qkv[:, a.q_size + a.kv_size :]
        both = linear(read, *self._beside(self.folded, read))
        if self.norm is not None:
            square = linear(read, *self._beside(self.norm, read)).float().square().sum(-1, keepdim=True)
            if get_tensor_model_parallel_world_size() > 1:
                square = tensor_model_parallel_all_reduce(square)
            eps, width = self.layer.input_layernorm.variance_epsilon, h.shape[-1]
            both = (both * torch.rsqrt(square / width + eps)).to(read.dtype) + self.constant
        return both[:, : a.kv_size], both[:, a.kv_size :]

    def write(self, read: Tensor, h: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Writes the rows at ``positions`` [f] into the cache's ``slots`` [f]."""
        a = self.attention
        keys, values = self.keys_values(read, h)
        if (norm := getattr(a, "k_norm", None)) is not None:
            keys = norm(keys.unflatten(-1, (-1, a.head_dim))).flatten(-2)
        keys, _ = a.rotary_emb(positions, keys.contiguous(), None)
        attend = a.attn
        shape = (-1, attend.num_kv_heads, attend.head_size)
        attend.impl.do_kv_cache_update(
            attend, keys.view(shape), values.contiguous().view(shape), attend.kv_cache, slots
        )

    def _beside(self, tensors: list[Tensor], rows: Tensor) -> list[Tensor]:
        return [t.to(rows.device, non_blocking=True) for t in tensors] if self.streamed else tensors


def key_value_weight(attention: Any, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's key and value projections [2 H_kv D, d] and their bias [2 H_kv D], in fp32.

    Read through the layer itself, one unit vector a column: its weight may be repacked, and empty.
    """
    eye = torch.eye(width, device=like.device, dtype=like.dtype)
    zero, _ = attention.qkv_proj(torch.zeros_like(like))
    columns, _ = attention.qkv_proj(eye)
    own = slice(attention.q_size, None)
    bias = zero[0, own].float()
    return (columns[:, own].float() - bias).T.contiguous(), bias
