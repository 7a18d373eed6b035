"""Exact rows among filled ones: gathered, run through a late layer together, scattered back (paper 2.4).

The layer is the model's own. It sees k scattered rows as one batch; a stand-in for the cache puts their keys and
values into their places among the filled ones and hands back all of them; a stand-in for the mask says where in the
prompt each row is. So a row costs what its own work is, and each weight is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ridgefill.models import tail_attention

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder, Rows

NAME = "ridgefill_rows"
BLOCK = 256  # scattered rows whose attention runs at once: the keys after the last of them are not read
BAND = 128  # the same where the keys before the first of them need no mask


@dataclass(frozen=True)
class Places:
    """Where gathered rows stand; given to the attention in place of a mask.

    Attributes:
        slots: [B, k] each row's slot among the cached keys, ascending; the last ``tail`` rows are the last slots.
        tail: how many of them are consecutive rows at the end.
        first_key: [B] slots before it hold padding.
        window: the layer's sliding window, or None.
        received: if given, attention probabilities are added to it: [B, heads, slots].
        peak: keep the largest in ``received`` instead of adding.
    """

    slots: Tensor
    tail: int
    first_key: Tensor
    window: int | None = None
    received: Tensor | None = None
    peak: bool = False

    def mask(self, rows: slice, keys: slice) -> Tensor:
        """[B, 1, rows, keys] True where a row may look."""
        at = self.slots[:, rows, None]
        key = torch.arange(keys.start, keys.stop, device=at.device)
        seen = (key <= at) & (key >= self.first_key[:, None, None])
        if self.window is not None:
            seen &= key > at - self.window
        return (seen | (key == at))[
            :, None
        ]  # padding sees itself: a row with nothing to see would be undefined


class Scatter:
    """Stands in for the cache while a layer runs on gathered rows.

    Args:
        buffers: what the layer keeps of every row, keys and values [B, H, slots, D] first; written in place.
        slots: [B, k] where the gathered rows' own belong.
    """

    is_compileable = False

    def __init__(self, buffers: tuple[Tensor, ...], slots: Tensor) -> None:
        self.buffers, self.slots = buffers, slots

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Puts keys, values [B, H, k, D] into their slots; returns all of them."""
        self.put(0, keys)
        self.put(1, values)
        return self.buffers[:2]

    def put(self, which: int, rows: Tensor) -> Tensor:
        """Puts rows [B, ..., k, D] into one of the buffers; returns the whole of it."""
        buffer = self.buffers[which]
        slots = self.slots.to(buffer.device)
        index = slots.view(len(slots), *[1] * (rows.ndim - 3), -1, 1).expand(*rows.shape)
        buffer.scatter_(-2, index, rows.to(buffer.dtype))
        return buffer

    def get_seq_length(self, *_: Any) -> int:
        """Slots."""
        return self.buffers[0].shape[-2]


class ReadOnly(Scatter):
    """A `Scatter` whose buffers hold the gathered rows already."""

    def put(self, which: int, rows: Tensor) -> Tensor:
        """The whole buffer, unchanged."""
        return self.buffers[which]


def run_gathered(decoder: Decoder, i: int, h: Tensor, rows: Rows, places: Places, scatter: Scatter) -> Tensor:
    """Attention layer i, whole, on gathered rows h [B, k, d] -> [B, k, d]; their writes go where ``scatter`` says.

    Args:
        rows: the gathered rows' own positions and rotary embeddings.
    """
    places = replace(places, window=decoder.window(i))
    with _attention(decoder.config, places) as dense:
        mask: Any = _float_mask(places, scatter.get_seq_length(), h) if dense else places
        return decoder.run_layer(i, h, replace(rows, masks=mask), scatter)


def row_index(at: Tensor, rows: Tensor) -> Tensor:
    """Places [B, k] as an index of whole rows [B, k, width], for rows [B, ..., width]."""
    return at.to(rows.device, torch.long)[..., None].expand(-1, -1, rows.shape[-1])


def gather_rows(rows: Rows, at: Tensor) -> Rows:
    """The rows at places ``at`` [B, k], without their masks."""

    def take(t: Tensor) -> Tensor:  # [B or 1, n, ...]
        index = at.to(t.device).view(*at.shape, *[1] * (t.ndim - 2)).expand(-1, -1, *t.shape[2:])
        return t.expand(at.shape[0], *t.shape[1:]).gather(1, index)

    return _each_tensor(take, rows)


