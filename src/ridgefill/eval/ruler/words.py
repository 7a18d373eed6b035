"""Words for keys and lists: wonderwords, as officially, where it is installed; else lists of our own."""

from __future__ import annotations

import importlib
import itertools
import random
from dataclasses import dataclass
from functools import cache, cached_property

from ridgefill.errors import SettingError
from ridgefill.eval.haystack import _ADJECTIVES, _NOUNS


@dataclass(frozen=True)
class Library:
    """A list of words.

    Attributes:
        name: what a set's settings say under "words".
        adjectives, nouns: of keys.
        singles: all different words, for lists.
    """

    name: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    singles: tuple[str, ...]

    def key(self, rng: random.Random) -> str:
        """An adjective and a noun, joined by a hyphen."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def distinct(self, rng: random.Random, count: int) -> list[str]:
        """``count`` different words: single ones if there are enough, else hyphenated ones.

        The official scripts likewise change to a longer list of words where the first is too short.

        Raises:
            SettingError: there are not so many.
        """
        for words in (self.singles, self._pairs, self._triples):
            if count <= len(words):
                return rng.sample(words, count)
        raise SettingError(
            f"{count:,} different words",
            f"the word list {self.name} makes {len(self._triples):,}",
            "install wonderwords, or ask for shorter prompts",
        )

    @cached_property
    def _pairs(self) -> list[str]:
        return [f"{a}-{b}" for a, b in itertools.product(self.adjectives, self.nouns)]

    @cached_property
    def _triples(self) -> list[str]:
        return [f"{a}-{b}" for a, b in itertools.product(self._pairs, self.nouns)]


@cache
def library() -> Library:
    """The words that sets are made with here."""
    try:
        random_word = importlib.import_module("wonderwords.random_word")
    except ImportError:
        return Library("ridgefill", tuple(_ADJECTIVES), tuple(_NOUNS), tuple(sorted({*_ADJECTIVES, *_NOUNS})))
    read = random_word._get_words_from_text_file
    nouns, adjectives, verbs = (read(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    return Library(
        "wonderwords", tuple(adjectives), tuple(nouns), tuple(sorted({*nouns, *adjectives, *verbs}))
    )
