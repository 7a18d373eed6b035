"""A second question asked of a cache that was filled, and its rows chosen, for the first (paper Appendix D, 9)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import SettingError
from ridgefill.eval.arms import EXACT, Arm
from ridgefill.eval.haystack import SYNONYMS, Item, ruler_score
from ridgefill.eval.retrieval import Said, answer_limit, check_items, say
from ridgefill.plan import FillPlan
from ridgefill.rows.base import Prompt, Selector

if TYPE_CHECKING:
    from ridgefill.eval.results import Run

TURNS = ("turn 1", "turn 2")
_NEEDLE = re.compile(r"One of the special magic \w+ for (.+?) is: ([\w-]+)\.")
_MARK = "the-answer-so-far"  # stands for the first answer in the conversation's form


def measure_two_turn(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    items: Sequence[tuple[str, Item]],
    run: Run,
    *,
    new_tokens: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Asks every arm for one needle, then, over the same cache, for another one.

    The first prompt is filled. The arm's own first answer and the second question follow in the same conversation and
    run exactly. Items are kept as "<id>/turn 1" and "<id>/turn 2", the strata are `TURNS`; facts are turn, length,
    depth (where the needle begins, as a share of the first prompt), answer, seconds and, on the second turn of arms
    that choose rows, "covered".

    Args:
        items: (item id, item of ``Haystack(needles="multikey")``).
        new_tokens: how long each answer may be; None: as long as the value and some tokens more.
        tick: called once for every arm and item, those included that ``run`` has already.

    Raises:
        SettingError: items without a second key, no items, or an id that comes twice; a chat form that drops answers.
        PromptError: a conversation longer than the model's context, or a prompt in which an arm has no row to fill.
    """
    seconds = [second_question(tokenizer, item) for _, item in items]
    more = [s.ids.shape[1] + answer_limit(tokenizer, [s.answer]) for s in seconds]
    check_items(model, tokenizer, arms, items, new_tokens, max(more, default=0))
    for (name, item), second in zip(items, seconds, strict=True):
        names = [f"{name}/{turn}" for turn in TURNS]
        for arm in arms:
            if not all(run.done(arm.name, one) for one in names):
                told = converse(model, tokenizer, arm, item, second, new_tokens)
                _keep(run, arm, names, item, second, told)
            tick()


@dataclass(frozen=True)
class SecondQuestion:
    """What follows the first answer.

    Attributes:
        ids: [1, k] from the end of the first answer to the beginning of the second.
        answer: the other key's value.
        needle: rows [first, stop) of its needle in the first prompt.
    """

    ids: Tensor
    answer: str
    needle: tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """Two turns of one arm.

    Attributes:
        first, second: the answers; their ids are the whole conversation up to there, as the arm saw it.
        covered: share of the second needle's rows among those chosen for the first question, or None.
    """

    first: Said
    second: Said
    covered: float | None


def second_question(tokenizer: Any, item: Item) -> SecondQuestion:
    """The same question for the needle that comes next in the prompt (after the last, the first).

    Raises:
        SettingError: the item asks for several needles, or has no other; a chat form that drops answers.
    """
    found = _NEEDLE.findall(item.text)
    if len(item.asked) != 1 or len(found) != len(item.needles) or len(found) < 2:
        raise SettingError(
            f"a second question of an item that asks for {len(item.asked)} of {len(item.needles)} needles",
            "it must ask for one key and hold others",
            "make items with Haystack(needles='multikey')",
        )
    asked = item.needles.index(item.asked[0])
    other = (asked + 1) % len(found)
    offsets = tokenizer(
        item.text, return_offsets_mapping=True, add_special_tokens=not tokenizer.chat_template
    )["offset_mapping"]
    first, stop = item.question
    question = item.text[offsets[first][0] : offsets[stop - 1][1]].strip()
    start = item.text[item.text.rindex("The ") :]  # of the answer; it ends the prompt
    (key, _), (other_key, answer) = found[asked], found[other]
    if key not in question:  # it is asked for in other words
        key, other_key = _paraphrased(key), _paraphrased(other_key)
    text = _follows(tokenizer, question.replace(key, other_key), start.replace(key, other_key))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return SecondQuestion(ids, answer, item.needles[other])


