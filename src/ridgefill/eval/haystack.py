"""Needles in a haystack, in RULER's words, of an exact length, planted in rows that a fill leaves out (paper 3.1).

Unlike the official suite, every needle lies in filled rows, and the question can be put in other words than the
needle's, so that neither the exact rows nor a match of words finds it by itself.
"""

from __future__ import annotations

import random
import re
import uuid
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.answer import as_prompt
from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import CorpusError, PromptError, SettingError

HAYS = ("noise", "prose")
NEEDLES = {"single": (1, 1, 1), "multikey": (4, 1, 1), "multivalue": (1, 4, 1), "multiquery": (4, 1, 4)}
VALUES = ("numbers", "words", "uuids")
WORDINGS = ("ruler", "paraphrased")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"

_ADJECTIVE_LIST = (
    "abrupt ancient bitter brisk careful clumsy curious dapper distant eager earnest elastic fearless festive "
    "fragile gentle glossy graceful hollow humble icy idle jagged jolly keen lavish lively lonely mellow misty "
    "modest narrow nimble obscure patient placid polite quaint quiet ragged reckless rustic sedate silky sturdy "
    "subtle tangible thirsty trusty uneven upbeat vague velvety wary wistful witty zealous zesty"
)
_NOUN_LIST = (
    "acorn anvil badger banjo barley basil beaver bellows biscuit bramble buckle canoe caravan cedar cello cobbler "
    "cricket dagger daisy dolphin easel falcon fennel fiddle garnet geyser goblet hammock hazel heron icicle jigsaw "
    "kettle lagoon lemur magnet mallet mango marble nutmeg otter paddle parsley pelican piccolo poodle pumpkin "
    "raven saffron sandal spindle squid teapot thimble trellis tulip turnip violin walnut wombat zipper"
)
_ADJECTIVES, _NOUNS = _ADJECTIVE_LIST.split(), _NOUN_LIST.split()
# (the needle's word, the question's): neither holds the other.
SYNONYMS = (
    ("physician", "doctor"), ("attorney", "lawyer"), ("automobile", "car"), ("infant", "baby"), ("king", "monarch"),
    ("ship", "vessel"), ("house", "dwelling"), ("sofa", "couch"), ("teacher", "instructor"), ("cat", "feline"),
    ("dog", "canine"), ("forest", "woods"), ("thief", "burglar"), ("soldier", "warrior"), ("chef", "cook"),
    ("sailor", "mariner"), ("storm", "tempest"), ("gift", "present"), ("child", "kid"), ("road", "street"),
    ("actor", "performer"), ("writer", "author"), ("pupil", "student"), ("rock", "stone"), ("airplane", "jet"),
    ("coat", "jacket"), ("ocean", "sea"), ("clerk", "secretary"), ("rabbit", "bunny"), ("cop", "policeman"),
)  # fmt: skip
_OTHER_WORDS = {"numbers": "figure", "words": "term", "uuids": "code"}
_SENTENCE_START = re.compile(r'(?<=[a-z]{3}[.!?])["”’)]*\s+(?=["“‘(]?[A-Z])')
_CUT_NEAR = 60  # characters around the best cut among which an exact length is looked for
_ATTEMPTS = 20


