"""The capture pass: the unmodified model over calibration text, its layer inputs into moments (paper 2.2)."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgefill.devices import wait
from ridgefill.errors import CorpusError, OutputError
from ridgefill.files import whole, write_json
from ridgefill.fit.moments import Moments
from ridgefill.fit.windows import Plan, Window
from ridgefill.models.decoder import Decoder
from ridgefill.reading import Reading, Source, States

ROWS_A_WINDOW = 256  # held-out rows kept of one window at most
HELDOUT_ROWS = 4096  # held-out rows kept at most: enough to tell penalties apart, and a bound on memory
CHECKPOINT_SHARE = 30  # a checkpoint is due after this many times its own writing time, at the earliest


def layer_inputs(
    decoder: Decoder, ids: Tensor, first: int, last: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layers first .. last of the exact model on ids [B, m], every window from an empty state.

    Yields:
        layer, the state h [B, m, W] that enters it, and the layer's input [B, m, d], which is h itself unless
        several streams enter.
    """
    ids = ids.to(decoder.device(0))
    h = decoder.embed(ids)
    rows = decoder.rows(h, torch.arange(ids.shape[1], device=ids.device)[None], ids=ids)
    for layer in range(last + 1):
        if layer >= first:
            yield layer, h, decoder.layer_input(layer, h, rows)
        if layer < last:
            h = decoder.run_layer(layer, h, rows)