def join_rows(first: Rows, second: Rows) -> Rows:
    """The rows of two stretches as one, without their masks."""
    return _each_tensor(lambda a, b: torch.cat([a, b], dim=1), first, second)


def one_sequence(rows: Rows, b: int) -> Rows:
    """The rows of sequence b alone, as a batch of one, without their masks."""
    return _each_tensor(lambda t: t[b : b + 1], rows)


def _each_tensor(f: Callable[..., Tensor], *rows: Rows) -> Rows:
    """``f`` over positions and rotary embeddings, in whatever nest of dicts and tuples a family keeps them."""

    def walk(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        if isinstance(parts[0], dict):
            return {key: walk(*(p[key] for p in parts)) for key in parts[0]}
        if isinstance(parts[0], tuple):
            return tuple(walk(*p) for p in zip(*parts, strict=True))
        return f(*parts)

    return replace(
        rows[0],
        positions=f(*(r.positions for r in rows)),
        masks=None,
        ropes=walk(*(r.ropes for r in rows)),
        seen=None,
        tokens=_tokens(f, rows),
    )


def _tokens(f: Callable[..., Tensor], rows: tuple[Rows, ...]) -> Any:
    known = [r.tokens for r in rows if r.tokens is not None]
    if len(known) < len(rows):
        return None
    real = [mask for _, mask in known if mask is not None]
    return f(*(ids for ids, _ in known)), f(*real) if len(real) == len(rows) else None


@contextmanager
def _attention(config: Any, places: Places) -> Iterator[bool]:
    """The model's attention while gathered rows run; True if it wants a dense mask.

    Soft caps and sinks are the model's own eager code's business, unless the attention is to be read, too: then
    `attend` computes them itself.
    """
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attend)
    stock = config._attn_implementation
    own = getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss"
    dense = places.received is None and (stock == "eager" or (own and stock != "sdpa"))
    config._attn_implementation = "eager" if dense else NAME
    try:
        yield dense
    finally:
        config._attn_implementation = stock


