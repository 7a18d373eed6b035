"""The search: candidates, the fastest by counted compute first, each measured until it fails or holds (paper 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgefill.bench import ttft
from ridgefill.bench.cost import ModelShape
from ridgefill.bench.environment import environment
from ridgefill.devices import wait
from ridgefill.errors import MapsMismatchError, PromptError, SettingError, UnsupportedModelError
from ridgefill.eval.arms import EXACT
from ridgefill.eval.haystack import Item
from ridgefill.eval.retrieval import answer_limit
from ridgefill.fit.corpus import Source, read_sources
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import tokenizer_sha256
from ridgefill.plan import DEFAULT_LEADING, layer_of
from ridgefill.settings_file import SETTING_FILE, SettingFile, beside
from ridgefill.tune.candidates import Candidate, Fitting, Found, candidates_of, load
from ridgefill.tune.folder import begin, finish
from ridgefill.tune.measure import (
    CONTEXT,
    Bench,
    Budget,
    OutOfTime,
    Pace,
    check_numbers,
    facts,
    held_documents,
    open_runs,
)
from ridgefill.tune.result import LOSSES, RETRIEVAL, Limits, Trial, TuneResult
from ridgefill.tune.texts import Texts, divide, fingerprint, prose_of, whole_texts

SPLITS = (0.25, 0.375, 0.5, 0.625)
TAILS = (512, 1024, 2048)
ROWS = (None, "spans(peak, 0.05)", "attention(0.10)")
REPEATS = 3  # of the winner's timing
_REFUSALS = (SettingError, PromptError, UnsupportedModelError, MapsMismatchError)


def tune(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str | Path],
    output: str | Path,
    *,
    maps: Sequence[str | Path] = (),
    max_key_nll: float | None = None,
    max_novel_nll: float | None = None,
    min_retrieval: float | None = None,
    seconds: float = 3600,
    tokens: int = 4096,
    splits: Sequence[int | float] | None = None,
    tails: Sequence[int] = TAILS,
    rows: Sequence[str | None] = ROWS,
    leading: int = DEFAULT_LEADING,
    documents: int = 8,
    needles: int = 24,
    fit_tokens: int = 65536,
    seed: int = 0,
    tick: Callable[[str], None] = lambda stage: None,
) -> TuneResult:
    """Finds the fastest setting of the ridge fill that keeps to the limits, and writes its setting file.

    Candidates are splits x tails x rows, ordered by counted multiply-accumulates (paper 2.5), the fastest first.
    Each is measured on a third of the items and dropped if an interval already excludes that it holds (a bootstrap
    over three documents is narrow, so this may drop one that all documents would have let pass); else it is
    measured on all. The first that holds is the answer. Nothing is inferred from one candidate about another: that a
    deeper split or a longer tail costs less is not assumed.

    Retrieval is asked of the facts that exact finds, loss of the documents that have such tokens. Losses are means
    over documents with a BCa interval, retrieval is a share with a Clopper-Pearson interval, both 95 %.

    Texts are parted in two where maps are fitted: one part to fit on, one to judge by. What is measured lies below
    ``output`` (``loss`` and ``ruler``, as `ridgefill report` reads them); the same call goes on from there.

    Args:
        texts: as `ridgefill.fit` takes them; text like the prompts to come.
        output: folder of the measurements, the maps that are fitted, tune.json and the setting file.
        maps: fitted maps of this model, to try at their own splits.
        max_key_nll: nats per key token above exact (paper 3.1) that are allowed, as a mean over documents.
        max_novel_nll: the same of novel tokens.
        min_retrieval: share of the facts planted in filled rows that exact finds and the fill must find too.
        seconds: of this call. What would not fit any more is not begun; what was not tried is said.
        tokens: length of the documents and prompts.
        splits: layers or depths; maps for them are fitted in one pass, where none are given. By default `SPLITS`, or
            with ``maps`` theirs alone.
        tails, rows: to try; rows in words, None for none.
        leading: first rows that run exactly.
        documents, needles: how many are measured on.
        fit_tokens: to fit on.
        seed: of everything drawn.
        tick: called with the stage's name before each.

    Raises:
        SettingError: limits, lengths or counts that make no sense, or ``output`` holds another search.
        CorpusError: too little text, no document with tokens that a limit is about, or no fact that exact finds.
        MapsMismatchError, MapsFileError, OutputError: by name.
    """
    limits = Limits(max_key_nll, max_novel_nll, min_retrieval)
    longest = getattr(model.config, "max_position_embeddings", None)
    check_numbers(longest, tokens, tails, leading, documents=documents, needles=needles)
    if not 0 <= seconds < math.inf:
        raise SettingError(f"tune within {seconds} seconds", "it is a length of time", "give 0 or more")
    numbers = _Numbers(tokens, leading, documents, needles, fit_tokens, seed)
    tried = _Tried(tuple(dict.fromkeys(tails)), tuple(dict.fromkeys(rows)))
    search = _Search(model, tokenizer, Path(output), limits, numbers, tried, Budget(seconds), tick)
    return search.run(texts, maps, splits)


@dataclass(frozen=True)
class _Numbers:
    """What decides the items and the maps that are fitted."""

    tokens: int
    leading: int
    documents: int
    needles: int
    fit_tokens: int
    seed: int


@dataclass(frozen=True)
class _Tried:
    """What is tried with every map."""

    tails: tuple[int, ...]
    rows: tuple[str | None, ...]


class _Search:
    """One call of `tune`, stage by stage."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        output: Path,
        limits: Limits,
        numbers: _Numbers,
        tried: _Tried,
        budget: Budget,
        tick: Callable[[str], None],
    ) -> None:
        self.model, self.tokenizer, self.output = model, tokenizer, output
        self.limits, self.numbers, self.tried = limits, numbers, tried
        self.budget, self.tick = budget, tick
        self.decoder = Decoder(model)
        self.pace = Pace(model, tokenizer, numbers.tokens)
        self.remarks: list[str] = []

    def run(
        self, texts: Sequence[str | Path], maps: Sequence[str | Path], splits: Sequence[int | float] | None
    ) -> TuneResult:
        """All stages."""
        given = [load(folder, self.model, self.tokenizer, given=True) for folder in maps]
        missing = self._missing(given, splits)
        sources = read_sources(texts)
        self.settings = self._settings(fingerprint(sources), fits=bool(missing))
        begin(self.output, self.settings)
        own = self._texts(sources, texts, bool(missing))
        fitting = Fitting(
            self.model,
            self.tokenizer,
            self.output / "maps",
            self.numbers.fit_tokens,
            self.numbers.leading,
            self.numbers.seed,
            self.budget,
            self.pace,
            self.tick,
        )
        fitted, remarks = fitting.maps(missing, own.fit)
        self.remarks += remarks
        n = self.numbers
        shape = ModelShape.from_config(self.model.config)
        candidates = candidates_of(
            [*given, *fitted],
            self.tried.tails,
            self.tried.rows,
            leading=n.leading,
            shape=shape,
            tokens=n.tokens,
        )
        trials, winner, bench = self._try_all(candidates, own)
        return self._answer(trials, winner, bench, [source.name for source in sources])

    def _missing(self, given: Sequence[Found], splits: Sequence[int | float] | None) -> list[int]:
        """Layers for which maps are to be fitted."""
        if splits is None:
            splits = () if given else SPLITS
        layers = {layer_of(split, self.decoder.n_layers) for split in splits}
        if not given and not layers:
            raise SettingError("tune", "no split and no maps were named", "name splits, such as 0.375,0.5")
        return sorted(layers - {found.maps.split for found in given})

    def _texts(self, sources: Sequence[Source], texts: Sequence[str | Path], fits: bool) -> Texts:
        """The texts, in two parts where maps are fitted."""
        n = self.numbers
        if not fits:
            return whole_texts(sources, texts)
        held = (n.documents + n.needles) * n.tokens
        return divide(sources, self.output / "texts", fit_tokens=n.fit_tokens, held_tokens=held, seed=n.seed)

    def _settings(self, texts: str, fits: bool) -> dict[str, Any]:
        """What a later call on the same folder must have in common."""
        model = Path(self.model.config._name_or_path).name
        tokenizer = tokenizer_sha256(self.tokenizer)
        return {"model": model, "tokenizer": tokenizer, "texts": texts, "fits_maps": fits} | asdict(
            self.numbers
        )

    # --- the trials

    def _try_all(
        self, candidates: Sequence[Candidate], texts: Texts
    ) -> tuple[list[Trial], Candidate | None, Bench | None]:
        bench, late = None, ""
        try:
            bench = self._bench([c for c in candidates if c.worth_measuring], texts)
            bench.measure_exact(self.tick)
        except OutOfTime as error:
            late = str(error)
        trials: list[Trial] = []
        winner = None
        for at, candidate in enumerate(candidates, 1):
            trial = Trial(candidate.arm.name, candidate.counted)
            if candidate.refused:
                trials.append(replace(trial, state="refused", why=candidate.refused))
            elif winner is not None:
                why = "another holds" if candidate.counted is None else "a faster one holds"
                trials.append(replace(trial, state="not needed", why=why))
            elif candidate.counted is not None and candidate.counted >= 1:
                trials.append(replace(trial, state="dropped", why="it computes no less than exact"))
            elif candidate.found.folder is None:
                trials.append(replace(trial, why="its maps are not fitted"))
            elif late or bench is None:
                trials.append(replace(trial, why=late))
            else:
                self.tick(f"setting {at} of {len(candidates)}: {candidate.arm.name}")
                trials.append(_try(bench, candidate, trial))
                winner = candidate if trials[-1].state == "holds" else None
        return trials, winner, bench

    def _bench(self, candidates: Sequence[Candidate], texts: Texts) -> Bench:
        """Documents, facts and runs, for what the limits need."""
        n = self.numbers
        self.budget.take("reading the texts", lambda: 0.0)
        if not candidates:
            raise OutOfTime("there is nothing to measure")
        fitted = self._fitted_documents([c.found for c in candidates])
        bench = Bench(self.model, self.tokenizer, self.limits, self.budget, self.pace, EXACT)
        if any(name in self.limits.wanted for name in LOSSES):
            bench.documents = held_documents(
                self.tokenizer, texts.strata, n.tokens, n.documents, fitted, n.seed
            )
            bench.scored_tail = min(self.tried.tails)
            bench.context = min(CONTEXT, n.tokens // 2, n.tokens - bench.scored_tail)
        if "key_nll" in self.limits.wanted and bench.context < CONTEXT:
            self.remarks.append(
                f"Key tokens are here those that lose more than 2 nats when the context is cut to its last "
                f"{bench.context:,} tokens (the paper cuts to {CONTEXT:,}); more --tokens allow the paper's cut."
            )
        if RETRIEVAL in self.limits.wanted:
            bench.items = self._facts(texts, fitted)
        open_runs(bench, self.output, [c.arm for c in candidates], n.tokens, n.seed)
        return bench

    def _fitted_documents(self, maps: Sequence[Found]) -> set[str]:
        """Digests of the documents that no measurement may use."""
        key = "fitted_documents"
        if any(found.maps.maps and key not in found.maps.provenance for found in maps):
            self.remarks.append("Some maps do not say what they were fitted on: judge them by other texts.")
        return {digest for found in maps for digest in found.maps.provenance.get(key, ())}

    def _facts(self, texts: Texts, fitted: set[str]) -> list[tuple[str, str, Item]]:
        n = self.numbers
        longest = getattr(self.model.config, "max_position_embeddings", None) or 2 * n.tokens
        tokens = min(n.tokens, longest - answer_limit(self.tokenizer, ("1234567",)))
        prose = prose_of(texts.held, 10 * tokens * (n.needles // 2 + 2), fitted)
        tail = max(self.tried.tails)  # every fact lies in rows that every candidate fills
        items, remark = facts(
            self.tokenizer, n.needles, prose, tokens=tokens, tail=tail, leading=n.leading, seed=n.seed
        )
        self.remarks += [remark] if remark else []
        return items

    # --- the answer

    def _answer(
        self,
        trials: Sequence[Trial],
        winner: Candidate | None,
        bench: Bench | None,
        sources: Sequence[str],
    ) -> TuneResult:
        path, timing, won = self.output / SETTING_FILE, None, None
        if winner is not None and bench is not None:
            timing = self._timing(winner, bench)
            won = next(t for t in trials if t.name == winner.arm.name)
        elif path.exists():
            self.remarks.append(f"The {SETTING_FILE} that lies there is an earlier call's answer.")
        result = TuneResult(
            self.limits,
            tuple(trials),
            won,
            timing,
            None if won is None else path,
            self.numbers.tokens,
            self.budget.spent,
            tuple(self.remarks),
        )
        if winner is not None:
            folder, maps = winner.found.folder, winner.found.maps
            named = None if folder is None else beside(folder, self.output)
            SettingFile.of(winner.plan, named, maps, self._evidence(result, sources, bench)).write(path)
        finish(self.output, self.settings, result.to_json())
        return result

    def _timing(self, winner: Candidate, bench: Bench) -> Mapping[str, Any] | None:
        """The winner and exact, interleaved, on a text of ours; None if time is up."""
        ids = bench.documents[0].ids if bench.documents else bench.items[0][2].ids
        try:
            self.budget.take("timing the answer", lambda: 2 * (REPEATS + 1) * self.pace.prefill())
        except OutOfTime as error:
            self.remarks.append(f"The answer's speed was not measured: {error}.")
            return None
        self.tick(f"timing {winner.arm.name}")
        ids = ids.to(self.model.device)
        wait(ids.device)
        with torch.no_grad():
            (timed,) = ttft.measure(
                self.model, winner.plan, ids, [ids.shape[1]], REPEATS, tokenizer=self.tokenizer
            )
        return timed.to_json()

    def _evidence(self, result: TuneResult, sources: Sequence[str], bench: Bench | None) -> dict[str, Any]:
        won = result.winner
        return {
            "model": self.settings["model"],
            "texts": list(sources),
            **asdict(self.numbers),
            "limits": vars(self.limits),
            "figures": {} if won is None else won.to_json()["figures"],
            "confident": won is not None and won.confident,
            "macs_over_exact": None if won is None else won.macs_over_exact,
            "timing": result.timing,
            "context": None if bench is None or bench.loss is None else bench.context,
            "tried": sum(t.state in ("holds", "fails", "dropped", "refused") for t in result.trials),
            "not_tried": [t.name for t in result.not_tried],
            "remarks": list(result.remarks),
            "seconds": round(result.seconds, 1),
            "environment": environment(self.model.device),
        }


def _try(bench: Bench, candidate: Candidate, trial: Trial) -> Trial:
    """One candidate: a third of the items, then all of them."""
    for screening in (True, False) if bench.screens else (False,):
        try:
            figures = bench.judge(candidate.arm, screening)
        except OutOfTime as error:
            return replace(trial, why=f"only a third of the items: {error}" if trial.figures else str(error))
        except _REFUSALS as error:
            return replace(trial, state="refused", why=f"{error.asked}: {error.why}")
        trial = replace(trial, figures=figures)
        if screening and any(figure.excluded for figure in figures.values()):
            return replace(trial, state="dropped", why=_missed(trial, "a third of the items excludes it"))
    if trial.figures.keys() == bench.limits.wanted.keys() and not trial.missed_by:
        return replace(trial, state="holds", why="" if trial.confident else "on these texts")
    return replace(trial, state="fails", why=_missed(trial, "on all items"))


def _missed(trial: Trial, how: str) -> str:
    names = {"key_nll": "key-token loss", "novel_nll": "novel-token loss", RETRIEVAL: "retrieval"}
    return f"{how}: {', '.join(names[k] for k, f in trial.figures.items() if not f.holds)}"