@dataclass
class Capture:
    """What the pass has gathered so far.

    Attributes:
        moments: of the fit windows.
        readings: split -> what its maps read, where the moments keep that apart.
        sample: layer -> held-out rows of its input, a list of [m, d] in the model's dtype, on the host.
        states: split -> what is read of the same rows, [m, W]; only where the moments keep it apart.
        position: windows done, counted over the fit windows and then the held-out ones.
        seconds: "forward", "moments", "checkpoint".
    """

    moments: Moments
    readings: Mapping[int, Reading] = field(default_factory=dict)
    sample: dict[int, list[Tensor]] = field(default_factory=dict)
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    position: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("forward", "moments", "checkpoint"), 0.0)
    )

    @property
    def gives(self) -> str:
        """What the maps give, of every split alike (`Reading.gives`)."""
        return next((reading.gives for reading in self.readings.values()), "inputs")

    def heldout(self) -> dict[int, Tensor]:
        """layer -> held-out rows of its input [m, d]."""
        return {layer: torch.cat(parts) for layer, parts in self.sample.items()}

    def heldout_states(self) -> dict[int, Tensor]:
        """split -> what is read of the held-out rows, [m, W]."""
        apart = self.states if self.moments.apart else self.sample
        return {split: torch.cat(apart[split]) for split in self.moments.splits if split in apart}

    def tensors(self) -> dict[str, Tensor]:
        """The held-out rows by name, for a checkpoint."""
        states = self.heldout_states() if self.moments.apart else {}
        rows = {str(layer): t for layer, t in self.heldout().items()}
        return rows | {f"state.{split}": t for split, t in states.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up `tensors` again."""
        self.sample, self.states = {}, {}
        for name, rows in tensors.items():
            kind, _, layer = name.rpartition(".")
            (self.states if kind else self.sample)[int(layer)] = [rows.clone()]


def run_capture(
    decoder: Decoder,
    plan: Plan,
    capture: Capture,
    *,
    leading: int,
    seed: int,
    after_window: Callable[[Window], None] = lambda window: None,
) -> None:
    """Runs the windows that ``capture`` has not seen yet, fit windows first.

    Args:
        leading: first rows of each window left out: no linear map predicts the attention sink.
        after_window: called when a window is wholly in ``capture``.

    Raises:
        CorpusError: a state that is not finite, naming layer and document.
    """
    budget = sum(len(w.ids) for w in plan.heldout)
    for at in range(capture.position, len(plan.fit) + len(plan.heldout)):
        held = at >= len(plan.fit)
        window = plan.heldout[at - len(plan.fit)] if held else plan.fit[at]
        if held:
            chosen = heldout_rows(len(window.ids), leading, budget, seed, at)
            _gather(decoder, window, capture, chosen)
        else:
            _accumulate(decoder, window, capture, leading)
        capture.position = at + 1
        after_window(window)


def heldout_rows(length: int, leading: int, budget: int, seed: int, at: int) -> Tensor:
    """Evenly drawn rows of a held-out window: one at a seeded place in each of k equal stretches.

    Args:
        length: tokens of the window.
        budget: tokens of all held-out windows, which share `HELDOUT_ROWS` by their lengths.
    """
    k = min(ROWS_A_WINDOW, math.ceil(HELDOUT_ROWS * length / budget), length - leading)
    place = torch.rand(k, generator=torch.Generator().manual_seed(seed * 1_000_003 + at), dtype=torch.float64)
    return leading + ((torch.arange(k) + place) * ((length - leading) / k)).long()


def _accumulate(decoder: Decoder, window: Window, capture: Capture, leading: int) -> None:
    moments = capture.moments
    clock = _Clock(capture.seconds)
    for layer, read, x in _inputs(decoder, window, capture):
        clock.lap("forward", x.device)
        where = decoder.device(layer)
        y = decoder.target(layer, x.to(where), capture.gives)[0, leading:]
        states = None if read is None else {source: h[0, leading:].to(where) for source, h in read.items()}
        if not moments.add(layer, y, states):
            _refuse_not_finite(layer, window)
        clock.lap("moments", x.device)


def _gather(decoder: Decoder, window: Window, capture: Capture, chosen: Tensor) -> None:
    found: list[tuple[dict[int, list[Tensor]], int, Tensor]] = []
    clock = _Clock(capture.seconds)
    for layer, read, x in _inputs(decoder, window, capture):
        clock.lap("forward", x.device)
        found.append((capture.sample, layer, x[0, chosen.to(x.device)].cpu()))
        if read is not None:
            parts = [h[0, chosen.to(h.device)].cpu() for h in read.values()]
            found.append((capture.states, layer, torch.cat(parts, -1)))
        if not torch.isfinite(found[-1][2]).all():
            _refuse_not_finite(layer, window)
        clock.lap("moments", x.device)
    for kept, layer, rows in found:
        kept.setdefault(layer, []).append(rows)


def _inputs(
    decoder: Decoder, window: Window, capture: Capture
) -> Iterator[tuple[int, dict[Source, Tensor] | None, Tensor]]:
    """Layer, what is read at it, [1, m, W] each, if it is a split that keeps that apart, and its input [1, m, d]."""
    moments, layers = capture.moments, capture.moments.layers
    readings = {s: Reading.plain(s) for s in moments.splits if moments.apart} | dict(capture.readings)
    wanted = {i for reading in readings.values() for i in reading.layers}
    states: States = {}
    for layer, h, x in layer_inputs(decoder, window.ids.long()[None], min(wanted | {layers[0]}), layers[-1]):
        if layer in wanted:
            states[layer] = h
        if layer in layers:
            reading = readings.get(layer)
            yield layer, None if reading is None else reading.parts(states), x


class _Clock:
    """Adds the time since the last lap to one of several sums, waiting for the device."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.start = seconds, time.perf_counter()

    def lap(self, name: str, device: torch.device) -> None:
        wait(device)
        now = time.perf_counter()
        self.seconds[name] += now - self.start
        self.start = now


def _refuse_not_finite(layer: int, window: Window) -> None:
    raise CorpusError(
        f"fit on {window.document}",
        f"the input of layer {layer} holds NaN or infinity there",
        "load the model in bfloat16 or float32 (float16 overflows in many models), or leave that text out",
    )


# --- checkpoints ----------------------------------------------------------------------------------------


class Checkpoint:
    """The capture on disk, so that a killed fit goes on where it was.

    The folder holds ``state.json``, written last, and the safetensors files it names.

    Args:
        folder: created when the first checkpoint is written.
        fingerprint: everything that the captured numbers depend on, as JSON values.
        every: seconds between checkpoints, at the least.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any], every: float) -> None:
        canonical = json.dumps(fingerprint, sort_keys=True, default=str)
        self.folder, self.every = folder, every
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
        self._due = time.monotonic() + every
        self._named: dict[str, str] = {}

    def resume(self, capture: Capture) -> str | None:
        """Takes up what an earlier run left; says what became of it, or None if there was nothing."""
        path = self.folder / "state.json"
        if not path.exists():
            return None
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["fingerprint"] != self.fingerprint:
                self.remove()
                return "an earlier capture was of another model, text or setting: starting afresh"
            position, seconds, files = int(state["position"]), dict(state["seconds"]), dict(state["files"])
            kept = load_file(self.folder / files["moments"])
            rows = load_file(self.folder / files["sample"]) if "sample" in files else {}
            capture.moments.restore(kept, int(state["rows"]))
            capture.restore(rows)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            self.remove()
            return "an earlier capture is damaged: starting afresh"
        capture.position, capture.seconds, self._named = position, seconds, files
        return f"resuming an earlier capture after {position} windows"

    def save_if_due(self, capture: Capture, fit_windows: int) -> None:
        """Saves if enough time has passed, and never more than a small share of the time."""
        if time.monotonic() >= self._due:
            self.save(capture, fit_windows)

    def save(self, capture: Capture, fit_windows: int) -> None:
        """Writes the capture, whole or not at all.

        Raises:
            OutputError: no space or no permission; the last checkpoint stays.
        """
        start = time.monotonic()
        # Moments rest once the fit windows are done: their file is written once and named again.
        files = {"moments": f"moments-{min(capture.position, fit_windows)}.safetensors"}
        if capture.sample:
            files["sample"] = f"sample-{capture.position}.safetensors"
        try:
            if self._named.get("moments") != files["moments"]:
                _save(self.folder / files["moments"], capture.moments.tensors())
            if capture.sample and self._named.get("sample") != files["sample"]:
                _save(self.folder / files["sample"], capture.tensors())
            capture.seconds["checkpoint"] += time.monotonic() - start
            write_json(self.folder / "state.json", self._state(capture, files))
        except OutputError:
            self._remove_others(self._named)
            self._remove_if_empty()
            raise
        self._named = files
        self._remove_others(files)
        cost = CHECKPOINT_SHARE * (time.monotonic() - start)
        self._due = time.monotonic() + (max(self.every, cost) if self.every else 0)

    def _state(self, capture: Capture, files: dict[str, str]) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "position": capture.position,
            "rows": capture.moments.rows,
            "files": files,
            "seconds": capture.seconds,
        }

    def remove(self) -> None:
        """Deletes the checkpoint, ``state.json`` first, and its folder."""
        (self.folder / "state.json").unlink(missing_ok=True)
        self._remove_others({})
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _remove_others(self, named: dict[str, str]) -> None:
        for pattern in ("*.safetensors", ".*.safetensors", ".state.*"):  # dotted: a killed run's temporaries
            for path in self.folder.glob(pattern):
                if path.name not in named.values():
                    path.unlink(missing_ok=True)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with whole(path) as temporary:
        try:
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, temporary)
        except SafetensorError as error:  # it wraps the system's own error: a full disk, mostly
            raise OSError(str(error)) from error