def _float_mask(places: Places, slots: int, h: Tensor) -> Tensor:
    """[B, 1, k, slots] in h's dtype: 0 where a row may look, the lowest number elsewhere."""
    seen = places.mask(slice(None), slice(0, slots))
    return torch.zeros(seen.shape, dtype=h.dtype, device=h.device).masked_fill(
        ~seen, torch.finfo(h.dtype).min
    )


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Places, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of gathered rows.

    Args:
        query: [B, H, k, D].
        key, value: [B, H_kv, slots, D].
        attention_mask: where the rows stand.

    Returns:
        [B, k, H, D], None.
    """
    places = attention_mask
    k, scattered = query.shape[2], query.shape[2] - places.tail
    plain = places.window is None and not bool(places.first_key.any()) and places.received is None
    if not (plain and tail_attention.kernel_for(query)):
        run = _blocks if places.received is None else _scored
        return run(query, key, value, places, slice(0, k), kwargs), None
    parts = []
    for start in range(0, scattered, BAND):
        block = slice(start, min(start + BAND, scattered))
        parts.append(_band(query[:, :, block], key, value, places, block, kwargs.get("scaling")))
    if places.tail:
        out, _ = tail_attention.attend(module, query[:, :, scattered:], key, value, None, **kwargs)
        parts.append(out)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0], None


def _band(q: Tensor, k: Tensor, v: Tensor, places: Places, block: slice, scale: float | None) -> Tensor:
    """[B, m, H, D] of a block of rows: all see the keys before the first of them, and need no mask for those."""
    slots, (batch, heads), rows = places.slots[:, block], k.shape[:2], q.shape[2]
    first, stop = int(slots.min()), int(slots.max()) + 1
    packed = q.reshape(batch, heads, -1, q.shape[3])
    seen = places.mask(block, slice(first, stop)).repeat(1, 1, q.shape[1] // heads, 1)
    mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    among = tail_attention.flash(packed, k[:, :, first:stop], v[:, :, first:stop], scale, mask=mask)
    out = among[0]
    if first:
        before = tail_attention.flash(packed, k[:, :, :first], v[:, :, :first], scale)
        out = tail_attention.merged(among, before)
    return out.reshape(batch, q.shape[1], rows, v.shape[3]).transpose(1, 2)


def _blocks(q: Tensor, k: Tensor, v: Tensor, places: Places, rows: slice, kwargs: dict[str, Any]) -> Tensor:
    """[B, m, H, D] of the given rows, block by block, each over the keys that any of its rows may see."""
    batch, heads, dim = k.shape[0], k.shape[1], v.shape[3]
    shared = q.shape[1] // heads
    parts = []
    for start in range(rows.start, rows.stop, BLOCK):
        stop = min(start + BLOCK, rows.stop)
        block = slice(start, stop)
        keys = _seen(places, block)
        # The heads that share a key head ride as extra query rows: each key is read once for all of them.
        packed = q[:, :, start - rows.start : stop - rows.start].reshape(batch, heads, -1, q.shape[3])
        out = torch.nn.functional.scaled_dot_product_attention(
            packed,
            k[:, :, keys],
            v[:, :, keys],
            attn_mask=places.mask(block, keys).repeat(1, 1, shared, 1),
            scale=kwargs.get("scaling"),
        )
        parts.append(out.reshape(batch, q.shape[1], stop - start, dim).transpose(1, 2))
    return torch.cat(parts, 1)


def _seen(places: Places, block: slice) -> slice:
    """The keys that any row of the block may see."""
    slots = places.slots[:, block]
    first = int(places.first_key.min())
    if places.window is not None:
        first = max(first, int(slots.min()) - places.window + 1)
    return slice(first, int(slots.max()) + 1)


def _scored(q: Tensor, k: Tensor, v: Tensor, places: Places, rows: slice, kwargs: dict[str, Any]) -> Tensor:
    """As `_blocks`, and adds the probabilities to ``places.received``; one key head at a time."""
    received, shared = places.received, q.shape[1] // k.shape[1]
    if received is None:
        raise RuntimeError("nowhere to add the attention to")
    mask = places.mask(rows, slice(0, k.shape[2]))
    scale = kwargs.get("scaling") or q.shape[3] ** -0.5
    cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    parts = []
    for head in range(k.shape[1]):
        mine = slice(head * shared, (head + 1) * shared)
        logits = (q[:, mine].float() @ k[:, head, None].float().transpose(-1, -2)) * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        logits = logits.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks[mine].float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink], -1)
        p = logits.softmax(-1)[..., : k.shape[2]]
        if places.peak:
            received[:, mine] = torch.maximum(received[:, mine], p.amax(2))
        else:
            received[:, mine] += p.sum(2)
        parts.append(p.to(v.dtype) @ v[:, head, None])
    return torch.cat(parts, 1).transpose(1, 2)


def kept(cache_layer: Any) -> tuple[Tensor, ...]:
    """What the layer's part of a cache holds: keys, values [B, H, slots, D], an indexer's keys [B, slots, D_i]."""
    index_keys = getattr(cache_layer, "indexer_keys", None)
    return (cache_layer.keys, cache_layer.values, *(() if index_keys is None else (index_keys,)))


def commit(cache_layer: Any, buffers: tuple[Tensor, ...], rows: int) -> None:
    """Makes full-length buffers (what the cache held, then ``rows`` rows) the layer's part of the cache."""
    keys, values = buffers[:2]
    if not cache_layer.is_initialized:
        cache_layer.lazy_initialization(keys, values)
    window = getattr(cache_layer, "sliding_window", None)
    if window is not None:
        keys, values = keys[:, :, -window + 1 :], values[:, :, -window + 1 :]
        cache_layer.cumulative_length += rows
    cache_layer.keys, cache_layer.values = keys, values
    if len(buffers) > 2:
        if not cache_layer.is_indexer_initialized:
            cache_layer.lazy_initialization_indexer(buffers[2])
        cache_layer.indexer_keys = buffers[2]


def held(cache_layer: Any) -> list[Tensor]:
    """Every tensor of a layer's part of a cache: keys, values, an indexer's keys, recurrent and conv states."""
    names = ("keys", "values", "indexer_keys", "conv_states", "recurrent_states")
    parts = [found for name in names if (found := getattr(cache_layer, name, None)) is not None]
    return [t for part in parts for t in (part.values() if isinstance(part, dict) else [part])]
