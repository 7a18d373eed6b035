"""Agreement with the full model: its own greedy continuation, fed to every arm (paper 3.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import BASELINE, Arm
from ridgefill.eval.loss import run_rows, score
from ridgefill.eval.losses import Document, check_context, check_names, exact_item, runs_all
from ridgefill.eval.results import Run
from ridgefill.fill import Exact
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan
from ridgefill.prefill import check_prompt, fill_prompt
from ridgefill.rows.request import Request

CONTINUATION = 512


def measure_agreement(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    documents: Sequence[Document],
    run: Run,
    *,
    continuation: int = CONTINUATION,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Feeds exact's greedy continuation of every document to every arm, and keeps the results in ``run``.

    Metrics: ``top1``, the share of steps where the arm's most likely next token is exact's; ``kl``, the mean per-step
    KL(exact || arm) in nats, and ``kl_median``, its median.

    Facts: ``length`` of the document, ``tokens`` of the continuation, which exact's item holds (``continuation``): a
    run that goes on takes it from there. It has that many tokens whatever they are: an end of text does not end it,
    so that every document rests on as many steps.

    Args:
        continuation: N, the number of steps.
        tick: called once for every arm and document, those that were done before included.

    Raises:
        PromptError: a document is too short for an arm, or longer with its continuation than the model's context;
            before anything runs.
        SettingError: no step is asked for, or two documents have one name.
    """
    decoder = Decoder(model)
    _check(decoder, arms, documents, continuation)
    for document in documents:
        if any(not run.done(arm.name, document.item) for arm in arms):
            _measure(decoder, tokenizer, arms, document, run, continuation, tick)
        else:
            for _ in arms:
                tick()


@torch.no_grad()
def _measure(
    decoder: Decoder,
    tokenizer: Any,
    arms: Sequence[Arm],
    document: Document,
    run: Run,
    steps: int,
    tick: Callable[[], None],
) -> None:
    """Every arm that is missing, on one document."""
    ids = document.ids.to(decoder.model.device)
    known = exact_item(run, document.item).get("continuation")
    exact, tokens = _exact(decoder, _exact_plan(arms, ids.shape[1]), ids, steps, known)
    text = torch.cat([ids, tokens], 1)
    facts = {"length": ids.shape[1], "tokens": steps}
    for arm in arms:
        if not run.done(arm.name, document.item):
            own = exact if runs_all(arm) else _arm_outputs(decoder, arm, ids, tokens, tokenizer)
            found = score(decoder, own, exact, text)
            metrics = {
                "top1": found.same.float().mean().item(),
                "kl": found.kl.mean().item(),
                "kl_median": found.kl.quantile(0.5).item(),
            }
            held = {"continuation": tokens[0].tolist()} if arm.name == BASELINE else {}
            run.add(arm.name, document.item, document.stratum, metrics, **facts, **held)
        tick()


def _exact_plan(arms: Sequence[Arm], n: int) -> FillPlan:
    """Exact, in the same pieces of prefix and tail as the arms: other pieces round otherwise."""
    tail = next((arm.plan(n).tail for arm in arms if runs_all(arm)), 1)
    return FillPlan(Exact(), 1, min(tail, n - 1), leading=0)


def _exact(
    decoder: Decoder, plan: FillPlan, ids: Tensor, steps: int, known: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Exact's outputs [1, N, W] over its continuation, and the continuation [1, N], unless that is ``known``."""
    cache = _prompt_cache(decoder, plan, ids, None)
    if known is None:
        tokens = greedy(decoder, copy.deepcopy(cache), ids[:, -plan.left_to_model :], steps)
    else:
        tokens = torch.tensor([known], dtype=ids.dtype, device=ids.device)
    return _fed(decoder, cache, ids[:, -plan.left_to_model :], tokens), tokens


def _arm_outputs(decoder: Decoder, arm: Arm, ids: Tensor, tokens: Tensor, tokenizer: Any) -> Tensor:
    """The last layer's output [1, N, W] of the arm's rows that predict ``tokens`` [1, N] after the prompt."""
    if arm.compact is not None:
        ids = ids[:, arm.compact.keep(decoder.model, tokenizer, ids)]
    plan = arm.plan(ids.shape[1])
    if plan.fill_is_exact:
        plan = replace(plan, tail=min(plan.tail, ids.shape[1] - 1), leading=0, rows=None, corrections=())
    cache = _prompt_cache(decoder, plan, ids, tokenizer)
    return _fed(decoder, cache, ids[:, -plan.left_to_model :], tokens)


def _prompt_cache(decoder: Decoder, plan: FillPlan, ids: Tensor, tokenizer: Any) -> Any:
    """The cache of a prompt [1, n] but for its last rows, ``plan.left_to_model``; it ends with its question."""
    cache = new_cache(decoder.model)
    _, positions = check_prompt(ids, None, 0, decoder.config)
    fill_prompt(decoder, plan, ids, positions, None, cache, Request(tokenizer, plan.table))
    return cache


def _fed(decoder: Decoder, cache: Any, last: Tensor, tokens: Tensor) -> Tensor:
    """Outputs [1, N, W] of the rows that predict ``tokens`` [1, N], which follow the prompt's ``last`` rows.

    One pass over all of them: the same as one token at a time, to rounding, since every row is exact.
    """
    rows = torch.cat([last, tokens[:, :-1]], 1)
    h = run_rows(decoder, rows, _following(cache, rows), cache)
    return h[:, -tokens.shape[1] :]


def greedy(decoder: Decoder, cache: Any, last: Tensor, steps: int) -> Tensor:
    """The most likely token, ``steps`` times over: [1, steps], whatever the tokens are.

    Args:
        cache: of the prompt's first rows; left with all rows but the last new one.
        last: [1, t] the prompt's last tokens.
    """
    found: list[Tensor] = []
    for _ in range(steps):
        h = run_rows(decoder, last, _following(cache, last), cache)
        last = decoder.final(h[:, -1:]).argmax(-1)
        found.append(last)
    return torch.cat(found, 1)


def _following(cache: Any, rows: Tensor) -> Tensor:
    """Positions [1, m] of the rows that come after what the cache holds."""
    past = cache.get_seq_length()
    return torch.arange(past, past + rows.shape[1], device=rows.device)[None]


def _check(decoder: Decoder, arms: Sequence[Arm], documents: Sequence[Document], steps: int) -> None:
    """Refuses what cannot be measured, before anything runs."""
    if steps < 1:
        raise SettingError(f"a continuation of {steps} tokens", "it has no step", "give 1 or more")
    check_names(documents)
    for document in documents:
        n = document.ids.shape[1]
        check_context(decoder, document, n + steps)
        for arm in arms:
            plan = arm.plan(n)
            needed = 2 if plan.fill_is_exact or arm.compact is not None else plan.shortest
            if n < needed:
                raise PromptError(
                    f"agreement over a document of {n} tokens (arm {arm.name!r}, {document.item})",
                    f"with a tail of {plan.tail} and {plan.leading} leading rows it needs {needed} tokens",
                    "give longer documents, or the arm a shorter tail",
                )
