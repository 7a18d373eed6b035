"""Scores of rows, for `SpanRows`: more is better."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt, Score
from ridgefill.rows.content import content_words, question_rows
from ridgefill.rows.ranking import check_layers, lower_attention, need_reader
from ridgefill.rows.segments import prompt_spans
from ridgefill.rows.settings import check_choice, check_count, check_flag, written

MOST_QUERIES = 256  # query rows read at most
HEADS = ("sum", "max")
NORMS = ("z", "rank")


@dataclass(frozen=True)
class AttentionScore:
    """Attention from the question's last rows in layers below the split, per query row.

    Attributes:
        window: query rows.
        layers: layers read, or None for the paper's (see `readable_layers`).
        heads: "sum" over layers and heads, or the "max" over them.
        baseline: take off, head by head, what as many rows just before the question pay: what a row receives
            from any text.
        hidden: read the rows just before the question instead.
    """

    window: int = 64
    layers: tuple[int, ...] | None = None
    heads: str = "sum"
    baseline: bool = False
    hidden: bool = False

    query_aware = True
    attends = True
    probes = False

    def __post_init__(self) -> None:
        check_count("an attention score: a window", self.window)
        check_layers("an attention score", self.layers)
        check_choice("an attention score: heads", self.heads, HEADS)
        check_flag("an attention score: baseline", self.baseline)
        check_flag("an attention score: hidden", self.hidden)

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32.

        Raises:
            SettingError: no model to read, no attention layer below the split, or no question to hide.
        """
        queries = prompt.queries(self.window, self.hidden)
        received = self._received(prompt, queries)
        if self.baseline:
            received = received - self._received(prompt, _earlier(prompt, queries))
        return _over_heads(received, self.heads)

    def _received(self, prompt: Prompt, queries: range) -> Tensor:
        """[layers, heads, m]: per query row."""
        return lower_attention(prompt, "an attention score", self.layers, queries) / len(queries)

    def __str__(self) -> str:
        return written("attention", self)


@dataclass(frozen=True)
class PeakScore:
    """The largest attention that any of the question's rows pays a row, in any head of any layer up to the split.

    No sum and no mean: the one head that looks for the answer is not drowned by those that look elsewhere. The split
    layer counts, since its input is exact for every row. Query rows are those from the question's first to the
    prompt's last, or the last ``window`` where nobody said where the question is.

    Attributes:
        window: query rows without `Prompt.question`, and with the question hidden.
        layers: attention layers read, or None for all up to the split layer.
        hidden: read the rows just before the question instead.
    """

    window: int = 64
    layers: tuple[int, ...] | None = None
    hidden: bool = False

    query_aware = True
    attends = True
    probes = False

    def __post_init__(self) -> None:
        check_count("a peak score: a window", self.window)
        check_layers("a peak score", self.layers)
        check_flag("a peak score: hidden", self.hidden)

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32.

        Raises:
            SettingError: no model to read, no attention layer up to the split, or no question to hide.
        """
        reader = need_reader(prompt, "a peak score")
        layers = self.layers or tuple(i for i in reader.attention_layers if i <= reader.split)
        if self.hidden or prompt.question is None:
            queries = prompt.queries(self.window, self.hidden)
        else:
            queries = range(max(prompt.question[0], prompt.n - MOST_QUERIES), prompt.n)
            if prompt.question[1] <= prompt.n - MOST_QUERIES:  # a question that stands far before the end
                queries = prompt.queries(MOST_QUERIES)
        return reader.lower(layers, queries, peak=True).float().cpu().amax((0, 1))

    def __str__(self) -> str:
        return written("peak", self)


@dataclass(frozen=True)
class ProbeScore:
    """Attention from the last prompt rows in the real late layers over the filled cache, per query row.

    Attributes:
        queries: last prompt rows that run the late layers.
        heads: "sum" over layers and heads, or the "max" over them.
    """

    queries: int = 256
    heads: str = "sum"

    query_aware = True
    attends = True
    probes = True

    def __post_init__(self) -> None:
        check_count("a probe score: queries", self.queries)
        check_choice("a probe score: heads", self.heads, HEADS)

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32.

        Raises:
            SettingError: no model to read.
        """
        received = need_reader(prompt, "a probe score").probe(self.queries).float().cpu()
        return _over_heads(received, self.heads) / self.queries

    def __str__(self) -> str:
        return written("probe", self)


