"""Prompts with planted facts, for the tiny hybrid: what it trains on and what it is measured on.

A prompt is a list of pieces of token ids: filler (real text, a repeated noise text, or random tokens), facts and
questions. Lengths are counted in tokens, so a prompt has exactly the length asked for.

Keys and values come in two disjoint parts, one for training and one for measuring:
a word is held out by its checksum (or because `ridgefill check` plants it), a number by its digit sum.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgefill.eval.needle import KEYS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."  # RULER's
TEXT, PLAIN, ANSWER, REPEAT = range(4)  # what a token is, for the loss
_WORD = re.compile(r"\b[a-z]{4,9}\b")
_COMMON, _WORDS = 12, 6000  # occurrences that make a word a key, and how many words at most


@dataclass(frozen=True)
class Form:
    """How a fact is told and asked for; the answer repeats the fact's own ending."""

    name: str
    fact: str
    question: str
    answer: str


FORMS = (
    Form("short", "\n{key} = {value}\n", "\n{key}", " = {value}\n"),
    Form(
        "plain",
        "\nThe {key} number is {value}.\n",
        "\nWhat is the {key} number? The {key} number",
        " is {value}.",
    ),
    Form(
        "ruler",  # the words of RULER's needle, and of `ridgefill check`
        "\nOne of the special magic numbers for {key} is: {value}.\n",
        "\n\nWhat is the special magic number for {key} mentioned in the text?"
        "The special magic number for {key} mentioned in the text is",
        ": {value}.",
    ),
)
FORM = {form.name: form for form in FORMS}


