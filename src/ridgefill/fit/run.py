"""The fit: text -> windows -> one capture pass -> moments -> ridge maps of every split (paper 2.2)."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ridgefill.devices import usable_device
from ridgefill.errors import OutputError, SettingError
from ridgefill.fit.capture import HELDOUT_ROWS, ROWS_A_WINDOW, Capture, Checkpoint, run_capture
from ridgefill.fit.corpus import read_sources
from ridgefill.fit.memory import estimate_memory, host_memory_available, show_bytes
from ridgefill.fit.moments import Moments
from ridgefill.fit.penalty import Heldout, choose_penalty
from ridgefill.fit.report import Report
from ridgefill.fit.solve import Spectrum, ridge
from ridgefill.fit.windows import MIN_WINDOW_ROWS, ROWS_WANTED, Cutter, Plan, plan_windows
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.plan import layer_of

LAMBDA_GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
ENCODINGS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Settings:
    """The numbers of a fit, checked; see `fit`."""

    tokens: int
    length: int
    holdout: float
    lambda_grid: tuple[float, ...]
    leading: int
    chat_share: float
    seed: int

    def __post_init__(self) -> None:
        shortest = self.leading + MIN_WINDOW_ROWS
        grid = self.lambda_grid
        checks = (
            (self.leading >= 0, f"leading={self.leading}", "it counts rows", "give 0 or more"),
            (
                self.length >= shortest,
                f"length={self.length}",
                "windows would be shorter than the rows they need",
                f"give {shortest} or more",
            ),
            (
                self.tokens >= 2 * shortest,
                f"tokens={self.tokens}",
                "it is less than two windows",
                f"give {2 * shortest} or more",
            ),
            (0 < self.holdout <= 0.5, f"holdout={self.holdout}", "it is a share", "give one up to 0.5"),
            (0 <= self.chat_share <= 1, f"chat_share={self.chat_share}", "it is a share", "give 0 to 1"),
            (
                bool(grid) and all(0 < v < math.inf for v in grid),
                f"lambda_grid={grid}",
                "penalties are positive numbers",
                "give one or more, such as 0.01,0.03,0.1",
            ),
        )
        for fine, asked, why, instead in checks:
            if not fine:
                raise SettingError(f"fit with {asked}", why, instead)


@torch.no_grad()
def fit(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str | Path],
    splits: Sequence[int | float],
    out: str | Path,
    *,
    tokens: int = 65536,
    length: int = 4096,
    holdout: float = 0.1,
    lambda_grid: Sequence[float] = LAMBDA_GRID,
    leading: int = 16,
    chat_share: float = 0.25,
    encoding: str = "fp32",
    seed: int = 0,
    moments_device: str | torch.device | None = None,
    checkpoint_seconds: float = 30,
    progress: bool = True,
) -> dict[int, RidgeMaps]:
    """Fits ridge maps for every split in one capture pass, and saves each as ``out/split-<S>``.

    Args:
        model: a causal LM of a supported family, on one device or spread by accelerate's device map.
        tokenizer: its tokenizer.
        texts: text files, JSONL files, folders or Hugging Face data sets; each has an equal share.
        splits: layers (int), or depths (float in (0, 1)).
        out: folder; ``out/.capture`` holds the checkpoint until the fit is done.
        tokens: tokens to run the model on, held-out ones included.
        length: tokens of a window, at most; the model's context bounds it too.
        holdout: share of documents and tokens that only choose the penalty.
        lambda_grid: values of lambda_rel to choose from.
        leading: first rows of each window left out (attention sink).
        chat_share: share of windows wrapped as a user message, where the tokenizer has a chat template.
        encoding: "fp32", "bf16" or "int8".
        seed: decides the documents' order, which are held out, and the held-out rows.
        moments_device: where moments rest, such as "cpu"; by default each layer's own device.
        checkpoint_seconds: seconds between checkpoints at least; they take a tenth of the time at most.
        progress: show progress and remarks on stderr.

    Returns:
        split -> maps, fp32 on the host. ``maps.provenance`` holds: ``lambda_rel``; ``heldout`` {lambda_rel:
        {layer: cosine of what the layer writes}}, ``heldout_identity`` {layer: cosine},
        ``explained_variance`` {layer: share, at lambda_rel}; ``heldout_mean``, ``heldout_identity_mean``;
        ``rows``, ``heldout_rows``, ``tokens``; ``sources`` (a list: name, kind, documents, skipped_files, and
        for fit and heldout: documents, windows, chat_windows, tokens), ``fitted_documents``
        (the first 16 digits of each fitted document's sha256, for evaluations to leave out),
        ``documents_sha256``, ``tokens_sha256``; ``settings``; ``seconds`` {forward, moments, checkpoint,
        solve}, ``moments_ratio`` and ``total_ratio`` (with the moments, with everything, over the forward
        passes alone); ``warnings``; ``versions``. A split at the last layer has no map and only
        ``settings``, ``warnings``, ``versions``.

    Raises:
        UnsupportedModelError, SettingError, CorpusError, OutputError: before or while it runs, by name. After
            a kill or a full disk the same call goes on from the last checkpoint.
    """
    decoder = Decoder(model)
    layers = _layers(splits, decoder.n_layers)
    fitted = [s for s in layers if s < decoder.n_layers - 1]
    longest = getattr(model.config, "max_position_embeddings", None) or length
    grid = tuple(sorted({float(v) for v in lambda_grid}))
    settings = Settings(tokens, min(length, longest), holdout, grid, leading, chat_share, seed)
    if encoding not in ENCODINGS:
        raise SettingError(
            f"fit with encoding={encoding!r}", "there is none of that name", f"use {', '.join(ENCODINGS)}"
        )
    if moments_device is not None:
        moments_device = usable_device(moments_device, "--moments-device")
    with _output(Path(out), layers) as folder, _evaluating(model), Report(progress) as report:
        if settings.length < length:
            report.say(f"Windows of {settings.length} tokens, which is the model's context.")
        identity = ModelIdentity.of(model, tokenizer)
        job = _Job(decoder, identity, settings, folder, report, moments_device)
        results = job.run(tokenizer, texts, fitted, checkpoint_seconds) if fitted else {}
        empty = {"settings": job.settings_json(), "warnings": [], "versions": _versions()}
        maps = {s: RidgeMaps(s, *_parts(results.get(s), identity, empty), encoding=encoding) for s in layers}
        for split, each in maps.items():
            each.save(folder / f"split-{split:02d}", encoding=encoding)
        Checkpoint(folder / ".capture", {}, 0).remove()
        report.close(maps)
    return maps


@dataclass(frozen=True)
class _Result:
    maps: dict[int, AffineMap]
    provenance: dict[str, Any]


def _parts(
    result: _Result | None, identity: ModelIdentity, empty: dict[str, Any]
) -> tuple[dict[int, AffineMap], ModelIdentity, dict[str, Any]]:
    return (result.maps, identity, result.provenance) if result else ({}, identity, empty)


@dataclass(frozen=True)
class _Job:
    """One fit, stage by stage."""

    decoder: Decoder
    identity: ModelIdentity
    settings: Settings
    folder: Path
    report: Report
    moments_device: str | torch.device | None

    def run(
        self, tokenizer: Any, texts: Sequence[str | Path], fitted: list[int], every: float
    ) -> dict[int, _Result]:
        plan = self.plan(tokenizer, texts)
        remarks = self.remarks(plan, fitted)
        capture = self.capture(plan, fitted, every)
        solved, seconds = self.solve(capture, fitted)
        return {s: self.result(s, *solved[s], plan, capture, seconds, list(remarks)) for s in fitted}

    def plan(self, tokenizer: Any, texts: Sequence[str | Path]) -> Plan:
        s = self.settings
        shortest = s.leading + MIN_WINDOW_ROWS
        cutter = Cutter(tokenizer, length=s.length, shortest=shortest, chat_share=s.chat_share, seed=s.seed)
        width = self.decoder.config.hidden_size
        sources = read_sources(texts)
        plan = plan_windows(
            sources, cutter, tokens=s.tokens, holdout=s.holdout, leading=s.leading, width=width
        )
        fit, held = (sum(len(w.ids) for w in part) for part in (plan.fit, plan.heldout))
        self.report.say(
            f"Text: {fit:,} tokens to fit on in {len(plan.fit)} windows, {held:,} held out, "
            f"of {s.tokens:,} asked."
        )
        return plan

    def remarks(self, plan: Plan, fitted: list[int]) -> list[str]:
        """States the memory; warns of what may disappoint."""
        sample = min(HELDOUT_ROWS, ROWS_A_WINDOW * len(plan.heldout))
        memory = estimate_memory(self.decoder.model, fitted, length=self.settings.length, heldout_rows=sample)
        self.report.say(memory.line() + ".")
        remarks = []
        free = host_memory_available()
        if memory.moments > free and any(d.type == "cpu" for d in self.devices(fitted).values()):
            remarks.append(
                f"the moments take {show_bytes(memory.moments)} and {show_bytes(free)} of host memory is "
                "free: fit fewer splits at a time"
            )
        rows, wanted = plan.rows(self.settings.leading), ROWS_WANTED * self.decoder.config.hidden_size
        if rows < wanted:
            remarks.append(f"only {rows} rows to fit on, and {wanted} or more make better maps")
        for remark in remarks:
            self.report.warn(remark)
        return remarks

    def devices(self, fitted: list[int]) -> dict[int, torch.device]:
        """layer -> where its moments rest."""
        layers = range(fitted[0], self.decoder.n_layers)
        if self.moments_device is not None:
            return dict.fromkeys(layers, torch.device(self.moments_device))
        own = {layer: self.decoder.device(layer) for layer in layers}
        return {k: torch.device("cpu") if v.type == "mps" else v for k, v in own.items()}  # mps has no fp64

    def capture(self, plan: Plan, fitted: list[int], every: float) -> Capture:
        moments = Moments(fitted, self.decoder.n_layers, self.devices(fitted))
        capture = Capture(moments)
        checkpoint = Checkpoint(self.folder / ".capture", self.fingerprint(plan, fitted), every)
        if found := checkpoint.resume(capture):
            self.report.say(found[0].upper() + found[1:] + ".")
        windows = plan.fit + plan.heldout
        advance = self.report.bar("Capture", sum(len(w.ids) for w in windows))
        advance(sum(len(w.ids) for w in windows[: capture.position]))
        begun = capture.position

        def after_window(window: Any) -> None:
            advance(len(window.ids))
            checkpoint.save_if_due(capture, len(plan.fit))

        s = self.settings
        run_capture(self.decoder, plan, capture, leading=s.leading, seed=s.seed, after_window=after_window)
        if capture.position > begun:
            checkpoint.save(capture, len(plan.fit))
        return capture

    def solve(
        self, capture: Capture, fitted: list[int]
    ) -> tuple[dict[int, tuple[dict[int, AffineMap], Heldout]], float]:
        """split -> (maps, held-out scores), and the seconds it took."""
        start, moments, sample = time.perf_counter(), capture.moments, capture.heldout()
        layers = {s: range(s + 1, self.decoder.n_layers) for s in fitted}
        advance = self.report.bar("Solve", 2 * sum(map(len, layers.values())))
        solved = {}
        for split in fitted:
            spectrum = Spectrum.of(moments.centred(split, split).cross)
            heldout = choose_penalty(
                self.decoder,
                moments,
                spectrum,
                split,
                sample,
                self.settings.lambda_grid,
                lambda: advance(1),
            )
            maps = {}
            for layer in layers[split]:
                weight, bias = ridge(spectrum, moments.centred(split, layer), heldout.best)
                maps[layer] = AffineMap(weight.float().cpu(), bias.float().cpu())
                advance(1)
            solved[split] = maps, heldout
        return solved, time.perf_counter() - start

    def result(
        self,
        split: int,
        maps: dict[int, AffineMap],
        heldout: Heldout,
        plan: Plan,
        capture: Capture,
        solve_seconds: float,
        remarks: list[str],
    ) -> _Result:
        if heldout.at_end:
            remarks.append(
                f"split {split}: the best lambda_rel, {heldout.best:g}, is at the end of the grid: widen it"
            )
            self.report.warn(remarks[-1])
        seconds = {**capture.seconds, "solve": solve_seconds}
        forward = max(seconds["forward"], 1e-9)
        provenance = {
            "lambda_rel": heldout.best,
            "heldout": {f"{v:g}": _by_name(scores) for v, scores in heldout.ridge.items()},
            "heldout_identity": _by_name(heldout.identity),
            "explained_variance": _by_name(heldout.explained[heldout.best]),
            "heldout_mean": heldout.mean(heldout.best),
            "heldout_identity_mean": sum(heldout.identity.values()) / len(heldout.identity),
            "rows": capture.moments.rows,
            "heldout_rows": len(capture.heldout()[split]),
            "tokens": sum(len(w.ids) for w in plan.fit + plan.heldout),
            "sources": plan.sources,
            "fitted_documents": sorted({w.digest[:16] for w in plan.fit}),
            "documents_sha256": plan.documents_sha256,
            "tokens_sha256": plan.tokens_sha256,
            "settings": self.settings_json(),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "moments_ratio": round((forward + seconds["moments"]) / forward, 4),
            "total_ratio": round(sum(seconds.values()) / forward, 4),
            "warnings": remarks,
            "versions": _versions(),
        }
        return _Result(maps, provenance)

    def settings_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.settings).items()}

    def fingerprint(self, plan: Plan, fitted: list[int]) -> dict[str, Any]:
        """Everything that the captured numbers depend on."""
        return {
            "format": 1,
            "model": self.identity.to_json(),
            "attention": getattr(self.decoder.config, "_attn_implementation", None),
            "devices": sorted({self.decoder.device(i).type for i in range(self.decoder.n_layers)}),
            "windows": [len(plan.fit), len(plan.heldout), plan.tokens_sha256],
            "splits": fitted,
            "leading": self.settings.leading,
            "seed": self.settings.seed,
            "versions": _versions(),
        }


def _layers(splits: Sequence[int | float], n_layers: int) -> list[int]:
    given = [splits] if isinstance(splits, int | float) else list(splits)
    if not given:
        raise SettingError("fit", "no split was named", "name layers or depths, such as 0.25,0.5")
    for split in given:
        if isinstance(split, bool) or not isinstance(split, int | float) or not math.isfinite(split):
            raise SettingError(f"a split at {split!r}", "it is no number", "name a layer, or a depth as 0.25")
    return sorted({layer_of(s, n_layers) for s in given})


def _versions() -> dict[str, str]:
    from ridgefill import __version__

    return {
        "ridgefill": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _by_name(scores: dict[int, float]) -> dict[str, float]:
    return {str(layer): round(score, 6) for layer, score in scores.items()}


@contextmanager
def _output(folder: Path, layers: list[int]) -> Iterator[Path]:
    """The output folder, known to be writable; removed again if nothing came of it."""
    for split in layers:
        path = folder / f"split-{split:02d}"
        if (
            path.exists()
            and not (path / "ridgefill.json").exists()
            and (path.is_file() or any(path.iterdir()))
        ):
            raise OutputError(
                f"write {path}", "it exists and is no maps folder", "name another output folder"
            )
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"write maps to {folder}", error.strerror or str(error), "name a folder that you can write to"
        ) from error
    try:
        yield folder
    except BaseException:
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout off, and back as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
