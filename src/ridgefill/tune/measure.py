"""The measurements of a search: exact once, candidates on a third of the items and then on all, within a time."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgefill.bench.ttft import first_token
from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.haystack import NOISE, Haystack, Item
from ridgefill.eval.loss import SCORED
from ridgefill.eval.losses import CONTEXT, Document, documents_of, measure_losses
from ridgefill.eval.results import Run
from ridgefill.eval.retrieval import measure_retrieval
from ridgefill.eval.runs import open_run
from ridgefill.tune.result import LOSSES, RETRIEVAL, Figure, Limits

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm

FEWEST = 3  # items of the cheap test, at least
LEVEL = 0.95
_EXACT_SHARE = {"loss": 2.0, "ruler": 1.5}  # of one prefill's time, until something was measured


class OutOfTime(Exception):
    """What was to be run next does not fit into the time that is left; never shown to a user."""


@dataclass
class Budget:
    """The time of one call, in seconds."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.seconds - self.spent

    def take(self, what: str, estimate: Callable[[], float]) -> None:
        """Raises OutOfTime if ``what`` would end after the end; nothing is estimated after it."""
        if self.left <= 0:
            raise OutOfTime("the time was up")
        if (needed := estimate()) > self.left:
            raise OutOfTime(f"{what} takes about {needed:.0f} s, and {max(0.0, self.left):.0f} s were left")


@dataclass
class Pace:
    """Seconds of one item of a kind: as last measured, or from one exact prefill before that."""

    model: Any
    tokenizer: Any
    tokens: int
    known: dict[str, float] = field(default_factory=dict)

    def prefill(self) -> float:
        """Seconds of one exact prefill of ``tokens`` tokens; measured once."""
        if "prefill" not in self.known:
            text = NOISE * (self.tokens // 8 + 1)  # it has some twenty tokens
            coded = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=self.tokens)
            ids = coded["input_ids"].to(self.model.device)
            self.known["prefill"] = first_token(self.model, ids)[1] * self.tokens / ids.shape[1]
        return self.known["prefill"]

    def item(self, kind: str) -> float:
        """Seconds of one item of kind "loss" or "ruler"."""
        return self.known.get(kind) or _EXACT_SHARE[kind] * self.prefill()


