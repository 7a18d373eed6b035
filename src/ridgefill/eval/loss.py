"""Loss of the tail's tokens, which read the filled prefix (paper 3.1: delta-NLL, an arm's loss minus exact's)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.errors import PromptError
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan
from ridgefill.prefill import check_prompt
from ridgefill.rows.request import Request
from ridgefill.walk import walk

SCORED = 512  # the fill's loss is larger right after the prefix, so both ends of the tail are scored
QUESTION = 64  # rows that stand for the question of a text that asks none
_LOGIT_ROWS = 256  # rows whose logits exist at once


@dataclass(frozen=True)
class TailLoss:
    """Mean nats per token over the first and the last tokens of the tail, and over all of it."""

    first: float
    last: float
    all: float

    @classmethod
    def of(cls, nll: Tensor, scored: int = SCORED) -> TailLoss:
        """From the nats of every scored tail token, [T - 1]."""
        return cls(nll[:scored].mean().item(), nll[-scored:].mean().item(), nll.mean().item())

    def minus(self, other: TailLoss) -> TailLoss:
        """Delta-NLL against another arm on the same tokens."""
        return TailLoss(self.first - other.first, self.last - other.last, self.all - other.all)


@torch.no_grad()
def tail_nll(decoder: Decoder, plan: FillPlan, ids: Tensor, tokenizer: Any = None) -> Tensor:
    """Nats of the tail's tokens given the plan's prefix.

    A document asks no question: selectors that look for one read the `QUESTION` rows before the tail, "the stretch
    just before the scored continuation" (paper 2.4), and none that is scored.

    Args:
        ids: [1, n] one document; its first n - T tokens are the prefix.
        tokenizer: for selectors that read text.

    Returns:
        [T - 1] fp32: the tail's first token is predicted by a prefix row, which a fill does not compute.

    Raises:
        PromptError: the document is too short for the plan.
    """
    if ids.shape[1] < plan.shortest or plan.tail < 2:
        raise PromptError(
            f"the tail's loss in a document of {ids.shape[1]} tokens",
            f"with a tail of {plan.tail} and {plan.leading} leading rows it needs {plan.shortest} tokens "
            "and a tail of 2 or more",
            "give longer text, or a shorter tail",
        )
    m = ids.shape[1] - plan.tail
    request = Request(tokenizer, plan.table, question=(max(0, m - QUESTION), m), ids=ids)
    _, positions = check_prompt(ids, None, 0, decoder.config)
    # the last row predicts beyond the text
    h = _tail_outputs(decoder, plan, ids[:, :-1], positions[:, :-1], request)
    losses = [
        torch.nn.functional.cross_entropy(
            decoder.final(h[:, i : i + _LOGIT_ROWS])[0].float(),
            ids[0, m + i + 1 : m + i + 1 + _LOGIT_ROWS],
            reduction="none",
        )
        for i in range(0, h.shape[1], _LOGIT_ROWS)
    ]
    return torch.cat(losses)


def _tail_outputs(
    decoder: Decoder, plan: FillPlan, ids: Tensor, positions: Tensor, request: Request
) -> Tensor:
    """The last layer's output [1, t, d] of the t tail rows at the end of ids [1, m + t]."""
    t = plan.tail - 1
    cache = new_cache(decoder.model)
    if plan.joint:
        _, h = walk(decoder, plan, ids, positions, None, cache, request, tail=t)
        if h is None:
            raise RuntimeError("a walk with a tail gave no outputs")
        return h
    walk(decoder, plan, ids[:, :-t], positions[:, :-t], None, cache, request)
    return run_rows(decoder, ids[:, -t:], positions[:, -t:], cache)


def run_rows(decoder: Decoder, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """Runs every layer for rows that follow the cache's: ids [B, m] -> output of the last layer [B, m, d]."""
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions, None, cache)
    for i in range(decoder.n_layers):
        h = decoder.run_layer(i, h, rows, cache)
    return h


def compare(
    decoder: Decoder, arms: Mapping[str, FillPlan], documents: Iterable[Tensor], tokenizer: Any = None
) -> list[dict[str, TailLoss]]:
    """The tail's loss of every arm on the same documents, each [1, n]."""
    return [
        {name: TailLoss.of(tail_nll(decoder, plan, ids, tokenizer)) for name, plan in arms.items()}
        for ids in documents
    ]
