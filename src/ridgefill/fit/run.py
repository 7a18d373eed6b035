"""The fit: text -> windows -> one capture pass -> moments -> ridge maps of every split (paper 2.2)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ridgefill import presets
from ridgefill.devices import usable_device
from ridgefill.errors import OutputError, SettingError
from ridgefill.fit.capture import Checkpoint
from ridgefill.fit.forms import form_of
from ridgefill.fit.job import Job, versions
from ridgefill.fit.report import Report
from ridgefill.fit.settings import ENCODINGS, LAMBDA_GRID, TERMINAL_EVERY, Settings, split_layers
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.presets import Preset


@torch.no_grad()
def fit(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str | Path],
    splits: Sequence[int | float] | None,
    out: str | Path,
    *,
    preset: str | None = None,
    form: str | None = None,
    tokens: int = 65536,
    length: int = 4096,
    holdout: float = 0.1,
    lambda_grid: Sequence[float] = LAMBDA_GRID,
    leading: int = 16,
    chat_share: float = 0.25,
    encoding: str = "fp32",
    seed: int = 0,
    terminal_every: int = TERMINAL_EVERY,
    moments_device: str | torch.device | None = None,
    checkpoint_seconds: float = 30,
    progress: bool = True,
) -> dict[int, RidgeMaps]:
    """Fits ridge maps for every split in one capture pass, and saves each as ``out/split-<S>``.

    Args:
        model: a causal LM of a supported family, on one device or spread by accelerate's device map.
        tokenizer: its tokenizer.
        texts: text files, JSONL files, folders or Hugging Face data sets; each has an equal share.
        splits: layers (int), or depths (float in (0, 1)); None takes the preset's depth, or half the layers.
        out: folder; ``out/.capture`` holds the checkpoint until the fit is done.
        preset: a deployment of the paper (`ridgefill.presets`) that the maps are for: who loads them gets its tail,
            rows and corrections unless others are named.
        form: what the maps read and give, of `ridgefill.fit.forms.FORMS`: "rich" by default, "plain" (the paper's)
            by default with a preset.
        tokens: tokens to run the model on, held-out ones included.
        length: tokens of a window, at most; the model's context bounds it too.
        holdout: share of documents and tokens that only choose the penalty.
        lambda_grid: values of lambda_rel to choose from.
        leading: first rows of each window left out (attention sink).
        chat_share: share of windows wrapped as a user message, where the tokenizer has a chat template.
        encoding: "fp32", "bf16" or "int8".
        seed: decides the documents' order, which are held out, and the held-out rows.
        terminal_every: tokens between the states that give the terminal offset (paper 2.3), where the model has
            Gated DeltaNet layers; a shorter held-out window is compared at its quarters.
        moments_device: where moments rest, such as "cpu"; by default each layer's own device.
        checkpoint_seconds: seconds between checkpoints at least; they take a tenth of the time at most.
        progress: show progress and remarks on stderr.

    Returns:
        split -> maps, fp32 on the host, with the classes and counts of the calibration text's tokens
        (``maps.tokens``) and, for a model with Gated DeltaNet layers, the offsets of their states
        (``maps.terminal``). ``maps.provenance`` holds: ``lambda_rel``; ``heldout`` {lambda_rel:
        {layer: cosine of what the layer writes}}, ``heldout_identity`` {layer: cosine},
        ``explained_variance`` {layer: share, at lambda_rel}; ``heldout_mean``, ``heldout_identity_mean``;
        ``rows``, ``heldout_rows``, ``tokens``; ``sources`` (a list: name, kind, documents, skipped_files, and
        for fit and heldout: documents, windows, chat_windows, tokens), ``fitted_documents``
        (the first 16 digits of each fitted document's sha256, for evaluations to leave out),
        ``documents_sha256``, ``tokens_sha256``; ``settings``; ``seconds`` {forward, moments, checkpoint,
        solve}, ``moments_ratio`` and ``total_ratio`` (with the moments, with everything, over the forward
        passes alone); ``terminal`` {windows, states, error, gain: of each layer's filled state, see
        `fit.terminal.Terminal`}; ``warnings``; ``versions``. A split at the last layer has no map and only
        ``settings``, ``warnings``, ``versions``.

    Raises:
        UnsupportedModelError, SettingError, CorpusError, OutputError: before or while it runs, by name. After
            a kill or a full disk the same call goes on from the last checkpoint.
    """
    decoder = Decoder(model)
    made_for = None if preset is None else _preset(preset)
    if splits is None:
        splits = [0.5 if made_for is None else made_for.depth]
    layers = split_layers(splits, decoder.n_layers)
    chosen = form_of(form, preset, decoder)
    fitted = [s for s in layers if s < decoder.n_layers - 1]
    longest = getattr(model.config, "max_position_embeddings", None) or length
    grid = tuple(sorted({float(v) for v in lambda_grid}))
    settings = Settings(
        tokens, min(length, longest), holdout, grid, leading, chat_share, seed, terminal_every
    )
    if encoding not in ENCODINGS:
        raise SettingError(
            f"fit with encoding={encoding!r}", "there is none of that name", f"use {', '.join(ENCODINGS)}"
        )
    if moments_device is not None:
        moments_device = usable_device(moments_device, "--moments-device")
    with _output(Path(out), layers) as folder, evaluating(model), Report(progress) as report:
        if settings.length < length:
            report.say(f"Windows of {settings.length} tokens, which is the model's context.")
        identity = ModelIdentity.of(model, tokenizer)
        job = Job(decoder, identity, settings, folder, report, moments_device, encoding, chosen)
        found = job.run(tokenizer, texts, fitted, checkpoint_seconds) if fitted else {}
        table = found[fitted[0]].tokens if fitted else None
        empty = {"settings": settings.to_json(), "warnings": [], "versions": versions()}
        bare = {s: RidgeMaps(s, {}, identity, empty, encoding, tokens=table) for s in layers}
        maps = bare | found
        for split, each in maps.items():
            each.preset = None if preset is None else {"preset": preset}
            each.save(folder / f"split-{split:02d}", encoding=encoding)
        Checkpoint(folder / ".capture", {}, 0).remove()
        report.close(maps)
    return maps


def _preset(name: str) -> Preset:
    found = presets.preset(name)
    if found.fill != "ridge":
        raise SettingError(
            f"fit maps for the preset {name!r}",
            f"it is the {found.fill} fill, which has none",
            "name another preset",
        )
    return found


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
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off, and back as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
