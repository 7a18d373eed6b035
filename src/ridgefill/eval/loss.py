"""Loss of the tail's tokens, which read the filled prefix (paper 3.1: delta-NLL, an arm's loss minus exact's)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.errors import PromptError
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan
from ridgefill.prefill import check_prompt
from ridgefill.rows.request import Request
from ridgefill.walk import walk

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm

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


@dataclass(frozen=True, eq=False)
class Scores:
    """An arm's rows beside those of the exact arm.

    Attributes:
        nll: [k] nats of the true next tokens, fp32.
        kl: [k] KL(exact || arm) in nats, fp32.
        same: [k] bool, whether the arm's most likely next token is exact's.
    """

    nll: Tensor
    kl: Tensor
    same: Tensor


@torch.no_grad()
def tail_nll(decoder: Decoder, plan: FillPlan, ids: Tensor, tokenizer: Any = None) -> Tensor:
    """Nats of the tail's tokens given the plan's prefix.

    Args:
        ids: [1, n] one document; its first n - T tokens are the prefix.
        tokenizer: for selectors that read text.

    Returns:
        [T - 1] fp32: the tail's first token is predicted by a prefix row, which a fill does not compute.

    Raises:
        PromptError: the document is too short for the plan.
    """
    return nats(decoder, scored_outputs(decoder, plan, ids, plan.tail, tokenizer), ids)


def nats(decoder: Decoder, outputs: Tensor, ids: Tensor) -> Tensor:
    """Nats [k] of the last k tokens of ids [1, n], from the outputs [1, k, W] of the rows that predict them."""
    targets = ids[0, -outputs.shape[1] :].split(_LOGIT_ROWS)
    losses = [
        torch.nn.functional.cross_entropy(logits, part, reduction="none")
        for logits, part in zip(logits_of(decoder, outputs), targets, strict=True)
    ]
    return torch.cat(losses)


def logits_of(decoder: Decoder, outputs: Tensor) -> Iterator[Tensor]:
    """Logits [<= 256, V] fp32, block after block, of the last layer's outputs [1, k, W]."""
    for block in outputs.split(_LOGIT_ROWS, dim=1):
        yield decoder.final(block)[0].float()


@torch.no_grad()
def scored_outputs(
    decoder: Decoder, plan: FillPlan, ids: Tensor, scored: int, tokenizer: Any = None
) -> Tensor:
    """The last layer's output of the rows that predict a document's last ``scored`` - 1 tokens (`scored_plan`).

    The first of the last ``scored`` tokens is predicted by a row that a fill may not compute, so it is not scored.

    A document asks no question: selectors that look for one read the `QUESTION` rows before the scored stretch,
    "the stretch just before the scored continuation" (paper 2.4), and none that is scored.

    Args:
        ids: [1, n] one document.
        tokenizer: for selectors that read text.

    Returns:
        [1, scored - 1, W].

    Raises:
        PromptError: the document is too short for the plan, or longer than the model's context.
    """
    plan = scored_plan(plan, scored)
    check_length(plan, ids.shape[1], scored)
    m = ids.shape[1] - scored
    request = Request(tokenizer, plan.table, question=_before(m), ids=ids)
    _, positions = check_prompt(ids, None, 0, decoder.config)
    # the last row predicts beyond the text
    outputs = _tail_outputs(decoder, plan, ids[:, :-1], positions[:, :-1], request)
    return outputs[:, outputs.shape[1] - (scored - 1) :]


def arm_outputs(decoder: Decoder, arm: Arm, ids: Tensor, scored: int, tokenizer: Any = None) -> Tensor:
    """As `scored_outputs`, of any arm; one that shortens prompts runs what it keeps of the document, exactly."""
    if arm.compact is not None:
        m = ids.shape[1] - scored
        keep = arm.compact.keep(decoder.model, tokenizer, ids, question=_before(m), tail=scored)
        ids = ids[:, keep]
    return scored_outputs(decoder, arm.plan(ids.shape[1]), ids, scored, tokenizer)


def scored_plan(plan: FillPlan, scored: int) -> FillPlan:
    """The plan that scores a document's last ``scored`` - 1 tokens, the same ones for every arm.

    A shorter tail is lengthened: to POP, whose tail is one token, the prompt then ends where the scoring begins, and
    the rest follows it token for token. A longer tail stays, and only its end is scored. An exact plan computes every
    row either way.
    """
    if plan.fill_is_exact:
        return replace(plan, tail=max(1, scored), leading=0, rows=None, corrections=())
    return plan if plan.tail >= scored else replace(plan, tail=scored)


def check_length(plan: FillPlan, n: int, scored: int, where: str = "") -> None:
    """Refuses a document that has no row to fill before its tail, or no token to score.

    Args:
        plan: of `scored_plan`.
        n: the document's tokens.
        where: the arm and document, for the message.

    Raises:
        PromptError: by the length that it would need.
    """
    if n < plan.shortest or scored < 2:
        raise PromptError(
            f"the tail's loss in a document of {n} tokens{where}",
            f"with a tail of {plan.tail} and {plan.leading} leading rows it needs {plan.shortest} tokens "
            "and a tail of 2 or more",
            "give longer text, or a shorter tail",
        )


@torch.no_grad()
def score(decoder: Decoder, outputs: Tensor, exact: Tensor, ids: Tensor) -> Scores:
    """Compares an arm's rows with exact's.

    Args:
        outputs, exact: [1, k, W] last-layer outputs of the rows that predict the last k tokens of ids [1, n].
    """
    nll, kl, same = [], [], []
    targets = ids[0, -outputs.shape[1] :].split(_LOGIT_ROWS)
    pairs = zip(logits_of(decoder, outputs), logits_of(decoder, exact), targets, strict=True)
    for logits, wanted, part in pairs:
        own, other = logits.log_softmax(-1), wanted.log_softmax(-1)
        nll.append(-own.gather(1, part[:, None])[:, 0])
        kl.append((other.exp() * (other - own)).sum(-1).clamp(min=0))  # below 0 only by rounding
        same.append(own.argmax(-1) == other.argmax(-1))
    return Scores(torch.cat(nll), torch.cat(kl), torch.cat(same))


def _before(m: int) -> tuple[int, int]:
    """The rows before row m that stand for a question."""
    return max(0, m - QUESTION), m


def _tail_outputs(
    decoder: Decoder, plan: FillPlan, ids: Tensor, positions: Tensor, request: Request
) -> Tensor:
    """The last layer's output [1, t, W] of the t tail rows at the end of ids [1, m + t]."""
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
    """Runs every layer for rows that follow the cache's: ids [B, m] -> output of the last layer [B, m, W]."""
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions, None, cache, ids)
    for i in range(decoder.n_layers):
        h = decoder.run_layer(i, h, rows, cache)
    decoder.settle(cache, positions)
    return h


def compare(
    decoder: Decoder, arms: Mapping[str, FillPlan], documents: Iterable[Tensor], tokenizer: Any = None
) -> list[dict[str, TailLoss]]:
    """The tail's loss of every arm on the same documents, each [1, n]."""
    return [
        {name: TailLoss.of(tail_nll(decoder, plan, ids, tokenizer)) for name, plan in arms.items()}
        for ids in documents
    ]
