"""Prompts as the official code makes them: cut in the middle, then in chat form, then tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgefill.errors import PromptError
from ridgefill.eval.longbench.sample import Sample


@dataclass(frozen=True)
class Prepared:
    """A prompt as the model gets it.

    Attributes:
        ids: [1, n].
        question: rows [first, stop) of the question; None where there is none, or the tokenizer does not tell.
        truncated: whether the middle was cut out.
    """

    ids: Tensor
    question: tuple[int, int] | None
    truncated: bool


@dataclass(frozen=True)
class Prompter:
    """Makes prompts for one model.

    Attributes:
        tokenizer: the model's.
        context: the model's context in tokens; None if it does not say.
        max_length: prompts are cut to so many tokens before they get their chat form, as in the official code.
            None: to as many as leave room in the context for chat form and answer.
        chat: True or False for every task; None as the official code has it: the few-shot and code tasks of v1
            without. A tokenizer without a chat template never uses it.
    """

    tokenizer: Any
    context: int | None
    max_length: int | None = None
    chat: bool | None = None

    def prepare(self, sample: Sample) -> Prepared:
        """The sample's prompt.

        Raises:
            PromptError: it does not fit the model's context.
        """
        return self._prepare(sample, sample.prompt, sample.max_new_tokens, sample.question)

    def conclude(self, sample: Sample, prompt: str, max_new_tokens: int) -> Prepared:
        """The second prompt of a sample with reasoning.

        Raises:
            PromptError: it does not fit the model's context.
        """
        return self._prepare(sample, prompt, max_new_tokens, None)

    def _prepare(self, sample: Sample, prompt: str, budget: int, question: str | None) -> Prepared:
        whole = self.tokenizer(prompt, truncation=False, verbose=False)["input_ids"]
        room = None if self.context is None else self.context - budget
        limit = self.max_length if self.max_length is not None else room
        while limit is None or limit >= 2:
            cut = limit is not None and len(whole) > limit
            text = prompt
            if cut and limit is not None:
                pieces = middle(whole, limit, sample.version)
                text = "".join(self.tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)
            ids, rows = self._tokens(text, sample.chat, question)
            over = 0 if room is None else ids.shape[1] - room
            if over <= 0:
                return Prepared(ids, rows, cut)
            if self.max_length is not None:
                raise self._too_long(sample, ids.shape[1], budget)
            limit = (limit or 0) - over  # the chat form, and tokens that split anew at the seam
        raise self._too_long(sample, len(whole), budget)

    def _tokens(
        self, text: str, official: bool, question: str | None
    ) -> tuple[Tensor, tuple[int, int] | None]:
        tokenizer = self.tokenizer
        wanted = official if self.chat is None else self.chat
        formed = wanted and bool(getattr(tokenizer, "chat_template", None))
        prompt = _chat(tokenizer, text) if formed else text
        ask = question is not None and tokenizer.is_fast
        found = tokenizer(
            prompt,
            return_tensors="pt",
            truncation=False,
            verbose=False,
            add_special_tokens=not formed,  # the form brings its own
            return_offsets_mapping=ask,
        )
        ids = found["input_ids"]
        if question is None or not ask:
            return ids, None
        return ids, rows_of(prompt, question, found["offset_mapping"][0].tolist())

    def _too_long(self, sample: Sample, length: int, budget: int) -> PromptError:
        return PromptError(
            f"ask {sample.item} in {length} tokens with {budget} more for the answer",
            f"the model's context is {self.context} tokens",
            "give a smaller max_length, or load the model with its context extended",
        )


def middle(ids: Sequence[int], limit: int, version: int) -> list[Sequence[int]]:
    """The first and the last half of ``limit`` tokens, in the pieces that the official code decodes.

    v1 decodes the halves one by one and rounds both down; v2 decodes them together, and the last is the longer one
    of an odd limit.

    Args:
        ids: more than ``limit``.
        limit: at least 2.
    """
    half = limit // 2
    if version == 1:
        return [ids[:half], ids[-half:]]
    return [[*ids[:half], *ids[half - limit :]]]


def rows_of(prompt: str, part: str, offsets: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Rows [first, stop) whose text overlaps the last ``part`` of the prompt; None if it is not in it.

    Args:
        offsets: [n][2] characters [first, stop) of every token.
    """
    first = prompt.rfind(part)
    stop = first + len(part)
    rows = [i for i, (a, b) in enumerate(offsets) if a < stop and b > first]
    return (rows[0], rows[-1] + 1) if first >= 0 and rows else None


def _chat(tokenizer: Any, text: str) -> str:
    """As a user's message, up to the answer. Templates that can think are told not to: the budget is the answer's."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
