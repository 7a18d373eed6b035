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

    Attributes:
        name: the layer's in vLLM's dictionaries.

    Raises:
        MapsMismatchError: the map's width is not the model's.
    """

    def __init__(self, layer: Any, given: AffineMap | None, gives: str, streamed: bool = False) -> None:
        self.layer, self.attention = layer, layer.self_attn
        self.name: str = self.attention.attn.layer_name
        self.streamed = streamed
        self.folded: list[Tensor] | None = None
        self.norm: list[Tensor] | None = None  # rows of A and b whose squares this rank sums
        if given is None:
            return
        where = next(layer.parameters())
        made = self._own_heads(given) if gives == "writes" else self._fold(given)
        made = [t.to(torch.device("cpu") if streamed else where.device, where.dtype) for t in made]
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
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        first = rank * a.total_num_kv_heads // ranks * a.head_dim
        own = slice(first, first + a.kv_size)
        return [torch.cat([t[:width][own], t[width:][own]]) for t in (given.weight, given.bias)]

    def _fold(self, given: AffineMap) -> list[Tensor]:
        norm, device = self.layer.input_layernorm, next(self.layer.parameters()).device
        weight, bias = given.weight.to(device).float(), given.bias.to(device).float()
        one = torch.ones(1, len(bias), device=device, dtype=next(norm.parameters()).dtype)
        # whatever a family makes of its stored weights: norm(1) = g / sqrt(1 + eps)
        gain = norm(one).float() * (1 + norm.variance_epsilon) ** 0.5
        project, constant = key_value_weight(self.attention, one)
        self.constant = constant.to(one.dtype)
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        share = torch.arange(len(bias), device=device).tensor_split(ranks)[rank]
        project = project * gain
        return [project @ weight, project @ bias, weight[share], bias[share]]

    def predicted(self, read: Tensor, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys at their positions and values, [f, H_kv, D] each, of this rank's heads.

        Args:
            read: [f, K] what the maps read of the rows; ``h`` [f, d] their split states.
            positions: [f].
        """
        if self.folded is None:
            return self.true(h, positions)
        both = linear(read, *self._beside(self.folded, read))
        if self.norm is not None:
            square = linear(read, *self._beside(self.norm, read)).float().square().sum(-1, keepdim=True)
            if get_tensor_model_parallel_world_size() > 1:
                square = tensor_model_parallel_all_reduce(square)
            eps, width = self.layer.input_layernorm.variance_epsilon, h.shape[-1]
            both = (both * torch.rsqrt(square / width + eps)).to(read.dtype) + self.constant
        keys, values = both.split(self.attention.kv_size, -1)
        return turned(self.attention, keys, positions, "k_norm"), self._by_head(values)

    def true(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the layer's true inputs h [f, d]."""
        a = self.attention
        qkv, _ = a.qkv_proj(self.layer.input_layernorm(h))
        keys, values = qkv[:, -2 * a.kv_size :].split(
            a.kv_size, -1
        )  # before them queries, and gates in some families
        return turned(a, keys, positions, "k_norm"), self._by_head(values)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes keys and values [f, H_kv, D] into the cache's ``slots`` [f]."""
        attend = self.attention.attn
        attend.impl.do_kv_cache_update(attend, keys.contiguous(), values.contiguous(), attend.kv_cache, slots)

    def _by_head(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, self.attention.head_dim))

    def _beside(self, tensors: list[Tensor], rows: Tensor) -> list[Tensor]:
        return [t.to(rows.device, non_blocking=True) for t in tensors] if self.streamed else tensors


def turned(attention: Any, rows: Tensor, positions: Tensor, norm: str) -> Tensor:
    """Projected keys or queries [n, H D], normed where the family does, at their positions; [n, H, D]."""
    if (module := getattr(attention, norm, None)) is not None:
        rows = module(rows.unflatten(-1, (-1, attention.head_dim))).flatten(-2)
    turned, _ = attention.rotary_emb(positions, rows.clone(memory_format=torch.contiguous_format), None)
    return turned.unflatten(-1, (-1, attention.head_dim))


def key_value_weight(attention: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's key and value projections [2 H_kv D, d] and their bias [2 H_kv D], in fp32.

    Read through the layer itself, one unit vector a column: its own weight may be repacked, and empty.

    Args:
        like: [1, d], of the layer's device and dtype.
    """
    own = slice(-2 * attention.kv_size, None)
    zero, _ = attention.qkv_proj(torch.zeros_like(like))
    columns, _ = attention.qkv_proj(torch.eye(like.shape[-1], device=like.device, dtype=like.dtype))
    bias = zero[0, own].float()
    return (columns[:, own].float() - bias).T.contiguous(), bias
