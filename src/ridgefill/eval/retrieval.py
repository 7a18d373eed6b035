"""Retrieval from filled rows, arm by arm (paper 3.1): needles that are never in the exact tail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.haystack import Item, ruler_score

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm
    from ridgefill.eval.results import Run

SPARE = 32  # tokens that an answer may spend on other words than the values


def measure_retrieval(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    items: Sequence[tuple[str, str, Item]],
    run: Run,
    *,
    new_tokens: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Asks every arm for the needles of every item; keeps RULER's score, and length, depth, answer, seconds.

    Args:
        items: (item id, stratum, item of `ridgefill.eval.haystack.Haystack`).
        new_tokens: how long an answer may be; None: as long as the values and `SPARE` tokens.
        tick: called once for every arm and item, those included that ``run`` has already.

    Raises:
        SettingError: no items, or an id that comes twice.
        PromptError: a prompt that does not fit the model's context, or in which an arm has no row to fill; before
            anything runs.
    """
    check_items(model, tokenizer, arms, [(name, item) for name, _, item in items], new_tokens)
    for name, stratum, item in items:
        limit = answer_limit(tokenizer, item.answers) if new_tokens is None else new_tokens
        for arm in arms:
            if not run.done(arm.name, name):
                said = say(model, tokenizer, arm, item.ids, limit, item.question)
                metrics = {"score": ruler_score(said.text, item.answers)}
                facts = {"length": said.length, "depth": item.depth}
                run.add(arm.name, name, stratum, metrics, **facts, answer=said.text, seconds=said.seconds)
            tick()


@dataclass(frozen=True)
class Said:
    """One answer.

    Attributes:
        ids: [1, n + new] prompt and answer.
        length: n.
        text: the answer, without special tokens.
        seconds: from the prompt to the answer's last token.
    """

    ids: Tensor
    length: int
    text: str
    seconds: float


def say(
    model: Any,
    tokenizer: Any,
    arm: Arm,
    ids: Tensor,
    limit: int,
    question: tuple[int, int] | None = None,
    **kwargs: Any,
) -> Said:
    """The arm's greedy answer to ids [1, n], of ``limit`` tokens at most.

    Args:
        question: rows [first, stop) of the question, for selectors.
        kwargs: of ``model.generate``, such as a cache.
    """
    start = time.perf_counter()
    out = arm.generate(model, tokenizer, ids, question=question, max_new_tokens=limit, **kwargs)
    seconds = time.perf_counter() - start
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
    return Said(out, ids.shape[1], text, seconds)


def answer_limit(tokenizer: Any, answers: Sequence[str]) -> int:
    """Tokens that suffice for all of the answers, joined in a sentence."""
    return len(tokenizer(", ".join(answers), add_special_tokens=False)["input_ids"]) + SPARE


def check_items(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    items: Sequence[tuple[str, Item]],
    new_tokens: int | None,
    more: int = 0,
) -> None:
    """Refuses items that could not be run as asked.

    Args:
        more: tokens beyond the prompt and its answer that the context must hold.

    Raises:
        SettingError, PromptError: as `measure_retrieval`.
    """
    names = [name for name, _ in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice is not None:
        raise SettingError(
            "retrieval from filled rows",
            "there is no item" if twice is None else f"two items are called {twice!r}",
            "give items, each with an id of its own",
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    for name, item in items:
        n = item.ids.shape[1]
        limit = answer_limit(tokenizer, item.answers) if new_tokens is None else new_tokens
        if longest is not None and n + limit + more > longest:
            raise PromptError(
                f"item {name} of {n} tokens, with {limit + more} more for what follows",
                f"the model's context is {longest} tokens",
                "make shorter prompts",
            )
        for arm in arms:
            plan = arm.plan(n)
            if not plan.fill_is_exact and n < plan.shortest:
                raise PromptError(
                    f"item {name} of {n} tokens with the arm {arm.name!r}",
                    f"with a tail of {plan.tail} and {plan.leading} leading rows no row is filled",
                    "make longer prompts, or give a shorter tail",
                )
