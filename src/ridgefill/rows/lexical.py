"""The lexical net (paper 2.4): sentences that share a run of words with the question, one of them rare."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.rows.base import Budget, Prompt, Selector, check_budget
from ridgefill.rows.content import content_words, question_rows
from ridgefill.rows.segments import prompt_spans
from ridgefill.rows.settings import check_count, check_flag, written
from ridgefill.rows.text import Word


@dataclass(frozen=True)
class LexicalRows(Selector):
    """Prefix sentences that share a run of words with the prompt's last content tokens.

    The paper leaves its word and sentence rules to an appendix; ours: words compare case folded and without
    punctuation (`words`), a run is inside one sentence (`prompt_spans`), and where the cap does not hold all,
    sentences with more shared runs come first and the last one is cut short.

    Attributes:
        window: last content tokens of the prompt; control and chat-template tokens do not count.
        run: words shared in a row.
        rare: the run holds a word that occurs at most this often in the whole prefix.
        sentence_rows: first rows kept of a sentence.
        cap: most rows in all.
        hidden: compare with the tokens just before the question instead.
    """

    window: int = 64
    run: int = 4
    rare: int = 2
    sentence_rows: int = 80
    cap: Budget = 0.05
    hidden: bool = False

    query_aware = True

    def __post_init__(self) -> None:
        for name in ("window", "run", "rare", "sentence_rows"):
            check_count(f"lexical rows: {name}", getattr(self, name))
        check_budget("lexical rows", self.cap)
        check_flag("lexical rows: hidden", self.hidden)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: no tokenizer, or no question to hide.
        """
        asked = question_rows(prompt, self.window, self.hidden)
        sentences = prompt_spans(prompt, "auto", longest=max(1, prompt.prefix))
        shared = self._shared_runs(prompt, content_words(prompt), asked, sentences)
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        left = prompt.count(self.cap)
        for i, _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
            rows = range(max(prompt.leading, sentences[i].start), sentences[i].stop)
            rows = rows[: min(self.sentence_rows, left)]
            chosen[rows.start : rows.stop] = True
            left -= len(rows)
        return chosen

    def _shared_runs(
        self, prompt: Prompt, found: list[Word], asked: set[int], sentences: list[range]
    ) -> Counter[int]:
        """Runs of ``run`` words with a rare one that each sentence shares with the question.

        A longer shared run that holds a rare word holds such a run around it.
        """
        before = [w for w in found if w.stop <= prompt.prefix and asked.isdisjoint(range(w.first, w.stop))]
        question = [w for w in found if asked.issuperset(range(w.first, w.stop))]
        runs = set(_runs(question, self.run))
        often = Counter(w.text for w in before)
        sentence_of = [i for i, rows in enumerate(sentences) for _ in rows]
        shared: Counter[int] = Counter()
        for at, run in enumerate(_runs(before, self.run)):
            first, last = sentence_of[before[at].first], sentence_of[before[at + self.run - 1].stop - 1]
            if run in runs and first == last and min(often[word] for word in run) <= self.rare:
                shared[first] += 1
        return shared

    def __str__(self) -> str:
        return written("lexical", self)


def _runs(found: list[Word], length: int) -> list[tuple[str, ...]]:
    texts = [w.text for w in found]
    return [tuple(texts[i : i + length]) for i in range(len(texts) - length + 1)]
