"""Does a fact that stands only in filled rows survive? (paper 3.1, filled-region retrieval; section 9)

A quick probe in RULER's words, in the user's own held-out text; not the official suite.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgefill.answer import answer, as_prompt
from ridgefill.engines.transformers import Filling
from ridgefill.plan import FillPlan

KEYS = ("harbor", "lantern", "meadow", "orchard", "pebble", "quarry", "saddle", "thicket")
SLACK = 8  # tokens by which text can grow when it is decoded, cut and tokenised again
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Needle:
    """One planted fact and who found it.

    Attributes:
        depth: where it stood, as a share of the filled rows.
        exact, filled: whether the answer held the number.
    """

    depth: float
    exact: bool
    filled: bool


def find_needles(
    model: Any,
    tokenizer: Any,
    plan: FillPlan,
    documents: Sequence[Tensor],
    count: int,
    *,
    seed: int = 0,
    tick: Callable[[int], None] = lambda i: None,
) -> list[Needle]:
    """Plants ``count`` numbers, each in a prompt of its own, evenly over the filled rows; asks both arms for them.

    Args:
        documents: [1, n] each, taken in turn; longer than the plan's shortest prompt.
        tick: called with the needle's number before each.

    Returns:
        As many as could be planted whole in the filled rows (none if the documents are too short).
    """
    rng = random.Random(seed)
    found = []
    for i in range(count):
        depth, key, value = (i + 0.5) / count, rng.choice(KEYS), str(rng.randint(1_000_000, 9_999_999))
        ids = plant(tokenizer, plan, documents[i % len(documents)], depth, key, value)
        if ids is None:
            continue
        tick(i + 1)
        exact = answer(model, tokenizer, ids, max_new_tokens=ANSWER_TOKENS)
        with Filling(model, plan, min_tokens=plan.shortest, tokenizer=tokenizer):
            filled = answer(model, tokenizer, ids, max_new_tokens=ANSWER_TOKENS)
        found.append(Needle(depth, value in exact.text, value in filled.text))
    return found


def plant(
    tokenizer: Any, plan: FillPlan, document: Tensor, depth: float, key: str, value: str
) -> Tensor | None:
    """A prompt [1, m], m <= n, whose fact lies wholly in filled rows, and which asks for it; None if none fits.

    Args:
        document: [1, n], cut to make room.
        depth: 0 for the first filled rows, 1 for the last.
    """
    needle = f"\nOne of the special magic numbers for {key} is: {value}.\n"

    def form(before: str, after: str) -> str:
        question = f"\n\nWhat is the special magic number for {key} mentioned in the text?"
        start = f"The special magic number for {key} mentioned in the text is"
        return as_prompt(tokenizer, before + needle + after + question) + start

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    own = count(form("", "")) + SLACK
    hay = document[0, : max(0, document.shape[1] - own)]
    at = plan.leading + int(depth * max(0, len(hay) - plan.tail - plan.leading))
    before, after = (tokenizer.decode(part, skip_special_tokens=True) for part in (hay[:at], hay[at:]))
    prompt = form(before, after)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
    start = prompt.index(needle)
    first, last = count(prompt[:start]), count(prompt[: start + len(needle)])
    inside = plan.leading <= first and last <= ids.shape[1] - plan.tail
    return ids if inside and ids.shape[1] <= document.shape[1] else None
