"""`vllm-args`: the flags with which `vllm serve` fills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgefill.console import load_maps, numbers
from ridgefill.errors import SettingError
from ridgefill.options import CORRECT, FILL, LEADING, MAYBE_MAPS, PRESET, ROWS, SETTING, SPLIT, STREAM, TAIL

ENGINE = "ridgefill.engines.vllm"


def vllm_args(
    maps: MAYBE_MAPS = None,
    preset: PRESET = None,
    tail: TAIL = None,
    leading: LEADING = None,
    rows: ROWS = None,
    correct: CORRECT = None,
    fill: FILL = None,
    split: SPLIT = None,
    setting: SETTING = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Shorter prompts run exactly; the tail, the leading rows and 256 more unless named."
        ),
    ] = None,
    stream_maps: STREAM = False,
    on_request: Annotated[
        bool, typer.Option("--on-request", help="Fill only requests that ask for it (ridgefill: 1).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="As one object of `vllm.LLM`'s arguments, for Python.")
    ] = False,
) -> None:
    """Print the flags with which an unmodified `vllm serve` fills long prompts, on one line.

    Examples:

      ridgefill vllm-args maps/split-15 --tail 1024

      vllm serve MODEL $(ridgefill vllm-args maps/split-15 --tail 1024)

    One request without the fill: "vllm_xargs": {"ridgefill": 0}. Without these flags vLLM is as ever.
    """
    from ridgefill.engines.vllm.settings import EngineSettings

    given: dict[str, Any] = {
        "maps": _there(maps), "preset": preset, "tail": tail, "leading": leading, "rows": rows,
        "corrections": correct, "fill": fill, "split": None if split is None else numbers(split, "--split")[0],
        "setting": _there(setting), "min_tokens": min_tokens, "stream": stream_maps or None,
        "default": False if on_request else None,
    }  # fmt: skip
    wanted = {name: value for name, value in given.items() if value is not None}
    if maps is None and setting is None and fill in (None, "ridge"):
        raise SettingError("vllm-args without maps", "the ridge fill needs them", "name a maps folder")
    settings = EngineSettings.of({"ridgefill": wanted})
    # what the server would refuse when it starts, as far as it can be known without the model
    fitted = None if maps is None else load_maps(maps).identity
    if settings is not None and fitted is not None:
        settings.plan(fitted.layers)
    arguments = {
        "worker_cls": f"{ENGINE}.worker.RidgeWorker",
        "scheduler_cls": f"{ENGINE}.scheduler.RidgeScheduler",
        "logits_processors": [f"{ENGINE}.params:RidgeParams"],
        "additional_config": {"ridgefill": wanted},
    }
    print(json.dumps(arguments) if as_json else _flags(arguments))


def _there(path: str | Path | None) -> str | None:
    """A path as it can be found from any folder; a hub name as it is."""
    if path is None:
        return None
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _flags(arguments: dict[str, Any]) -> str:
    """The command line's flags, without a blank in any: ``$( )`` splits at blanks and takes quotes as they are.

    Raises:
        SettingError: a path has one.
    """
    settings = arguments["additional_config"]["ridgefill"]
    for name in ("maps", "setting"):
        if any(c.isspace() for c in settings.get(name, "")):
            raise SettingError(
                f"vllm-args for {settings[name]}",
                "a shell would cut the path at its blank",
                "use a path without blanks, or --json in Python",
            )
    words = []
    for name, value in arguments.items():
        words.append(f"--{name.replace('_', '-')}")
        words += (
            [value] if isinstance(value, str) else value if isinstance(value, list) else [_compact(value)]
        )
    return " ".join(words)


def _compact(value: dict[str, Any]) -> str:
    return "".join(json.dumps(value, separators=(",", ":")).split())
