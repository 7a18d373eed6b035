"""One fit, stage by stage: windows, capture, solve, terminal states, result (paper 2.2, 2.3)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ridgefill.fit.capture import HELDOUT_ROWS, ROWS_A_WINDOW, Capture, Checkpoint, run_capture
from ridgefill.fit.corpus import read_sources
from ridgefill.fit.forms import FORMS, Form
from ridgefill.fit.memory import estimate_memory, host_memory_available, show_bytes
from ridgefill.fit.moments import Moments
from ridgefill.fit.penalty import Heldout, choose_penalty
from ridgefill.fit.reduce import reduce
from ridgefill.fit.report import Report
from ridgefill.fit.settings import Settings
from ridgefill.fit.solve import Spectrum, in_basis, intercept, ridge
from ridgefill.fit.terminal import PAPER_STATES, compare_states
from ridgefill.fit.windows import MIN_WINDOW_ROWS, ROWS_WANTED, Cutter, Plan, Window, plan_windows
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Source
from ridgefill.rows.token_table import TokenTable

FEW_STATES = 8  # with fewer, an offset is mostly the noise of its few states


@dataclass(frozen=True)
class Solved:
    """What one split's moments give.

    Attributes:
        maps: layer -> map, fp32 on the host.
        heldout: its held-out scores.
        down: the reduction that the maps share, or None.
    """

    maps: dict[int, AffineMap]
    heldout: Heldout
    down: Tensor | None = None


@dataclass(frozen=True)
class Job:
    """One fit, stage by stage.

    Attributes:
        decoder: the model.
        identity: its identity, and its tokenizer's.
        settings: the numbers of the fit.
        folder: where the checkpoint lies.
        report: to the user.
        moments_device: where moments rest; by default each layer's own device.
        encoding: of the maps, when they are saved.
        form: what the maps read and give.
    """

    decoder: Decoder
    identity: ModelIdentity
    settings: Settings
    folder: Path
    report: Report
    moments_device: str | torch.device | None
    encoding: str = "fp32"
    form: Form = FORMS["plain"]

    def run(
        self, tokenizer: Any, texts: Sequence[str | Path], fitted: list[int], every: float
    ) -> dict[int, RidgeMaps]:
        """All stages: split -> maps.

        Args:
            fitted: ascending splits.
            every: seconds between checkpoints at the least.
        """
        plan = self.plan(tokenizer, texts)
        remarks = self.remarks(plan, fitted)
        capture = self.capture(plan, fitted, every)
        solved = self.solve(capture, fitted)
        tokens = TokenTable.of(tokenizer, count_tokens(plan.fit, self.identity.vocab))
        maps = {
            s: RidgeMaps(
                s,
                solved[s].maps,
                self.identity,
                encoding=self.encoding,
                tokens=tokens,
                reading=self.form.reading(s),
                down=solved[s].down,
            )
            for s in fitted
        }
        self.terminal(maps, plan, capture, remarks)
        for split, each in maps.items():
            each.provenance |= self.provenance(split, solved[split].heldout, plan, capture, list(remarks))
        return maps

    def plan(self, tokenizer: Any, texts: Sequence[str | Path]) -> Plan:
        """Reads the text and cuts it into windows."""
        s = self.settings
        shortest = s.leading + MIN_WINDOW_ROWS
        cutter = Cutter(tokenizer, length=s.length, shortest=shortest, chat_share=s.chat_share, seed=s.seed)
        blocks = self.form.reading(self.decoder.n_layers).blocks
        sources = read_sources(texts)
        plan = plan_windows(
            sources,
            cutter,
            tokens=s.tokens,
            holdout=s.holdout,
            leading=s.leading,
            width=blocks * self.decoder.width_in,
            blocks=blocks,
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
        memory = estimate_memory(
            self.decoder.model,
            fitted,
            length=self.settings.length,
            heldout_rows=sample,
            reads=self.reads(fitted),
            block=self.decoder.width_in,
        )
        self.report.say(memory.line() + ".")
        remarks = []
        free = host_memory_available()
        if memory.moments > free and any(d.type == "cpu" for d in self.devices(fitted).values()):
            remarks.append(
                f"the moments take {show_bytes(memory.moments)} and {show_bytes(free)} of host memory is "
                "free: fit fewer splits at a time"
            )
        rows, wanted = plan.rows(self.settings.leading), ROWS_WANTED * max(self.widths(fitted).values())
        if rows < wanted:
            several = self.form.reading(max(fitted)).blocks > 1
            compare = "; with fewer, compare maps of form 'direct' or 'plain'" if several else ""
            remarks.append(f"only {rows} rows to fit on, and {wanted} or more make better maps{compare}")
        for remark in remarks:
            self.report.warn(remark)
        return remarks

    @property
    def shares_states(self) -> bool:
        """Whether what is read at a split is the split layer's input, so that the moments hold it once."""
        return self.form == FORMS["plain"] and self.decoder.width_in == self.decoder.width_out

    def reads(self, fitted: Sequence[int]) -> dict[int, tuple[Source, ...]] | None:
        """split -> what is read there, where the moments keep that apart."""
        return None if self.shares_states else {s: self.form.reading(s).sources for s in fitted}

    def widths(self, fitted: Sequence[int]) -> dict[int, int]:
        """split -> K, the columns that are read there."""
        return {s: self.form.reading(s).blocks * self.decoder.width_in for s in fitted}

    def devices(self, fitted: list[int]) -> dict[int, torch.device]:
        """layer -> where its moments rest."""
        layers = range(fitted[0], self.decoder.n_layers)
        if self.moments_device is not None:
            return dict.fromkeys(layers, torch.device(self.moments_device))
        own = {layer: self.decoder.device(layer) for layer in layers}
        return {k: torch.device("cpu") if v.type == "mps" else v for k, v in own.items()}  # mps has no fp64

    def capture(self, plan: Plan, fitted: list[int], every: float) -> Capture:
        """Runs the model over the windows, from where an earlier run was stopped."""
        reads, devices = self.reads(fitted), self.devices(fitted)
        moments = Moments(fitted, self.decoder.n_layers, devices, reads=reads, single=self.form.normed)
        readings = {} if reads is None else {s: self.form.reading(s) for s in fitted}
        capture = Capture(moments, readings)
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

    def solve(self, capture: Capture, fitted: list[int]) -> dict[int, Solved]:
        """split -> its maps and held-out scores; the time goes to ``capture.seconds``."""
        start, moments = time.perf_counter(), capture.moments
        sample, states = capture.heldout(), capture.heldout_states()
        layers = {s: range(s + 1, self.decoder.n_layers) for s in fitted}
        advance = self.report.bar("Solve", 2 * sum(map(len, layers.values())))
        solved = {}
        for split in fitted:
            spectrum = Spectrum.of(moments.gram(split))
            columns = self.form.columns(split, self.decoder.width_in)
            bases = None  # a reduction wants those of all layers at once; else one at a time is enough
            if columns is not None:
                bases = {i: in_basis(spectrum, moments.centred(split, i)) for i in layers[split]}
            heldout = choose_penalty(
                self.decoder,
                moments,
                spectrum,
                split,
                sample,
                self.settings.lambda_grid,
                lambda: advance(1),
                states[split],
                self.form.gives,
                None if self.decoder.wide else sample[split],
                bases,
            )
            if columns is None or bases is None:
                down, maps = None, {}
                for layer in layers[split]:
                    maps[layer] = ridge(spectrum, moments.centred(split, layer), heldout.best)
                    advance(1)
            else:
                down, maps = self.reduced(spectrum, moments, split, heldout.best, columns, bases)
                advance(len(maps))
            solved[split] = Solved(
                {
                    i: AffineMap(weight.float().cpu(), bias.float().cpu())
                    for i, (weight, bias) in maps.items()
                },
                heldout,
                None if down is None else down.float().cpu(),
            )
        capture.seconds["solve"] = time.perf_counter() - start
        return solved

    def reduced(
        self,
        spectrum: Spectrum,
        moments: Moments,
        split: int,
        lambda_rel: float,
        columns: int,
        bases: dict[int, Tensor],
    ) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """The reduction of a split, and its layers' weights and biases (`fit.reduce`)."""
        pairs = {i: 2 if self.decoder.given_ready(i, self.form.gives) else 1 for i in bases}
        down, weights = reduce(spectrum, bases, lambda_rel, columns, pairs, moments.rows)
        return down, {
            i: (weight, intercept(moments.centred(split, i), weight, down)) for i, weight in weights.items()
        }

    def terminal(self, maps: dict[int, RidgeMaps], plan: Plan, capture: Capture, remarks: list[str]) -> None:
        """Gives the maps their terminal states, where the model has layers that keep one (paper 2.3)."""
        start, s = time.perf_counter(), self.settings
        found = compare_states(self.decoder, plan.heldout, maps, leading=s.leading, every=s.terminal_every)
        if not found:
            return
        for split, terminal in found.items():
            maps[split].terminal = terminal.offsets()
            maps[split].provenance["terminal"] = {"windows": len(plan.heldout), **terminal.to_json()}
        capture.seconds["terminal"] = time.perf_counter() - start
        states = min(terminal.states for terminal in found.values())
        self.report.say(f"Terminal states: {states} compared in each late recurrent layer.")
        if states < FEW_STATES:
            remarks.append(
                f"terminal states are a mean over {states} positions (the paper has {PAPER_STATES}): name more "
                "text, or raise the held-out share"
            )
            self.report.warn(remarks[-1])

    def provenance(
        self, split: int, heldout: Heldout, plan: Plan, capture: Capture, remarks: list[str]
    ) -> dict[str, Any]:
        """How one split's maps were fitted; `fit` says what it holds."""
        if heldout.at_end:
            remarks.append(
                f"split {split}: the best lambda_rel, {heldout.best:g}, is at the end of the grid: widen it"
            )
            self.report.warn(remarks[-1])
        seconds = capture.seconds
        forward = max(seconds["forward"], 1e-9)
        return {
            "lambda_rel": heldout.best,
            "heldout": {f"{v:g}": _by_name(scores) for v, scores in heldout.ridge.items()},
            "heldout_identity": _by_name(heldout.identity),
            "explained_variance": _by_name(heldout.explained[heldout.best]),
            "heldout_mean": heldout.mean(heldout.best),
            "heldout_identity_mean": heldout.identity_mean,
            "rows": capture.moments.rows,
            "heldout_rows": len(capture.heldout()[split]),
            "tokens": sum(len(w.ids) for w in plan.fit + plan.heldout),
            "sources": plan.sources,
            "fitted_documents": sorted({w.digest[:16] for w in plan.fit}),
            "documents_sha256": plan.documents_sha256,
            "tokens_sha256": plan.tokens_sha256,
            "settings": self.settings.to_json(),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "moments_ratio": round((forward + seconds["moments"]) / forward, 4),
            "total_ratio": round(sum(seconds.values()) / forward, 4),
            "warnings": remarks,
            "versions": versions(),
        }

    def fingerprint(self, plan: Plan, fitted: list[int]) -> dict[str, Any]:
        """Everything that the captured numbers depend on."""
        return {
            "format": 2,
            "model": self.identity.to_json(),
            "attention": getattr(self.decoder.config, "_attn_implementation", None),
            "devices": sorted({self.decoder.device(i).type for i in range(self.decoder.n_layers)}),
            "windows": [len(plan.fit), len(plan.heldout), plan.tokens_sha256],
            "splits": fitted,
            "leading": self.settings.leading,
            "form": vars(self.form),
            "seed": self.settings.seed,
            "versions": versions(),
        }


def count_tokens(windows: Sequence[Window], vocabulary: int) -> Tensor:
    """[vocabulary] int64: how often each token stands in the windows, as the model read them."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for window in windows:
        counts += torch.bincount(window.ids.long(), minlength=vocabulary)
    return counts


def versions() -> dict[str, str]:
    """Of what computed the maps."""
    from ridgefill import __version__

    return {
        "ridgefill": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _by_name(scores: dict[int, float]) -> dict[str, float]:
    return {str(layer): round(score, 6) for layer, score in scores.items()}
