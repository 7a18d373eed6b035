"""Prompt -> split state -> maps -> filled cache -> exact rows and tail (paper 2.1, Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ridgefill.errors import PromptError
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from ridgefill.rows.request import Request, Span
from ridgefill.stats import PrefillStats, exact_stats
from ridgefill.walk import walk

if TYPE_CHECKING:
    from ridgefill.correct import Correction
    from ridgefill.fill import Fill
    from ridgefill.maps import RidgeMaps
    from ridgefill.rows.base import Selector

__all__ = ["FilledCache", "PrefillStats", "check_prompt", "exact_stats", "fill_prefix", "prefill"]


class FilledCache(DynamicCache):
    """A prompt's cache without its last rows, ready for ``model.generate``; ``stats`` says how it was filled."""

    stats: PrefillStats


@torch.no_grad()
def prefill(
    model: Any,
    ids: Tensor,
    maps: RidgeMaps | None = None,
    *,
    preset: str | None = None,
    tail: int | None = None,
    leading: int | None = None,
    fill: str | Fill | None = None,
    split: int | float | None = None,
    rows: Selector | str | None = None,
    corrections: Sequence[Correction] | str | None = None,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    question: Span | Sequence[Span] | None = None,
) -> FilledCache:
    """Fills a cache for all of a prompt but its tail (paper 2.1).

    ``model.generate(ids, cache=cache)`` (``past_key_values=`` before transformers 5.24) then runs the tail exactly
    and goes on as usual. Where a selector or a correction reads the tail, the tail has run here but for the last
    token, and `generate` runs that one.

    Args:
        model: a causal LM of a supported family.
        ids: [B, n] prompt tokens, left-padded if their lengths differ.
        maps: fitted maps (`RidgeMaps.load`); needed by ``fill="ridge"``, the default.
        preset: a deployment of the paper: "reference", "reference+rows", "27b", "flash-next", "quality" or "pop";
            what is named beside it takes precedence.
        tail: T, last tokens that run every layer.
        leading: first tokens that run every layer.
        fill: "ridge", "identity", "none", "exact", "true" or "pop" (see `make_plan`).
        split: for arms without maps.
        rows: which prefix rows run every layer: a selector of `ridgefill.rows`, or its text (paper 2.4).
        corrections: of `ridgefill.correct`, or their text (paper 2.3).
        attention_mask: [B, n], 0 on padding.
        tokenizer: for selectors that read text; compared with the maps' too.
        question: rows [first, stop) of the question, for selectors that look for its answer or from which it is
            hidden; they take the end of the prompt for it otherwise.

    Returns:
        The cache of the first n - T rows (n - 1 if the tail ran here), with ``.stats``; empty if the prompt has no
        row to fill, so that ``generate`` runs all of it exactly.

    Raises:
        UnsupportedModelError, MapsMismatchError, SettingError, PromptError: by name, before anything runs.
    """
    decoder = Decoder(model)
    if maps is not None:
        maps.check_model(model, tokenizer)
    plan = make_plan(
        decoder.n_layers,
        maps,
        preset=preset,
        fill=fill,
        split=split,
        tail=tail,
        leading=leading,
        rows=rows,
        corrections=corrections,
    )
    mask, positions = check_prompt(ids, attention_mask, 0, model.config)
    cache = FilledCache(config=model.config)
    if ids.shape[1] < plan.shortest:
        cache.stats = exact_stats(
            ids, mask, f"the prompt has {ids.shape[1]} tokens, and filling needs {plan.shortest}"
        )
        return cache
    request = Request(tokenizer, plan.table, question)
    cache.stats = fill_prompt(decoder, plan, ids, positions, mask, cache, request)
    return cache


def fill_prompt(
    decoder: Decoder,
    plan: FillPlan,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: Any,
    request: Request,
) -> PrefillStats:
    """Writes ``cache`` for all of a prompt but the ``plan.left_to_model`` last tokens, which it counts as run.

    Args:
        ids, positions: [B, n]; they follow what the cache holds from earlier turns.
        mask: [B, past + n], 0 on padding, or None.
    """
    left, request = plan.left_to_model, replace(request, ids=ids)
    part = None if mask is None else mask[:, :-left]
    stats, _ = walk(
        decoder, plan, ids[:, :-left], positions[:, :-left], part, cache, request, tail=plan.tail - left
    )
    stats.add_tail(ids[:, -left:], mask)
    return stats


def fill_prefix(
    decoder: Decoder, plan: FillPlan, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
) -> PrefillStats:
    """Writes ``cache`` for the prefix alone, ids [B, m], by a plan that reads nothing of the tail (`walk`)."""
    return walk(decoder, plan, ids, positions, mask, cache, Request())[0]


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
