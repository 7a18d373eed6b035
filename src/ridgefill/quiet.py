"""Calling other libraries' loaders: without their chatter, and with one clear error of ours."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_chatter
from transformers.utils import logging as chatter

from ridgefill.errors import ModelFileError, RidgeFillError, UnsupportedModelError


def refuse_incomplete(info: Any, label: str) -> None:
    """Weights that the files lack would be random numbers: transformers only warns of them."""
    lacking = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
    if lacking:
        raise ModelFileError(
            f"load {label}",
            f"its files lack {len(lacking)} of the model's weights ({lacking[0]} is one)",
            "fetch or save the model again, whole",
        )


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Silences the loaders' warnings and, unless ``bars``, their progress bars, inside the block only."""
    verbosity, hub_verbosity = chatter.get_verbosity(), hub_chatter.get_verbosity()
    had_bars = chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    hub_chatter.set_verbosity_error()
    if not bars:
        chatter.disable_progress_bar()
    try:
        # The GGUF reader's own bar has no switch.
        with contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        chatter.set_verbosity(verbosity)
        hub_chatter.set_verbosity(hub_verbosity)
        if had_bars:
            chatter.enable_progress_bar()


@contextmanager
def clear(asked: str, instead: str = "name a complete model of a supported family") -> Iterator[None]:
    """Turns whatever a loader raises (it may be any of a dozen types) into one line of ours."""
    try:
        yield
    except RidgeFillError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelFileError(
            asked, "there is not enough memory", "use a smaller model or another device"
        ) from error
    except Exception as error:
        chain = _chain(error)
        text = " ".join(f"{type(e).__name__} {e}" for e in chain)
        if "couldn't connect" in text or "LocalEntryNotFoundError" in text or "OfflineModeIsEnabled" in text:
            raise ModelFileError(
                asked,
                "the hub cannot be reached and the model is not in the local cache",
                "connect to the network (and unset HF_HUB_OFFLINE), or name a local folder or a GGUF file",
            ) from error
        if "RepositoryNotFoundError" in text or "GatedRepoError" in text:
            raise ModelFileError(
                asked,
                "the hub has no such model, or it is private or gated",
                "check the name, or run `hf auth login` and accept the model's terms",
            ) from error
        if "trust_remote_code" in text:
            raise UnsupportedModelError(asked, "it needs program code of its own", instead) from error
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelFileError(asked, first.rstrip("."), instead) from error


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
