"""Prompt -> split state -> maps -> filled cache -> exact rows and tail (paper 2.1, Figure 5)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ridgefill.compat import new_cache
from ridgefill.devices import wait
from ridgefill.errors import PromptError
from ridgefill.models import attention
from ridgefill.models.decoder import Decoder, Rows
from ridgefill.plan import DEFAULT_LEADING, DEFAULT_TAIL, FillPlan, make_plan

if TYPE_CHECKING:
    from ridgefill.fill import Fill
    from ridgefill.maps import RidgeMaps


@dataclass
class PrefillStats:
    """What one prefill did.

    Attributes:
        tokens: prompt tokens of the call, padding left out, summed over the batch.
        filled: prompt rows whose late layers were filled.
        exact: prompt rows that run every layer (tail, leading rows, or all of them).
        fill: the arm's name.
        reason: why everything ran exactly, or None.
        seconds: wall time of each stage: "lower", "leading", "fill" and, once it has run, "tail".
    """

    tokens: int = 0
    filled: int = 0
    exact: int = 0
    fill: str = "exact"
    reason: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def add_tail(self, ids: Tensor, mask: Tensor | None) -> None:
        """Counts the tail's real tokens, ids [B, T], which run exactly."""
        real = ids.numel() if mask is None else int(mask[:, -ids.shape[1] :].sum())
        self.tokens, self.exact = self.tokens + real, self.exact + real

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Times one stage, waiting for the device at both ends."""
        wait(device)
        start = time.perf_counter()
        yield
        wait(device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class FilledCache(DynamicCache):
    """A prompt's cache without its tail, ready for ``model.generate``; ``stats`` says how it was filled."""

    stats: PrefillStats


@dataclass(frozen=True)
class Leading:
    """The first rows of every sequence, run exactly: what each late layer wrote for them.

    Attributes:
        index: [B, k] their places among the prefix rows (after the padding).
        valid: [B, k] False where a sequence has fewer prefix rows than k.
        cache: their keys and values, layer by layer, [B, H, k, D].
    """

    index: Tensor
    valid: Tensor
    cache: Any


@dataclass(frozen=True)
class Prefix:
    """The prompt without its tail, at the split layer: all an arm needs to write the late layers.

    Attributes:
        h_split: h_S, [B, m, d].
        rows: positions, masks and rotary embeddings of the m prefix rows.
        cache: the cache to write; the layers below the split are written already.
    """

    decoder: Decoder
    plan: FillPlan
    h_split: Tensor
    rows: Rows
    cache: Any
    leading: Leading | None = None

    @property
    def late_layers(self) -> range:
        """Layers S .. L-1."""
        return range(self.plan.split, self.decoder.n_layers)

    def first_read(self, i: int) -> int:
        """The first prefix row that a later token reads in layer i; rows before it need not be written."""
        return self.decoder.first_read(i, self.h_split.shape[1])

    def split_state(self, i: int) -> Tensor:
        """h_S of the rows that layer i must write, [B, m - first_read(i), d]."""
        return self.h_split[:, self.first_read(i) :]

    def write(self, i: int, x: Tensor) -> None:
        """Writes what layer i keeps of input x [B, m - first_read(i), d]; exact leading rows keep their own."""
        keys, values = self.decoder.project(i, x)
        keys = self.decoder.rotate(i, keys, self.rows.last(x.shape[1]))
        if self.leading is not None:
            lead, first = self.leading, self.first_read(i)
            b, j = (lead.valid & (lead.index >= first)).nonzero(as_tuple=True)
            at = lead.index[b, j] - first
            keys[b, :, at] = lead.cache.layers[i].keys[b, :, j].to(keys.device)
            values[b, :, at] = lead.cache.layers[i].values[b, :, j].to(values.device)
        attention.append(self.cache.layers[i], keys, values, self.h_split.shape[1])

    def leading_mask(self) -> Tensor:
        """[B, m] True on the exact leading rows."""
        mask = torch.zeros(self.h_split.shape[:2], dtype=torch.bool, device=self.h_split.device)
        if self.leading is not None:
            b, j = self.leading.valid.nonzero(as_tuple=True)  # places that are not valid repeat a valid one
            mask[b, self.leading.index[b, j]] = True
        return mask

    def empty_cache(self) -> DynamicCache:
        """A scratch cache, for walks that must leave the real one alone."""
        return new_cache(self.decoder.model)