@dataclass
class Bench:
    """What candidates are measured on; each measurement is filed in a run's folder and never made twice.

    Attributes:
        loss, ruler: the runs, where a limit needs them.
        documents, items: what exact was measured on; candidates run those that can tell something.
        scored_tail: tokens at each document's end that are scored: those that every candidate runs exactly.
        context: to whose last tokens the context is cut to find key tokens.
    """

    model: Any
    tokenizer: Any
    limits: Limits
    budget: Budget
    pace: Pace
    exact: Arm
    loss: Run | None = None
    ruler: Run | None = None
    documents: Sequence[Document] = ()
    items: Sequence[tuple[str, str, Item]] = ()
    scored_tail: int = SCORED
    context: int = CONTEXT

    def measure_exact(self, tick: Callable[[str], None]) -> None:
        """Exact on everything, and then only what it shows to be of use is kept.

        Raises:
            OutOfTime: it does not fit.
            CorpusError: no document has a token that a limit is about, or exact finds no fact.
        """
        if self.loss is not None:
            tick(f"exact, loss of {len(self.documents)} documents")
            self._losses(self.exact, self.documents)
            self.documents = self._telling_documents(self.loss)
        if self.ruler is not None:
            tick(f"exact, {len(self.items)} facts")
            self._retrieval(self.exact, self.items)
            self.items = self._found_items(self.ruler)

    @property
    def screens(self) -> bool:
        """Whether a third of the items is fewer than all of them."""
        return any(third(len(all_of)) < len(all_of) for all_of in (self.documents, self.items))

    def judge(self, arm: Arm, screening: bool) -> dict[str, Figure]:
        """A candidate's figures, on all items or on a third of them.

        Raises:
            OutOfTime: what is not measured yet does not fit.
        """
        documents = self.documents[: third(len(self.documents))] if screening else self.documents
        items = spread(self.items) if screening else self.items
        found: dict[str, Figure] = {}
        if self.loss is not None:
            self._losses(arm, documents)
            found |= self._loss_figures(self.loss, arm, [d.item for d in documents])
        # a candidate that fails on the loss needs no facts asked
        if self.ruler is not None and not (screening and any(f.excluded for f in found.values())):
            self._retrieval(arm, items)
            found[RETRIEVAL] = self._retrieval_figure(self.ruler, arm, [name for name, *_ in items])
        return found

    def _losses(self, arm: Arm, documents: Sequence[Document]) -> None:
        run = self.loss
        if run is None:
            return

        def call() -> None:
            measure_losses(
                self.model,
                self.tokenizer,
                [arm],
                documents,
                run,
                tail=self.scored_tail,
                scored=min(SCORED, self.scored_tail),
                context=self.context,
            )

        self._timed(run, arm, [d.item for d in documents], call)

    def _retrieval(self, arm: Arm, items: Sequence[tuple[str, str, Item]]) -> None:
        run = self.ruler
        if run is not None:
            names = [name for name, *_ in items]
            call = lambda: measure_retrieval(self.model, self.tokenizer, [arm], items, run)  # noqa: E731
            self._timed(run, arm, names, call)

    def _timed(self, run: Run, arm: Arm, names: Sequence[str], call: Callable[[], object]) -> None:
        kind = str(run.about["kind"])
        todo = run.missing([arm], names)
        if not todo:
            return
        self.budget.take(f"measuring {todo} items", lambda: todo * self.pace.item(kind))
        begun = time.monotonic()
        call()
        self.pace.known[kind] = (time.monotonic() - begun) / todo

    def _telling_documents(self, run: Run) -> list[Document]:
        by_item = _metrics(run, self.exact.name)
        names = [name for name in LOSSES if name in self.limits.wanted]
        for name in names:
            if not any(name in by_item[d.item] for d in self.documents):
                raise CorpusError(
                    f"judge by {name.removesuffix('_nll')} tokens",
                    f"none of the {len(self.documents)} documents has any among its scored tokens",
                    "give more --tokens or --documents, or text whose end needs its beginning"
                    + (", or limit --max-novel-nll" if name == "key_nll" else ""),
                )
        return [d for d in self.documents if any(name in by_item[d.item] for name in names)]

    def _found_items(self, run: Run) -> list[tuple[str, str, Item]]:
        by_item = _metrics(run, self.exact.name)
        found = [item for item in self.items if by_item[item[0]]["score"] == 1]
        if not found:
            raise CorpusError(
                "judge by retrieval",
                f"the exact model itself finds none of {len(self.items)} facts, so none can be lost",
                "limit the loss instead (--max-key-nll), or give fewer --tokens or more --needles",
            )
        return found

    def _loss_figures(self, run: Run, arm: Arm, names: Sequence[str]) -> dict[str, Figure]:
        from ridgefill.eval.intervals import interval

        ours, exact = _metrics(run, arm.name), _metrics(run, self.exact.name)
        figures = {}
        for metric in (m for m in LOSSES if m in self.limits.wanted):
            rises = [ours[n][metric] - exact[n][metric] for n in names if metric in exact[n]]
            if rises:
                found = interval(rises, level=LEVEL)
                mean = sum(rises) / len(rises)
                limit = self.limits.wanted[metric]
                figures[metric] = Figure(mean, found.low, found.high, len(rises), limit)
        return figures

    def _retrieval_figure(self, run: Run, arm: Arm, names: Sequence[str]) -> Figure:
        from scipy.stats import binomtest

        ours = _metrics(run, arm.name)
        kept, n = sum(ours[name]["score"] == 1 for name in names), len(names)
        # exact (Clopper and Pearson), for a bootstrap of all or nothing has no width
        ends = binomtest(kept, n).proportion_ci(LEVEL, method="exact")
        limit = self.limits.wanted[RETRIEVAL]
        return Figure(kept / n, float(ends.low), float(ends.high), n, limit, more_is_better=True)


def third(n: int) -> int:
    """How many of n items the cheap test takes."""
    return min(n, max(FEWEST, math.ceil(n / 3)))