@dataclass(frozen=True)
class Item:
    """One prompt and where its parts lie; a span is (first row, row after the last).

    Attributes:
        ids: [1, n] its tokens, on the host; the tokenizer's own for ``text``.
        text: the whole prompt, answer prefix included.
        answers: what must be answered.
        answer_ids: [1, k] the tokens that follow the prompt if the first of ``answers`` is given at once.
        asked: spans of the needles asked for.
        needles: spans of all needles, in order.
        question: span of the question.
        depth: where the first asked needle was put, as a share of the rows that can be filled.
    """

    ids: Tensor
    text: str
    answers: tuple[str, ...]
    answer_ids: Tensor
    asked: tuple[tuple[int, int], ...]
    needles: tuple[tuple[int, int], ...]
    question: tuple[int, int]
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A kind of prompt.

    Attributes:
        tokens: n, the exact length of every prompt, chat form and answer prefix included.
        tail, leading: last and first rows that run exactly; all needles lie between them.
        hay: "noise" (RULER's repeated sentences) or "prose" (text that is given).
        needles: "single", "multikey" (RULER's niah_multikey_1: four keys, one asked for), "multivalue" (one key
            with four values) or "multiquery" (four keys, all asked for).
        values: "numbers" (seven digits), "words" (adjective-noun) or "uuids".
        wording: "ruler", or "paraphrased": the question shares no content word with the needle.
        question_first: the question stands before the text; the answer prefix still ends the prompt.
        seed: of keys, values, places and stretches of text.

    Raises:
        SettingError: an unknown kind, or lengths that leave no row to plant in.
    """

    tokens: int = 2048
    tail: int = 512
    leading: int = 16
    hay: str = "noise"
    needles: str = "single"
    values: str = "numbers"
    wording: str = "ruler"
    question_first: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        kinds = {"hay": HAYS, "needles": NEEDLES, "values": VALUES, "wording": WORDINGS}
        for name, known in kinds.items():
            if getattr(self, name) not in known:
                asked = f"a haystack with {name} {getattr(self, name)!r}"
                raise SettingError(asked, "it is not known", f"use one of {', '.join(known)}")
        if self.tail < 1 or self.leading < 0 or self.tokens <= self.tail + self.leading:
            raise SettingError(
                f"a haystack of {self.tokens} tokens with a tail of {self.tail} and {self.leading} leading rows",
                "no row lies between them",
                "give more tokens, a tail of 1 or more, and 0 or more leading rows",
            )
        if self.wording == "paraphrased" and self.needles not in ("single", "multikey"):
            asked = f"paraphrased questions with {self.needles} needles"
            raise SettingError(asked, "they ask for one value", "use single or multikey needles")

    def items(self, tokenizer: Any, count: int, texts: Sequence[str] = ()) -> list[Item]:
        """Makes ``count`` prompts; the asked needle's depth is spread evenly over them.

        Args:
            tokenizer: a fast one; its chat form is used if it has one.
            texts: for prose, long documents, taken in an order of the seed's; stretches overlap only if they must.

        Raises:
            SettingError: a tokenizer without offsets.
            CorpusError: too little text, or text without sentences to plant between.
            PromptError: no prompt of this length has room for its needles.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise SettingError(
                "a haystack with this tokenizer", "it gives no offsets", "use the model's fast tokenizer"
            )
        hays = self._hays(count, texts)
        return [self._item(tokenizer, (i + 0.5) / count, i, next(hays)) for i in range(count)]

    def _hays(self, count: int, texts: Sequence[str]) -> Iterator[str]:
        longest = 10 * self.tokens  # characters; more than any tokenizer packs of prose into so many tokens
        if self.hay == "noise":
            while True:
                yield NOISE * (longest // len(NOISE) + 1)
        joined = "\n\n".join(random.Random(self.seed).sample(list(texts), len(texts)))
        starts = [match.end() for match in _SENTENCE_START.finditer(joined)]
        starts = [at for at in starts if at + longest <= len(joined)]
        if not starts:
            raise CorpusError(
                f"a prose haystack of {self.tokens} tokens",
                f"the text has {len(joined):,} characters, and no sentence with {longest:,} after it",
                "give more prose, or fewer tokens",
            )
        apart = max(1, min(longest, (starts[-1] - starts[0]) // max(1, count)))
        for i in range(count):
            at = starts[min(bisect_left(starts, starts[0] + i * apart), len(starts) - 1)]
            yield joined[at : at + longest]

    def _item(self, tokenizer: Any, depth: float, index: int, hay: str) -> Item:
        for attempt in range(_ATTEMPTS):
            rng = random.Random(f"{self} {index} {attempt}")
            item = _Draft(self, rng, depth, hay).plant(tokenizer)
            if item is not None:
                return item
        raise PromptError(
            f"needles in the filled rows of a prompt of {self.tokens} tokens",
            f"with a tail of {self.tail} and {self.leading} leading rows they do not fit between",
            "give more tokens, or a shorter tail",
        )


class _Draft:
    """One prompt in the making: what is planted, how it is asked for, and where."""

    def __init__(self, kind: Haystack, rng: random.Random, depth: float, hay: str) -> None:
        self.kind, self.depth, self.hay = kind, depth, hay
        n_keys, n_values, n_asked = NEEDLES[kind.needles]
        names = _names(rng, n_keys, kind.wording)
        facts = [(key, other, _value(rng, kind.values)) for key, other in names for _ in range(n_values)]
        self.sentences = [
            f"One of the special magic {kind.values} for {key} is: {value}." for key, _, value in facts
        ]
        self.n_asked = n_values * n_asked
        self.answers = tuple(value for *_, value in facts[: self.n_asked])
        asked = [names[i][1] for i in range(n_asked)]
        self.intro, self.question, self.prefix = _wording(kind, asked, self.n_asked > 1)
        self.depths = [depth, *(rng.random() for _ in facts[1:])]

    def plant(self, tokenizer: Any) -> Item | None:
        """The prompt, or None if its needles do not fit in the rows that can be filled."""
        places = self._places(tokenizer)
        body = None if places is None else self._exact_length(tokenizer, places)
        if body is None:
            return None
        text = self._text(tokenizer, body)
        coded = tokenizer(text, return_offsets_mapping=True, **_plain(tokenizer))
        ids = torch.tensor([coded["input_ids"]])
        spans = [_rows(text, sentence, coded["offset_mapping"]) for sentence in self.sentences]
        first, stop = self.kind.leading, self.kind.tokens - self.kind.tail
        answer_ids = _following(tokenizer, text, f" {self.answers[0]}", ids)
        if answer_ids is None or any(a < first or b > stop for a, b in spans):
            return None
        question = _rows(text, self.question, coded["offset_mapping"])
        asked = tuple(spans[: self.n_asked])
        return Item(ids, text, self.answers, answer_ids, asked, tuple(sorted(spans)), question, self.depth)

    def _places(self, tokenizer: Any) -> list[int] | None:
        """The character of the hay before which each needle goes: starts of different sentences."""
        before = self._text(tokenizer, "\0").split("\0")[0]
        count = lambda text: len(tokenizer(text, **_plain(tokenizer))["input_ids"])  # noqa: E731
        first = max(0, self.kind.leading - count(before))
        needles = sum(count(sentence) + 2 for sentence in self.sentences)
        stop = self.kind.tokens - self.kind.tail - count(before) - needles
        offsets = tokenizer(self.hay, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        if not first < stop <= len(offsets):
            return None
        starts = [0] + [m.end() for m in re.finditer(r"\n", self.hay)]
        if self.kind.hay == "prose":
            starts = [0] + [m.end() for m in _SENTENCE_START.finditer(self.hay)]
        free = [at for at in starts if offsets[first][0] <= at < offsets[stop - 1][1]]
        places = []
        for depth in self.depths:
            if not free:
                return None
            target = offsets[first + int(depth * (stop - first))][0]
            places.append(min(free, key=lambda at: abs(at - target)))
            free.remove(places[-1])
        return places

    def _exact_length(self, tokenizer: Any, places: list[int]) -> str | None:
        """Hay and needles, the hay's end cut so that the prompt has exactly the wanted length."""

        def length(cut: int) -> int:
            text = self._text(tokenizer, self._body(places, cut))
            return len(tokenizer(text, **_plain(tokenizer))["input_ids"])

        low, high = max(places), len(self.hay)
        while low < high:  # the longest cut that is not too long; lengths rise all but steadily
            middle = (low + high + 1) // 2
            low, high = (middle, high) if length(middle) <= self.kind.tokens else (low, middle - 1)
        near = range(max(max(places), low - _CUT_NEAR), min(len(self.hay), low + _CUT_NEAR) + 1)
        by_distance = sorted(near, key=lambda cut: abs(cut - low))
        cut = next((c for c in by_distance if length(c) == self.kind.tokens), None)
        return None if cut is None else self._body(places, cut)

    def _body(self, places: list[int], cut: int) -> str:
        space = "\n" if self.kind.hay == "noise" else " "
        parts, end = [], 0
        for at, sentence in sorted(zip(places, self.sentences, strict=True)):
            parts += [self.hay[end:at], sentence, space]
            end = at
        return "".join([*parts, self.hay[end:cut].rstrip()])

    def _text(self, tokenizer: Any, body: str) -> str:
        order = (
            [self.intro, self.question, body]
            if self.kind.question_first
            else [self.intro, body, self.question]
        )
        prompt = as_prompt(tokenizer, "\n".join(order))
        return prompt + ("" if tokenizer.chat_template else " ") + self.prefix


def prose(fitted: Collection[str] = ()) -> list[str]:
    """The embedded speeches that maps were not fitted on, held-out ones first.

    Args:
        fitted: digests of documents to leave out: the maps' ``provenance["fitted_documents"]``.

    Raises:
        RidgeFillError, OutputError: as `ridgefill.embedded.texts`.
    """
    from ridgefill.embedded import HELD_OUT_SPEECHES, held_out, texts
    from ridgefill.eval.documents import digest

    paths = [*held_out()[: len(HELD_OUT_SPEECHES)], *sorted(texts()["speeches"].glob("*.txt"))]
    found = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return [text.strip() for text in found if digest(text) not in fitted]


@torch.no_grad()
def retrieved(model: Any, item: Item, cache: Any = None) -> bool:
    """Whether greedy decoding starts with the answer, by one forward pass of the rows that ``cache`` lacks.

    Stricter than `ruler_score`, which takes the answer anywhere in the text.

    Args:
        cache: of the prompt's first rows, as `ridgefill.prefill` gives it; it is extended. None runs all exactly.

    Raises:
        SettingError: an item with several answers, whose order is free.
        PromptError: the cache already holds the whole prompt.
    """
    if len(item.answers) != 1:
        raise SettingError(
            f"one pass over {len(item.answers)} answers",
            "a model may give them in any order",
            "generate the text, and score it with ruler_score",
        )
    cache = new_cache(model) if cache is None else cache
    past, k = cache.get_seq_length(), item.answer_ids.shape[1]
    if past >= item.ids.shape[1]:
        raise PromptError(
            f"an answer to a prompt of {item.ids.shape[1]} tokens",
            f"the cache already holds {past}, and the last one must run to give the first token",
            "give a cache of the prompt without its tail",
        )
    feed = torch.cat([item.ids[:, past:], item.answer_ids[:, :-1]], 1).to(model.device)
    return answered(model(feed, use_cache=True, logits_to_keep=k, **cache_kwarg(cache)).logits, item)


def answered(logits: Tensor, item: Item) -> bool:
    """Whether every token of the answer is the most likely one after the prompt and the answer's earlier tokens.

    That is when greedy decoding gives them.

    Args:
        logits: [1, r, vocabulary] of the prompt followed by all but the last of ``item.answer_ids`` [1, k]; at
            least of its last k rows.
    """
    k = item.answer_ids.shape[1]
    return bool((logits[:, -k:].argmax(-1).cpu() == item.answer_ids).all())


def ruler_score(text: str, answers: Sequence[str]) -> float:
    """RULER's score of a generated text: the share of the answers that stand in it, letter case apart."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def _names(rng: random.Random, count: int, wording: str) -> list[tuple[str, str]]:
    """(the needle's key, the question's), all different."""
    if wording == "paraphrased":
        return [(f"the {key}", f"the {other}") for key, other in rng.sample(SYNONYMS, count)]
    pairs = zip(rng.sample(_ADJECTIVES, count), rng.sample(_NOUNS, count), strict=True)
    return [(f"{a}-{b}", f"{a}-{b}") for a, b in pairs]


def _value(rng: random.Random, values: str) -> str:
    if values == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if values == "words":
        return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _wording(kind: Haystack, names: list[str], several: bool) -> tuple[str, str, str]:
    """(introduction, question, start of the answer), RULER's or with other words."""
    name = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    if kind.wording == "paraphrased":
        thing = _OTHER_WORDS[kind.values]
        intro = "Read the following text with care. You will be asked about it afterwards."
        return intro, f"Which {thing} goes with {name}?", f"The {thing} that goes with {name} is:"
    end = "mentioned in the provided text"
    if several:
        intro = f"Some special magic {kind.values} are hidden within the following text. Make sure to memorize it. "
        intro += f"I will quiz you about the {kind.values} afterwards."
        about = f"special magic {kind.values} for {name} {end}"
        return intro, f"What are all the {about}?", f"The {about} are"
    thing = kind.values[:-1]
    intro = f"A special magic {thing} is hidden within the following text. Make sure to memorize it. "
    intro += f"I will quiz you about the {thing} afterwards."
    about = f"special magic {thing} for {name} {end}"
    return intro, f"What is the {about}?", f"The {about} is"


def _plain(tokenizer: Any) -> dict[str, bool]:
    """A chat form brings its own special tokens."""
    return {"add_special_tokens": not tokenizer.chat_template}


def _rows(text: str, part: str, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The rows that hold characters of ``part``."""
    first = text.index(part)
    inside = [i for i, (a, b) in enumerate(offsets) if a < first + len(part) and b > first and a < b]
    return inside[0], inside[-1] + 1


def _following(tokenizer: Any, text: str, answer: str, ids: Tensor) -> Tensor | None:
    """[1, k] the tokens of ``answer`` after ``text``; None if the two melt together."""
    both = torch.tensor([tokenizer(text + answer, **_plain(tokenizer))["input_ids"]])
    n = ids.shape[1]
    return both[:, n:] if both.shape[1] > n and bool((both[:, :n] == ids).all()) else None
