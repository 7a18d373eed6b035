"""Aggregation: cwe (the ten common words of a list, after one worked example) and fwe (the three most frequent)."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from ridgefill.eval.ruler.draft import Draft, Prompt
from ridgefill.eval.ruler.words import Library

CWE_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
    "that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
COMMON = 10
SHORT = 4096  # below so many tokens the official script repeats words less often
CODED_LETTERS = 6
ZETA_2 = math.pi**2 / 6  # zeta(alpha) of the official alpha = 2


def cwe(rng: random.Random, words: Library, wanted: int) -> Draft:
    """Draws the worked example and the words.

    Args:
        wanted: length in tokens that the set was asked for.
    """
    short = wanted < SHORT
    example, common = _list(rng, words, *((20, 3, 1) if short else (40, 10, 3)))
    shown = CWE_TEMPLATE.format(context=example) + CWE_PREFIX + " " + _numbered(common)
    repeats = (6, 1) if short else (30, 3)
    seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        context, answer = _list(random.Random(seed), words, size, *repeats)
        return Prompt(f"{shown}\n{CWE_TEMPLATE.format(context=context)}", CWE_PREFIX, tuple(answer))

    return Draft(render, COMMON)


def _list(rng: random.Random, words: Library, size: int, common: int, uncommon: int) -> tuple[str, list[str]]:
    """A numbered list of ``size`` different words and its common ones."""
    drawn = words.distinct(rng, size)
    listed = drawn[:COMMON] * common + drawn[COMMON:] * uncommon
    rng.shuffle(listed)
    return _numbered(listed), drawn[:COMMON]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def fwe(rng: random.Random, wanted: int) -> Draft:
    """Draws coded words, whose counts fall as rank^-2; the most frequent is noise ("...").

    Args:
        wanted: length in tokens that is left for the prompt; it decides how many different words there are.
    """
    coded = [_coded(rng) for _ in range(max(8, wanted // 50))]
    vocabulary = ["...", *list(dict.fromkeys(coded))]
    seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        counts = [int(size / (rank * rank * ZETA_2)) for rank in range(1, len(vocabulary) + 1)]
        text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(text)
        return Prompt(FWE_TEMPLATE.format(context=" ".join(text)), FWE_PREFIX, tuple(vocabulary[1:4]))

    # of 64 words ranks 2 to 5 appear 9, 4, 2 and 1 times: the three asked for are clear from there on
    return Draft(render, 64)


def _coded(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))