@torch.no_grad()
def converse(
    model: Any,
    tokenizer: Any,
    arm: Arm,
    item: Item,
    second: SecondQuestion,
    new_tokens: int | None = None,
) -> Conversation:
    """Both turns over one cache: the first as the arm prefills it, all that follows exactly.

    An arm that shortens the prompt chooses what remains by the first question, and the second is asked of that.
    """
    limits = [
        answer_limit(tokenizer, answers) if new_tokens is None else new_tokens
        for answers in (item.answers, [second.answer])
    ]
    ids, question = item.ids.to(model.device), item.question
    chosen: list[Tensor] = []
    cache = new_cache(model)
    if arm.compact is None:
        noting = replace(arm, make=lambda n: _noting(arm.plan(n), chosen))
        first = say(model, tokenizer, noting, ids, limits[0], question, **cache_kwarg(cache))
    else:
        kept = arm.compact.keep(model, tokenizer, ids, question).to(ids.device)
        chosen.append(torch.zeros(ids.shape[1], dtype=torch.bool).index_fill(0, kept.cpu(), True))
        first = say(model, tokenizer, EXACT, ids[:, kept], limits[0], **cache_kwarg(cache))
    so_far = torch.cat([_without_end(model, first.ids), second.ids.to(ids.device)], 1)
    # outside the arm's fill: however short its tail is, the second turn runs exactly
    then = say(model, tokenizer, EXACT, so_far, limits[1], **cache_kwarg(cache))
    held = chosen[0][slice(*second.needle)] if chosen else torch.empty(0)
    return Conversation(first, then, held.float().mean().item() if len(held) else None)


@dataclass(frozen=True)
class _Noting(Selector):
    """Another selector, whose choices are kept."""

    inner: Selector
    chosen: list[Tensor] = field(compare=False)

    @property
    def query_aware(self) -> bool:  # type: ignore[override]
        return self.inner.query_aware

    @property
    def attends(self) -> bool:  # type: ignore[override]
        return self.inner.attends

    @property
    def probes(self) -> bool:  # type: ignore[override]
        return self.inner.probes

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        self.chosen.append(self.inner.select(prompt))
        return self.chosen[-1]

    def __str__(self) -> str:
        return str(self.inner)


def _noting(plan: FillPlan, chosen: list[Tensor]) -> FillPlan:
    return plan if plan.rows is None else replace(plan, rows=_Noting(plan.rows, chosen))


def _without_end(model: Any, ids: Tensor) -> Tensor:
    """Prompt and answer [1, n] without an end-of-text token, which no cache holds: the conversation goes on."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return ids[:, :-1] if int(ids[0, -1]) in ends else ids


def _follows(tokenizer: Any, question: str, start: str) -> str:
    """The text from the end of the first answer to the beginning of the second, in the tokenizer's chat form.

    Raises:
        SettingError: the form does not show earlier answers.
    """
    if not tokenizer.chat_template:
        return f"\n{question} {start}"
    turns = [("user", question), ("assistant", _MARK), ("user", question)]
    messages = [{"role": role, "content": content} for role, content in turns]
    form = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if form.count(_MARK) != 1:
        raise SettingError(
            "a second question in this model's chat form",
            "the form leaves out or changes what was answered before",
            "use a tokenizer whose chat template keeps earlier answers, or none",
        )
    return form.partition(_MARK)[2] + start


def _paraphrased(key: str) -> str:
    """A paraphrased haystack's key, as its question has it."""
    return f"the {dict(SYNONYMS)[key.removeprefix('the ')]}"


def _keep(
    run: Run,
    arm: Arm,
    names: Sequence[str],
    item: Item,
    second: SecondQuestion,
    told: Conversation,
) -> None:
    """Adds both turns to the run, but what a killed one has added already."""
    n = item.ids.shape[1]
    parts = zip(
        (told.first, told.second),
        (item.answers, [second.answer]),
        (item.asked[0], second.needle),
        strict=True,
    )
    for turn, (name, (said, answers, needle)) in enumerate(zip(names, parts, strict=True), 1):
        if not run.done(arm.name, name):
            facts = {"turn": turn, "length": said.length, "depth": needle[0] / n}
            if turn == 2 and told.covered is not None:
                facts["covered"] = told.covered
            score = {"score": ruler_score(said.text, answers)}
            run.add(arm.name, name, TURNS[turn - 1], score, **facts, answer=said.text, seconds=said.seconds)