@dataclass(frozen=True)
class Words:
    """Words that name facts: those trained on, and those only measured on."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Planted:
    """One prompt that ends with a question.

    Attributes:
        ids: [1, n] the prompt; its last tokens are the question.
        answer: [a] the tokens that must follow, up to the number's last digit.
        asked: rows [first, stop) of the fact asked for.
        facts: rows of every planted fact, in order.
        question: rows of the question.
        key, value: the fact asked for.
    """

    ids: Tensor
    answer: Tensor
    asked: tuple[int, int]
    facts: tuple[tuple[int, int], ...]
    question: tuple[int, int]
    key: str
    value: str


@dataclass
class Maker:
    """Makes sequences out of a tokenizer, text and words; every call names its own source of randomness.

    Attributes:
        tokenizer: a fast tokenizer.
        stream: [N] the filler text's token ids, documents one after another.
        words: which words name facts.
    """

    tokenizer: Any
    stream: np.ndarray
    words: Words
    _noise: list[int] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        """Token ids of one piece."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, rng: random.Random, count: int) -> list[int]:
        """``count`` consecutive tokens of real text."""
        at = rng.randrange(len(self.stream) - count)
        return self.stream[at : at + count].tolist()

    def noise(self, rng: random.Random, count: int) -> list[int]:
        """``count`` tokens of the repeated noise text."""
        self._noise = self._noise or self.encode(" " + NOISE)
        at = rng.randrange(len(self._noise))
        return [self._noise[(at + i) % len(self._noise)] for i in range(count)]

    def filler(self, name: str) -> Callable[[random.Random, int], list[int]]:
        """The filler of this name: ``text`` or ``noise``."""
        return {"text": self.text, "noise": self.noise}[name]

    def planted(
        self,
        rng: random.Random,
        tokens: int,
        *,
        depth: float,
        form: Form = FORM["plain"],
        filler: str = "text",
        facts: int = 4,
        digits: int = 4,
        tail: int = 0,
        leading: int = 0,
    ) -> Planted:
        """A prompt of ``tokens`` tokens about held-out words and numbers; one of its facts is asked for.

        Args:
            depth: where the fact asked for stands, 0 the first and 1 the last place outside leading and tail.
            facts: how many stand in the prompt; the others stand anywhere outside leading and tail.
            digits: of each number.
            tail: no fact stands in the last ``tail`` tokens.
            leading: nor in the first ``leading``.

        Raises:
            ValueError: no room.
        """
        keys = rng.sample(self.words.held_out, facts)
        values = [number(rng, held_out=True, digits=digits) for _ in keys]
        told = [self.encode(form.fact.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
        question = self.encode(form.question.format(key=keys[0]))
        hay = tokens - len(question) - sum(map(len, told))
        last = hay - max(0, tail - len(question))
        if last < leading:
            raise ValueError(f"{facts} facts and a tail of {tail} leave no room in {tokens} tokens")
        places = [leading + round(depth * (last - leading))]
        places += [rng.randint(leading, last) for _ in keys[1:]]
        text = self.filler(filler)(rng, hay)
        ids: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        at = 0
        for i in sorted(range(facts), key=lambda i: places[i]):
            ids += text[at : places[i]]
            at = places[i]
            spans[i] = (len(ids), len(ids) + len(told[i]))
            ids += told[i]
        ids += text[at:]
        asks = (len(ids), len(ids) + len(question))
        return Planted(
            torch.tensor([ids + question]),
            torch.tensor(self.encode(form.answer.split("{value}")[0] + values[0])),
            spans[0],
            tuple(sorted(spans.values())),
            asks,
            keys[0],
            values[0],
        )

    def training(self, rng: random.Random, tokens: int, hard: bool = False) -> tuple[list[int], list[int]]:
        """One training sequence: ids and what each token is, both ``tokens`` long; ``hard`` asks in RULER's words."""
        kind = rng.random()
        short = tokens <= 64  # the first stage: only to find what came before
        if kind < (0.6 if short else 0.15):
            return self._repeats(rng, tokens)
        if kind < 0.25 and not short:
            return self.text(rng, tokens), [TEXT] * tokens
        return self._questions(rng, tokens, hard)

    def _repeats(self, rng: random.Random, tokens: int) -> tuple[list[int], list[int]]:
        """Random tokens, again and again: only the repeats can be predicted."""
        period = rng.randint(8, tokens // 2)
        once = [rng.randrange(3, len(self.tokenizer)) for _ in range(period)]
        ids = (once * (tokens // period + 1))[:tokens]
        return ids, [PLAIN] * period + [REPEAT] * (tokens - period)

    def _questions(self, rng: random.Random, tokens: int, hard: bool) -> tuple[list[int], list[int]]:
        """Facts, questions about any earlier one, and filler between them, as they come."""
        ids: list[int] = []
        roles: list[int] = []

        def put(piece: Sequence[int], role: int) -> None:
            ids.extend(piece)
            roles.extend([role] * len(piece))

        fill = self.filler("text" if rng.random() < 0.8 else "noise")
        role = TEXT if fill == self.text else PLAIN
        words = rng.sample(self.words.train, 40)
        forms = FORMS + (FORM["ruler"],) * 3 if hard else FORMS
        told: list[tuple[Form, str, str]] = []
        unasked: set[int] = set()
        many = rng.randint(2, 4 + tokens // 100)
        gap = rng.choice((4, 16, tokens // 32, tokens // 16, tokens // 8))
        while len(ids) < tokens:
            put(fill(rng, rng.randint(1, 2 * gap)), role)
            if len(told) < many and (not told or rng.random() < 0.5):
                form = FORM["short"] if tokens <= 64 else rng.choice(forms)
                key, value = words[len(told)], number(rng, held_out=False, digits=rng.choice((4, 5, 6, 7)))
                unasked.add(len(told))
                told.append((form, key, value))
                put(self.encode(form.fact.format(key=key, value=value)), PLAIN)
            else:
                form, key, value = self._asked(rng, told, unasked, hard or tokens >= 512)
                put(self.encode(form.question.format(key=key)), PLAIN)
                put(self.encode(form.answer.format(value=value)), ANSWER)
        return ids[:tokens], roles[:tokens]

    @staticmethod
    def _asked(
        rng: random.Random, told: list[tuple[Form, str, str]], unasked: set[int], far: bool
    ) -> tuple[Form, str, str]:
        """The fact to ask for: any, or mostly one that was not asked before, whose answer stands nowhere nearer."""
        if not far:
            return rng.choice(told)
        again = not unasked or rng.random() < 0.3
        asked = rng.randrange(len(told)) if again else rng.choice(sorted(unasked))
        unasked.discard(asked)
        return told[asked]


def number(rng: random.Random, *, held_out: bool, digits: int) -> str:
    """A random number; one of ten, by its digit sum, is never trained on."""
    while True:
        value = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        if (sum(map(int, value)) % 10 == 0) == held_out:
            return value


def key_words(files: Sequence[Path]) -> Words:
    """The commoner words of the texts, parted by checksum; the keys of `ridgefill check` are held out."""
    counts: Counter[str] = Counter()
    for path in files:
        counts.update(_WORD.findall(path.read_text(encoding="utf-8", errors="replace")))
    words = sorted(word for word, n in counts.most_common(_WORDS) if n >= _COMMON)
    apart = {word for word in words if zlib.crc32(word.encode()) % 5 == 0} | set(KEYS)
    return Words(tuple(w for w in words if w not in apart), tuple(sorted(apart)))


def batch(
    maker: Maker, seed: int, step: int, size: int, tokens: int, *, hard: bool = False
) -> tuple[Tensor, Tensor]:
    """Step ``step``'s sequences: ids and roles, both [size, tokens]."""
    rng = random.Random(f"{seed} {step}")
    made = [maker.training(rng, tokens, hard) for _ in range(size)]
    return torch.tensor([ids for ids, _ in made]), torch.tensor([roles for _, roles in made])


def spread(maker: Maker, seed: int, count: int, tokens: int, **settings: Any) -> list[Planted]:
    """``count`` prompts whose questions' facts stand evenly over all depths; settings as `Maker.planted`."""
    return [
        maker.planted(random.Random(f"{seed} planted {i}"), tokens, depth=(i + 0.5) / count, **settings)
        for i in range(count)
    ]


@torch.no_grad()
def recalled(model: Any, prompts: Sequence[Planted]) -> list[bool]:
    """Whether greedy decoding gives each answer whole: every token is the likeliest after the true ones before it."""
    found = []
    for prompt in prompts:
        ids = torch.cat([prompt.ids[0], prompt.answer])[None]
        logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(prompt.answer)).logits[0]
        found.append(bool((logits.argmax(-1) == prompt.answer).all()))
    return found
