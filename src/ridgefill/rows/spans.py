"""Whole spans (beyond the paper): retrieval is all or nothing on the sentence that holds the fact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.base import Budget, Prompt, Score, Selector, check_budget
from ridgefill.rows.scores import PeakScore
from ridgefill.rows.segments import LONGEST, check_spans, prompt_spans
from ridgefill.rows.settings import check_choice, check_count, written

POOLS = ("mean", "max", "sum")


@dataclass(frozen=True)
class SpanRows(Selector):
    """The best sentences, lines or windows by a row score, each kept whole.

    Spans are taken from the best down; one that does not fit into what is left of the budget is passed over for
    the next that does, so that no span is ever halved. Leading rows run anyway and count nowhere.

    Attributes:
        score: of the rows (`ridgefill.rows.scores`); `PeakScore` ranked the right sentence first in every kind of
            prompt that was tried (results/rows).
        budget: rows kept at most.
        spans: "sentences", "lines", "auto" (lines where the text is source code), or a number of rows.
        pool: a span's score: the "mean", "max" or "sum" over its rows.
        longest: rows of a span at most; longer sentences are cut.
    """

    score: Score = field(default_factory=PeakScore)
    budget: Budget = 0.05
    spans: str | int = "auto"
    pool: str = "max"
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if not callable(getattr(self.score, "score", None)):
            raise SettingError(
                f"spans ranked by {self.score!r}", "it is no score", "give one such as AttentionScore()"
            )
        check_budget("whole spans", self.budget)
        check_spans("whole spans", self.spans)
        check_choice("whole spans: pool", self.pool, POOLS)
        check_count("whole spans: longest", self.longest)

    @property
    def query_aware(self) -> bool:  # type: ignore[override]
        """Whether the score is."""
        return self.score.query_aware

    @property
    def attends(self) -> bool:  # type: ignore[override]
        """Whether the score does."""
        return self.score.attends

    @property
    def probes(self) -> bool:  # type: ignore[override]
        """Whether the score does."""
        return self.score.probes

    def ranked(self, prompt: Prompt) -> list[range]:
        """The prefix's spans, without leading rows, best first; ties to the earlier.

        Raises:
            SettingError: what the score or the spans need is not there.
        """
        parts = prompt_spans(prompt, self.spans, self.longest)
        spans = [range(max(part.start, prompt.leading), part.stop) for part in parts]
        spans = [span for span in spans if span]
        if not spans:
            return []
        lengths = torch.tensor([len(span) for span in spans])
        score = self.score.score(prompt)[spans[0].start :]
        pooled = torch.segment_reduce(score, self.pool, lengths=lengths)
        return [spans[i] for i in pooled.argsort(descending=True, stable=True).tolist()]

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: what the score or the spans need is not there.
        """
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        left = prompt.count(self.budget)
        for span in self.ranked(prompt):
            if len(span) <= left:
                chosen[span.start : span.stop] = True
                left -= len(span)
        return chosen

    def __str__(self) -> str:
        return written("spans", self)
