"""Multiply-accumulates of one layer, by its kind (paper 2.5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ridgefill.errors import SettingError, UnsupportedModelError

# Families whose query projection also makes the gate of the attention's output.
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")


@dataclass(frozen=True)
class LayerCost:
    """Multiply-accumulates of one layer.

    Attributes:
        row: all that a row does there by itself: projections, MLP or routed experts, and in a Gated DeltaNet
            layer the convolution and the state.
        filled: what a filled row still does, its map apart: see `attention` and `delta_net`.
        reads: what a row reads of the rows up to itself, as (multiply-accumulates per row read, how many rows it
            reads at most, or None); empty in a recurrent layer.
        value: the value projection of one row, and as much the key projection; 0 in a recurrent layer.
    """

    row: int
    filled: int
    reads: tuple[tuple[int, int | None], ...] = ()
    value: int = 0


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    window: int | None = None,
    gated: bool = False,
) -> LayerCost:
    """An attention layer; a filled row makes its key and value only.

    Args:
        mlp: one row's MLP.
        window: keys that the sliding window holds, the row's own included.
        gated: the query projection is twice as wide, for a gate on the output.
    """
    wide, value = heads * head_dim, hidden * kv_heads * head_dim
    projections = (3 if gated else 2) * hidden * wide + 2 * value
    return LayerCost(projections + mlp, 2 * value, ((2 * wide, window),), value)


def delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, mlp: int
) -> LayerCost:
    """A Gated DeltaNet layer.

    The state [key_dim, value_dim] of each value head is counted in its recurrent form, the least work that gives
    the result: read for the delta rule (k^T S), rank-one update, read for the output (q^T S), each
    key_dim * value_dim. Chunked kernels do more, at a better rate.

    A filled row projects q, k, v (one convolution state holds all three) and both gates, convolves, and reads
    and updates the state. It makes no output: no q^T S, output gate, output projection or MLP, though an engine
    may run some of them.

    Args:
        kernel: taps of the short convolution over q, k and v.
        mlp: one row's MLP.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed, state = 2 * keys + values, value_heads * key_dim * value_dim
    filled = hidden * (mixed + 2 * value_heads) + kernel * mixed + 2 * state
    return LayerCost(filled + state + 2 * hidden * values + mlp, filled)


def moe(hidden: int, experts: int, chosen: int, width: int, shared: int = 0) -> int:
    """One row of a mixture of experts: router, the chosen gated MLPs of ``width``, the gated one that all share."""
    return hidden * experts + chosen * 3 * hidden * width + (3 * hidden * shared + hidden if shared else 0)


def layer_costs(c: Any) -> tuple[LayerCost, ...]:
    """Every layer of a model.

    Args:
        c: what the family's own config class knows of `shape.KEYS` (None for what it does not), and ``model_type``.

    Raises:
        SettingError, UnsupportedModelError: a key that does not fit, a layer of an unknown kind.
    """
    layers, kinds = c.num_hidden_layers, c.layer_types
    if kinds is None:
        kinds = ["full_attention" if c.sliding_window is None else "sliding_attention"] * layers
    if len(kinds) != layers:
        raise bad_config("layer_types", f"names {len(kinds)} layers where num_hidden_layers is {layers}")
    return tuple(_streams(c, i, _layer(c, kind, _mlp(c, i))) for i, kind in enumerate(kinds))


def _layer(c: Any, kind: str, mlp: int) -> LayerCost:
    if kind == "linear_attention" and c.linear_num_value_heads is not None:
        return delta_net(
            c.hidden_size,
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
            c.linear_conv_kernel_dim,
            mlp,
        )
    if kind in _SPARSE and c.indexer_n_heads is not None:
        return _indexed(c, _attention(c, mlp, c.indexer_budget))
    if kind == "full_attention":
        return _attention(c, mlp)
    if kind == "sliding_attention":
        return _attention(c, mlp, c.sliding_window)
    raise UnsupportedModelError(
        f"count a layer of type {kind!r}",
        "the config does not describe it" if kind in _DESCRIBED else "it is not supported",
        "use a complete config of a supported model",
    )


_SPARSE = ("indexed_attention", "qwen_sparse_attention")  # now, and in transformers before that name
_DESCRIBED = ("linear_attention", *_SPARSE)


def _attention(c: Any, mlp: int, window: int | None = None) -> LayerCost:
    heads = c.num_attention_heads
    head_dim = c.head_dim or c.hidden_size // heads
    gated = c.model_type in _GATED
    return attention(c.hidden_size, heads, c.num_key_value_heads, head_dim, mlp, window, gated)


def _mlp(c: Any, i: int) -> int:
    """One row's MLP in layer i, dense or sparse."""
    experts = c.num_experts or c.num_local_experts
    if not experts or i in (c.mlp_only_layers or ()) or (i + 1) % (c.decoder_sparse_step or 1):
        return 3 * c.hidden_size * c.intermediate_size
    width = c.moe_intermediate_size or c.intermediate_size
    return moe(c.hidden_size, experts, c.num_experts_per_tok, width, c.shared_expert_intermediate_size or 0)


def _indexed(c: Any, layer: LayerCost) -> LayerCost:
    """Sparse attention: its indexer scores one mean key per block; a filled row also makes the indexer's key."""
    key = c.hidden_size * c.indexer_head_dim
    score = c.indexer_n_heads * c.indexer_head_dim // c.indexer_compress_ratio
    return replace(
        layer,
        row=layer.row + (c.indexer_n_heads + 1) * key,
        filled=layer.filled + key,
        reads=(*layer.reads, (score, None)),
    )


def _streams(c: Any, i: int, layer: LayerCost) -> LayerCost:
    """Adds the mixing of parallel residual streams and a layer's n-gram embedding, which filled rows do without."""
    if c.hc_count is None:
        return layer
    wide = c.hc_count * c.hidden_size
    mixing = 2 * (2 * wide * c.hc_lowrank + wide * c.hc_count)  # before the attention and before the MLP
    if i + 1 in (c.ple_layer_ids or ()):
        mixing += c.ple_embed_dim * (wide + c.hidden_size) + wide * c.ple_conv_kernel_size
    return replace(layer, row=layer.row + mixing)


def bad_config(key: str, why: str) -> SettingError:
    """The refusal of a config's key."""
    return SettingError("read the model's config", f"the key {key!r} {why}", "give a complete config.json")