@dataclass(frozen=True)
class OverlapScore:
    """Words shared with the question, each worth its rarity in the prompt; needs no model.

    A word that df of the prefix's N spans hold is worth max(0, ln((N - df + 0.5) / (df + 0.5))), as in BM25: words
    that occur everywhere are worth nothing. Every row of the word gets its worth; all other rows get 0.

    Attributes:
        window: last content tokens of the question, compared as `LexicalRows` does. Without `Prompt.question` a
            longer one holds text before the question, whose words mislead.
        hidden: compare with the tokens just before the question instead.
    """

    window: int = 32
    hidden: bool = False

    query_aware = True
    attends = False
    probes = False

    def __post_init__(self) -> None:
        check_count("an overlap score: a window", self.window)
        check_flag("an overlap score: hidden", self.hidden)

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32.

        Raises:
            SettingError: no tokenizer, or no question to hide.
        """
        asked = question_rows(prompt, self.window, self.hidden)
        found = content_words(prompt)
        question = {w.text for w in found if asked.issuperset(range(w.first, w.stop))}
        before = [w for w in found if w.stop <= prompt.prefix and asked.isdisjoint(range(w.first, w.stop))]
        spans = prompt_spans(prompt)
        span_of = [i for i, rows in enumerate(spans) for _ in rows]
        held = Counter(text for text, _ in {(w.text, span_of[w.first]) for w in before})
        score = torch.zeros(prompt.prefix)
        for w in before:
            if w.text in question:
                worth = math.log((len(spans) - held[w.text] + 0.5) / (held[w.text] + 0.5))
                score[w.first : w.stop] = score[w.first : w.stop].clamp(min=worth)
        return score

    def __str__(self) -> str:
        return written("overlap", self)


@dataclass(frozen=True)
class Combined:
    """The weighted sum of several scores, each brought to one scale first.

    Attributes:
        scores: what is added.
        weights: one each, or () for 1 each.
        norm: "z": less its mean, over its standard deviation; "rank": its rank from 0 to 1, equal scores sharing
            their mean rank. Both are taken over the prefix rows after the leading ones, whose attention is out of all
            proportion. A score that is the same everywhere adds nothing.
    """

    scores: tuple[Score, ...]
    weights: tuple[float, ...] = ()
    norm: str = "z"

    def __post_init__(self) -> None:
        check_choice("combined scores: norm", self.norm, NORMS)
        if wrong := [s for s in self.scores if not callable(getattr(s, "score", None))]:
            raise SettingError(
                f"combined scores of {wrong[0]!r}", "it is no score", "give one such as AttentionScore()"
            )
        if strange := [w for w in self.weights if not _is_number(w)]:
            raise SettingError(f"a weight of {strange[0]!r}", "it is no number", "give one such as 0.5")
        if not self.scores or (self.weights and len(self.weights) != len(self.scores)):
            raise SettingError(
                f"{len(self.scores)} scores with {len(self.weights)} weights",
                "each score has one weight, and there is at least one",
                "give a weight each, or none",
            )

    @property
    def query_aware(self) -> bool:
        """Whether any of them is."""
        return any(score.query_aware for score in self.scores)

    @property
    def attends(self) -> bool:
        """Whether any of them does."""
        return any(score.attends for score in self.scores)

    @property
    def probes(self) -> bool:
        """Whether any of them does."""
        return any(score.probes for score in self.scores)

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32."""
        norm = _z if self.norm == "z" else _rank
        total = torch.zeros(prompt.prefix)
        for weight, part in zip(self.weights or (1,) * len(self.scores), self.scores, strict=True):
            total[prompt.leading :] += weight * norm(part.score(prompt)[prompt.leading :])
        return total

    def __str__(self) -> str:
        weights = self.weights or (1,) * len(self.scores)
        terms = [f"{s}" if w == 1 else f"{w}*{s}" for w, s in zip(weights, self.scores, strict=True)]
        return f"{self.norm}({' + '.join(terms)})"


def _earlier(prompt: Prompt, queries: range) -> range:
    """As many rows just before the question (or before the query rows, if they are all there is)."""
    stop = min(queries.start, prompt.n if prompt.question is None else prompt.question[0])
    if stop < 1:
        raise SettingError(
            "an attention score above its baseline",
            "no row stands before the question",
            "leave the baseline out",
        )
    return range(max(0, stop - len(queries)), stop)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _over_heads(received: Tensor, heads: str) -> Tensor:
    """[m] of [layers, heads, m]."""
    return received.sum((0, 1)) if heads == "sum" else received.amax((0, 1))


def _z(score: Tensor) -> Tensor:
    spread = score.std(correction=0) if len(score) else score.new_zeros(())
    return (score - score.mean()) / spread if spread > 0 else torch.zeros_like(score)


def _rank(score: Tensor) -> Tensor:
    """Rank from 0 to 1; equal scores share their mean rank; 0 if all are equal."""
    values, which, counts = score.unique(return_inverse=True, return_counts=True)
    if len(values) < 2:
        return torch.zeros_like(score)
    last = counts.cumsum(0)
    return ((last - (counts + 1) / 2) / (len(score) - 1))[which].float()