@torch.no_grad()
def prefill(
    model: Any,
    ids: Tensor,
    maps: RidgeMaps | None = None,
    *,
    tail: int = DEFAULT_TAIL,
    leading: int = DEFAULT_LEADING,
    fill: str | Fill = "ridge",
    split: int | float | None = None,
    attention_mask: Tensor | None = None,
) -> FilledCache:
    """Fills a cache for all of a prompt but its tail (paper 2.1).

    ``model.generate(ids, cache=cache)`` (``past_key_values=`` before transformers 5.24) then runs the tail exactly
    and goes on as usual.

    Args:
        model: a causal LM of a supported family.
        ids: [B, n] prompt tokens, left-padded if their lengths differ.
        maps: fitted maps (`RidgeMaps.load`); needed by ``fill="ridge"``.
        tail: T, last tokens that run every layer.
        leading: first tokens that run every layer.
        fill: "ridge", "identity", "none", "exact", "true" or "pop" (see `make_plan`).
        split: for arms without maps.
        attention_mask: [B, n], 0 on padding.

    Returns:
        The cache of the first n - T rows, with ``.stats``; empty if the prompt has no row to fill, so that
        ``generate`` runs all of it exactly.

    Raises:
        UnsupportedModelError, MapsMismatchError, SettingError, PromptError: by name, before anything runs.
    """
    decoder = Decoder(model)
    if maps is not None:
        maps.check_model(model)
    plan = make_plan(decoder.n_layers, maps, fill=fill, split=split, tail=tail, leading=leading)
    mask, positions = check_prompt(ids, attention_mask, 0, model.config)
    cache = FilledCache(config=model.config)
    if ids.shape[1] < plan.shortest:
        cache.stats = exact_stats(
            ids, mask, f"the prompt has {ids.shape[1]} tokens, and filling needs {plan.shortest}"
        )
        return cache
    m = ids.shape[1] - plan.tail
    cache.stats = fill_prefix(
        decoder, plan, ids[:, :m], positions[:, :m], None if mask is None else mask[:, :m], cache
    )
    cache.stats.add_tail(ids[:, m:], mask)
    return cache


def fill_prefix(
    decoder: Decoder, plan: FillPlan, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
) -> PrefillStats:
    """Writes ``cache`` for the prefix rows: lower layers exactly, late layers by the plan (Figure 5).

    Args:
        ids: [B, m] the prompt without its tail; it follows what the cache holds from earlier turns.
        positions: [B, m].
        mask: [B, past + m], 0 on padding, or None.
        cache: a transformers DynamicCache built for this model's config.
    """
    stats = PrefillStats(fill=plan.fill.name)
    past = cache.get_seq_length()
    with stats.stage("lower", ids.device):
        h = decoder.embed(ids)
        rows = decoder.rows(h, positions, mask, cache)
        for i in range(plan.split):
            h = decoder.run_layer(i, h, rows, cache)
    lead = None
    if plan.leading and past == 0 and plan.fill.name != "exact":  # later turns have their sink in the cache
        with stats.stage("leading", ids.device):
            lead = run_leading(decoder, plan, h, positions, mask)
    with stats.stage("fill", ids.device):
        plan.fill.write(Prefix(decoder, plan, h, rows, cache, lead))
    real = ids.numel() if mask is None else int(mask[:, past:].sum())
    exact = real if plan.fill.name == "exact" else (0 if lead is None else int(lead.valid.sum()))
    stats.tokens, stats.exact, stats.filled = real, exact, real - exact
    return stats


def run_leading(
    decoder: Decoder, plan: FillPlan, h_split: Tensor, positions: Tensor, mask: Tensor | None
) -> Leading:
    """Runs the first rows of every sequence through the late layers; they attend only to one another.

    No affine map predicts the attention sink they hold, whose state is a hundred times larger than any other.
    """
    batch, m, d = h_split.shape
    padding = torch.zeros(batch, dtype=torch.long, device=h_split.device)
    if mask is not None:
        padding = m - mask.to(h_split.device).sum(1)
    index = padding[:, None] + torch.arange(plan.leading, device=h_split.device)
    valid, index = index < m, index.clamp(max=m - 1)
    h = h_split.gather(1, index[..., None].expand(-1, -1, d))
    # Plain layers whatever the model's windows: none of these few rows may be forgotten before it is copied.
    cache = DynamicCache()
    rows = decoder.rows(h, positions.expand(batch, -1).gather(1, index), None, cache)
    for i in range(plan.split, decoder.n_layers):
        h = decoder.run_layer(i, h, rows, cache)
    return Leading(index, valid, cache)


def check_prompt(
    ids: Tensor, attention_mask: Tensor | None, past: int, config: Any
) -> tuple[Tensor | None, Tensor]:
    """The mask (None if nothing is padded) and the positions [B, n] of a prompt, as ``generate`` counts them.

    Raises:
        PromptError: empty, longer than the model's context, or padded elsewhere than on the left.
    """
    if ids.ndim != 2 or ids.numel() == 0:
        raise PromptError(
            f"prefill of ids of shape {tuple(ids.shape)}",
            "the prompt is empty",
            "give at least one token, as [B, n]",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and past + ids.shape[1] > longest:
        raise PromptError(
            f"a prompt of {past + ids.shape[1]} tokens",
            f"the model's context is {longest} tokens",
            "shorten the prompt, or load the model with its context extended",
        )
    if attention_mask is not None and attention_mask.shape != (ids.shape[0], past + ids.shape[1]):
        raise PromptError(
            f"an attention mask of shape {tuple(attention_mask.shape)}",
            f"the prompt has shape {tuple(ids.shape)} after {past} cached tokens",
            "give one mask value per token",
        )
    if attention_mask is None or bool(attention_mask.bool().all()):
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        return None, positions
    mask = attention_mask.to(ids.device).long()
    if bool((mask.diff(dim=1) < 0).any()) or bool((mask[:, -1] == 0).any()):
        raise PromptError(
            "a mask with zeros after the first real token",
            "rows can only be filled when the padding is on the left",
            "pad on the left (tokenizer.padding_side = 'left')",
        )
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return mask, positions[:, past:]


def exact_stats(ids: Tensor, mask: Tensor | None, reason: str) -> PrefillStats:
    """Stats of a prompt that runs exactly, and why."""
    stats = PrefillStats(reason=reason)
    stats.add_tail(ids, mask)
    return stats