def spread(items: Sequence[tuple[str, str, Item]]) -> list[tuple[str, str, Item]]:
    """A third of the items, at even distances, so that every depth is among them."""
    count = third(len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def open_runs(bench: Bench, folder: Path, arms: Sequence[Arm], tokens: int, seed: int) -> None:
    """Opens the runs that the limits need, below ``folder``, and gives them to ``bench``.

    Raises:
        SettingError: a folder holds the run of another search, by what differs.
    """
    arms = [bench.exact, *arms]
    model, tokenizer = bench.model, bench.tokenizer
    if bench.documents:
        settings = {"tokens": tokens, "seed": seed, "tail": bench.scored_tail, "context": bench.context}
        bench.loss = open_run(folder / "loss", "loss", settings, model, tokenizer, arms, None, tokens)
    if bench.items:
        settings = {"tokens": bench.items[0][2].ids.shape[1], "seed": seed}
        bench.ruler = open_run(folder / "ruler", "ruler", settings, model, tokenizer, arms, None, tokens)


def held_documents(
    tokenizer: Any,
    strata: Mapping[str, Sequence[str | Path]],
    tokens: int,
    count: int,
    fitted: Collection[str],
    seed: int,
) -> list[Document]:
    """``count`` documents at most, from each text in turn.

    Raises:
        CorpusError: no text has a stretch of ``tokens`` tokens.
    """
    by, refused = {}, None
    for name, paths in strata.items():
        try:
            by[name] = documents_of(tokenizer, {name: paths}, tokens, count, fitted=fitted, seed=seed)
        except CorpusError as error:  # too short a text, among longer ones
            refused = error
    if refused is not None and not by:
        raise refused
    turns = (made[i] for i in range(count) for made in by.values() if i < len(made))
    return list(turns)[:count]


def facts(
    tokenizer: Any, count: int, texts: Sequence[str], *, tokens: int, tail: int, leading: int, seed: int
) -> tuple[list[tuple[str, str, Item]], str]:
    """Prompts with one planted fact each, half in noise and half in the user's prose, and a remark on them.

    Every fact lies in rows that every candidate fills unless its selector takes them.

    Args:
        texts: for the prose; noise alone where they have too few sentences.
        tail: the longest of the candidates.

    Raises:
        SettingError, PromptError: lengths that leave no room.
    """
    common: dict[str, Any] = {"tokens": tokens, "tail": tail, "leading": leading, "seed": seed}
    remark = ""
    hays: dict[str, list[Item]] = {}
    try:
        if count > 1:
            hays["prose"] = Haystack(hay="prose", **common).items(tokenizer, count // 2, texts)
    except CorpusError:
        remark = (
            "The facts were planted in noise alone: the texts have too few sentences for so long prompts."
        )
    in_prose = len(hays.get("prose", ()))
    hays["noise"] = Haystack(hay="noise", **common).items(tokenizer, count - in_prose)
    named = [
        (f"{hay}/{i}/{_name(item)}", hay, item) for hay, made in hays.items() for i, item in enumerate(made)
    ]
    return sorted(named, key=lambda each: each[2].depth), remark


def check_numbers(
    longest: int | None, tokens: int, tails: Sequence[int], leading: int, **counts: int
) -> None:
    """Raises SettingError for lengths and counts that nothing can be measured with."""
    for name, value in counts.items():
        if value < 1:
            raise SettingError(
                f"tune on {value} {name}", "there would be nothing to judge by", "give 1 or more"
            )
    if not tails:
        raise SettingError("tune", "no tail was named", "name one or more, such as 512,1024")
    if longest is not None and tokens > longest:
        raise SettingError(
            f"tune at {tokens} tokens",
            f"the model's context is {longest}",
            f"give --tokens {longest} or fewer",
        )
    if bad := [tail for tail in tails if tail < 2 or tail + leading + 1 > tokens]:
        raise SettingError(
            f"tails of {', '.join(map(str, bad))} tokens",
            f"of {tokens} tokens with {leading} leading rows they leave nothing to fill, or nothing to score",
            f"name tails from 2 to {max(2, tokens - leading - 1)}, or more --tokens",
        )


def _name(item: Item) -> str:
    return hashlib.sha256(item.text.encode()).hexdigest()[:12]


def _metrics(run: Run, arm: str) -> Mapping[str, dict[str, float]]:
    """item -> metrics of one arm."""
    return {line["item"]: line["metrics"] for line in run.lines if line["arm"] == arm}
