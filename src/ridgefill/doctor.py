"""What is installed, whether it works, and what to do about what does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from packaging.version import Version
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from ridgefill import embedded
from ridgefill.compat import TESTED_TRANSFORMERS
from ridgefill.files import cache_dir
from ridgefill.gguf_file import is_converted
from ridgefill.models.decoder import Decoder

State = Literal["ok", "missing", "warn"]

_ROOM = 2e9  # bytes: the default model, its converted weights and its maps
_MEMORY = 3e9  # bytes: fitting the default model
_STYLES = {"ok": "green", "missing": "bold red", "warn": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: its name.
        state: "missing" means that ridgefill cannot work; "warn" that it can, with a limit.
        detail: what was found.
        remedy: what to do, empty where nothing is to be done.
    """

    what: str
    state: State
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Looks at the installation, the machine and the cache, and runs one small model; fetches nothing."""
    return [
        _python(),
        _torch(),
        _devices(),
        _transformers(),
        _package("accelerate", "1.10", "loads GGUF files and models larger than one device"),
        _package("safetensors", "0.5", "reads and writes maps"),
        _package("gguf", "0.17", "reads GGUF files"),
        _package("datasets", "4", "fits on Hugging Face data sets by name", extra="datasets"),
        _package("llama-cpp-python", "0.3.36", "runs GGUF files on llama.cpp", extra="llamacpp"),
        _package("lm-eval", "0.4.13", "runs RULER and LongBench (`ridgefill eval`)", extra="eval"),
        _memory(),
        _disk(),
        _default_model(),
        self_check(),
    ]


def report(findings: list[Finding]) -> Table:
    """The findings as a table for rich to print; remedies stand below what they remedy."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        detail = finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")
        table.add_row(f"[{_STYLES[finding.state]}]{finding.state}[/]", finding.what, _plain(detail))
    return table


def self_check() -> Finding:
    """Runs 32 rows of a tiny random model through `Decoder`: the logits must equal the stock model's."""
    what = "self check"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
            model = LlamaForCausalLM(config).eval()
            ids = torch.randint(64, (1, 32))
            stock, ours = model(ids, use_cache=False).logits, _walk(Decoder(model), ids)
    except Exception as error:  # whatever is broken in the installation, the user is to read it here
        return Finding(
            what, "missing", f"a tiny model does not run: {error}", "reinstall torch and transformers"
        )
    if not torch.equal(stock, ours):
        gap = float((stock - ours).abs().max())
        return Finding(
            what,
            "missing",
            f"layer by layer gives other logits than the stock model (by {gap:.1e})",
            "install a tested transformers version",
        )
    return Finding(what, "ok", "a tiny model, layer by layer, equals the stock model bit for bit")


def _walk(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Token ids [B, m] -> logits [B, m, vocabulary], through the seam."""
    h = decoder.embed(ids)
    rows = decoder.rows(h, torch.arange(ids.shape[1])[None])
    for i in range(decoder.n_layers):
        h = decoder.run_layer(i, h, rows)
    return decoder.final(h)


def _python() -> Finding:
    version = platform.python_version()
    if Version(version.rstrip("+")) < Version("3.11"):
        return Finding("Python", "missing", version, "use Python 3.11 or newer")
    return Finding("Python", "ok", version)


def _torch() -> Finding:
    if Version(torch.__version__) < Version("2.7"):
        return Finding("torch", "missing", torch.__version__, "pip install -U 'torch>=2.7'")
    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _devices() -> Finding:
    if not torch.cuda.is_available():
        return Finding("devices", "ok", "CPU only (models load in float32)")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("devices", "ok", f"{', '.join(names)} (models load in bfloat16)")


def _transformers() -> Finding:
    found, (low, high) = Version(transformers.__version__), TESTED_TRANSFORMERS
    remedy = f"pip install 'transformers>={low},<{high}'"
    if found < Version(low):
        return Finding("transformers", "missing", f"{found} is too old", remedy)
    if found >= Version(high):
        return Finding(
            "transformers", "warn", f"{found} is newer than the versions tested (below {high})", remedy
        )
    return Finding("transformers", "ok", f"{found}, within the tested range {low} to {high}, {high} excluded")


def _package(name: str, least: str, use: str, extra: str | None = None) -> Finding:
    """A package that is needed, or, where ``extra`` names an optional set, useful."""
    lacking: State = "warn" if extra else "missing"
    remedy = f"pip install 'ridgefill[{extra}]'" if extra else f"pip install '{name}>={least}'"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, lacking, f"not installed; it {use}", remedy)
    if Version(found) < Version(least):
        return Finding(name, lacking, f"{found} is older than {least}; it {use}", remedy)
    return Finding(name, "ok", found)


def _memory() -> Finding:
    free = _free_memory()
    if free is None:
        return Finding(
            "memory", "warn", "cannot be read on this system", "see that 3 GB are free before a fit"
        )
    detail = f"{free / 1e9:.1f} GB free"
    if free < _MEMORY:
        return Finding("memory", "warn", detail, "close other programs: the demo's fit takes about 3 GB")
    return Finding("memory", "ok", detail)


def _free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _disk() -> Finding:
    folder = cache_dir()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    remedy = "set RIDGEFILL_CACHE to a folder with room, that you may write to"
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding("cache folder", "missing", f"{folder} is not writable", remedy)
    if free < _ROOM:
        return Finding("cache folder", "warn", f"{folder}, {free / 1e9:.1f} GB free", remedy)
    return Finding("cache folder", "ok", f"{folder}, {free / 1e9:.0f} GB free")


def _default_model() -> Finding:
    what, path = "default model", embedded.default_model_path()
    if not path.is_file():
        return Finding(what, "warn", f"{path.name} is not fetched yet", "the first use fetches it (93 MB)")
    if not is_converted(path):
        return Finding(
            what, "warn", f"{path.name} is fetched, not converted yet", "the first use converts it"
        )
    return Finding(what, "ok", f"{path.name} is fetched and converted")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read [datasets] as a style
