"""Needles in a haystack: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery."""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ridgefill.eval.haystack import _SENTENCE_START
from ridgefill.eval.ruler.draft import Draft, Prompt
from ridgefill.eval.ruler.words import Library

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # per cent of the essay's sentences
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
SEVERAL_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
# What the official script makes of these for one answer: "Some" -> "A", "are all" and "are" -> "is", no plural.
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ONE_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"


@dataclass(frozen=True)
class Needles:
    """A kind of haystack, by the official parameters.

    Attributes:
        haystack: "noise", "essay" or "needle" (other needles).
        key_type, value_type: "words", "numbers" or "uuids".
        keys, values, queries: how many keys are planted, values of each, and keys asked for.
    """

    haystack: str
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def planted(self) -> int:
        """Keys planted: all that are asked for, at least."""
        return max(self.keys, self.queries)

    def draft(self, rng: random.Random, words: Library, essay: Sequence[str]) -> Draft:
        """Draws keys, values, places and the question.

        Args:
            essay: its words, for that haystack.
        """
        keys = _distinct(rng, self.key_type, words, self.planted)
        drawn = iter(_distinct(rng, self.value_type, words, self.planted * self.values))
        values = {key: [next(drawn) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        outputs = tuple(value for key in asked for value in values[key])
        seed = rng.getrandbits(64)

        def render(size: int) -> Prompt:
            own = random.Random(seed)  # the same draws for every size
            context = (
                _in_essay(own, needles, essay, size)
                if self.haystack == "essay"
                else "\n".join(self._in_lines(own, needles, words, asked, size))
            )
            return self._ask(asked, context, outputs)

        return Draft(render, len(needles))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_type, key=key, value=value)

    def _in_lines(
        self, rng: random.Random, needles: Sequence[str], words: Library, asked: Sequence[str], size: int
    ) -> list[str]:
        places = random.Random(rng.getrandbits(64)).sample(range(size), len(needles))
        lines = [NOISE] * size if self.haystack == "noise" else self._others(rng, words, asked, size)
        for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
            lines.insert(place, needle)
        return lines

    def _others(self, rng: random.Random, words: Library, asked: Sequence[str], size: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < size:
            key, value = _draw(rng, self.key_type, words), _draw(rng, self.value_type, words)
            if key not in asked:  # a second value of the same key would make the question ambiguous
                lines.append(self._needle(key, value))
        return lines

    def _ask(self, asked: Sequence[str], context: str, outputs: tuple[str, ...]) -> Prompt:
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        one = self.queries * self.values == 1
        kind = self.value_type[:-1] if one else self.value_type
        template, prefix = (ONE, ONE_PREFIX) if one else (SEVERAL, SEVERAL_PREFIX)
        text = template.format(kind=kind, context=context, query=query)
        return Prompt(text, prefix.format(kind=kind, query=query), outputs)


def _in_essay(rng: random.Random, needles: Sequence[str], essay: Sequence[str], size: int) -> str:
    """The first ``size`` words of the essay, repeated if it is shorter, with needles between its sentences."""
    words = list(essay) * (size // len(essay) + 1)
    sentences = _sentences(" ".join(words[:size]))
    depths = rng.sample(DEPTHS, len(needles))
    places = [0, *sorted(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
    parts: list[str] = []
    for i, needle in enumerate([*needles, ""]):
        parts += [" ".join(sentences[places[i] : places[i + 1]]), needle]
    return " ".join(part for part in parts if part)


def _sentences(text: str) -> list[str]:
    starts = [0, *(match.end() for match in _SENTENCE_START.finditer(text)), len(text)]
    return [text[a:b].strip() for a, b in itertools.pairwise(starts)]


def essay_words(text: str) -> list[str]:
    """The words of an essay's text, whitespace apart."""
    return re.sub(r"\s+", " ", text.strip()).split(" ")


def _distinct(rng: random.Random, kind: str, words: Library, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        value = _draw(rng, kind, words)
        if value not in found:
            found.append(value)
    return found


def _draw(rng: random.Random, kind: str, words: Library) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return words.key(rng)
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
