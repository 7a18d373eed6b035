"""What a figure was measured with: versions, machine, date, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine, date (UTC) and the command line without folders, as JSON-able values."""
    from ridgefill import __version__

    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(_without_folder, sys.argv)),
        "ridgefill": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "threads": torch.get_num_threads(),
    }


def _without_folder(argument: str) -> str:
    option, equals, value = argument.rpartition("=")  # --output=/some/folder
    return option + equals + Path(value).name if os.path.isabs(value) else argument


def machine_key(device: torch.device) -> str:
    """What a measured length is valid for: the device, and how many threads a CPU uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
