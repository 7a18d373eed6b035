"""`ridgefill eval` and `ridgefill report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgefill.console import EMBEDDED, err, held_out_texts, load, load_maps, numbers, out
from ridgefill.errors import SettingError
from ridgefill.options import DEVICE, DTYPE, LEADING, MAYBE_MAPS, MODEL, SPLIT, TEXTS

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm
    from ridgefill.eval.results import Run
    from ridgefill.maps import RidgeMaps

evaluate = typer.Typer(
    no_args_is_help=True,
    help="""Measure the error that the fill makes, arm beside arm on the same items, with intervals.

    An arm is a fill with its settings; arms are separated by semicolons, and exact is always the baseline:

      --arms "ridge; ridge rows=spans(peak,0.05); identity; none; pop; none tail=matched; snapkv; gemfilter"

    Fields of an arm: rows= correct= tail= leading= split= preset= maps=, and a label before it: "mine: ridge ...".
    Every item is kept as it comes: the same command goes on where a stopped one was.

    Example: ridgefill eval loss model.gguf maps/split-15 --texts essays/ --tail 1024 -o results/loss""",
)

ARMS = Annotated[str, typer.Option(help="Arms, separated by semicolons; see `ridgefill eval --help`.")]
TAIL = Annotated[int, typer.Option(min=1, help="Last tokens that run every layer, where an arm names no other.")]
OUTPUT = Annotated[Path, typer.Option("-o", "--output", help="Folder of this run; an unfinished one goes on.")]
LEDGER = Annotated[Path | None, typer.Option(help="Ledger that declared this run (`ridgefill ledger`).")]
ENTRY = Annotated[str | None, typer.Option(help="Hash of its entry, or the hash's beginning.")]
MARGIN = Annotated[float, typer.Option(min=0, help="Non-inferiority margin, in points.")]
CHAT = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Use the chat form; by default if the model has one.")
]
DEFAULT_ARMS = "ridge; identity; none"


@dataclass
class Bench:
    """A loaded model with the arms to compare on it."""

    model: Any
    tokenizer: Any
    maps: RidgeMaps | None
    arms: list[Arm]
    entry: str | None

    def open(self, folder: Path, kind: str, tokens: int, **settings: Any) -> Run:
        """The run's folder."""
        from ridgefill.eval.runs import open_run

        return open_run(
            folder, kind, settings, self.model, self.tokenizer, self.arms, self.maps, tokens, self.entry
        )

    @property
    def fitted(self) -> set[str]:
        """Digests of the documents that the maps were fitted on."""
        return set() if self.maps is None else set(self.maps.provenance.get("fitted_documents", ()))


def prepare(
    model: str,
    maps: str | None,
    arms: str,
    split: str | None,
    tail: int,
    leading: int | None,
    ledger: Path | None,
    entry: str | None,
    device: str,
    dtype: str,
) -> Bench:
    """Loads the model and reads the arms; the ledger is looked at first, for it takes no time."""
    from ridgefill.eval.arms import parse_arms
    from ridgefill.eval.runs import declared
    from ridgefill.models.decoder import Decoder

    named = declared(ledger, entry)
    at = None if split is None else numbers(split, "--split")[0]
    loaded, tokenizer = load(model, device, dtype)
    fitted = None if maps is None else load_maps(maps)
    if fitted is not None:
        fitted.check_model(loaded, tokenizer)
    parsed = parse_arms(arms, Decoder(loaded), fitted, split=at, tail=tail, leading=leading)
    return Bench(loaded, tokenizer, fitted, parsed, named)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; its tick counts one arm on one item."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def show(run: Run, margin: float | None = None) -> None:
    """Ends a run: its summary to its folder and the terminal."""
    from ridgefill.eval.runs import table

    out.print(table(run.finish(margin=margin)))
    out.print(f"Written: {run.folder}; `ridgefill report {run.folder}` makes a page of it.", soft_wrap=True, markup=False)


def strata(texts: Sequence[str] | None) -> dict[str, list[str | Path]]:
    """The texts of each domain: a stratum for every --texts, named by it."""
    if not texts:
        docs, code = held_out_texts(None)
        return {"documentation": [docs], "code": [code]}
    return {Path(name).name: held_out_texts([name]) for name in texts}


@evaluate.command("loss")
def loss(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of each --texts, at most.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a document.")] = 6144,
    tail: TAIL = 1024,
    scored: Annotated[int, typer.Option(min=1, help="First and last tokens of the tail that are averaged.")] = 512,
    context: Annotated[
        int, typer.Option(min=1, help="Key tokens: those that need more than this much context.")
    ] = 4096,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 0,
    output: OUTPUT = Path("eval/loss"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Loss on the tokens that need the prefix: novel and key tokens, KL, top-1, by document (paper 3.1).

    Example: ridgefill eval loss model.gguf maps/split-15 --texts essays/ --texts src/ -o results/loss
    """
    from ridgefill.eval.losses import documents_of, measure_losses

    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    found = documents_of(bench.tokenizer, strata(texts), tokens, documents, fitted=bench.fitted, seed=seed)
    settings = {"tail": tail, "scored": scored, "context": context, "documents": [d.item for d in found]}
    run = bench.open(output, "loss", tokens, **settings)
    with progress("loss", len(found) * len(bench.arms)) as tick:
        measure_losses(
            bench.model, bench.tokenizer, bench.arms, found, run, tail=tail, scored=scored, context=context, tick=tick
        )
    show(run)


@evaluate.command("agreement")
def agreement(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of each --texts, at most.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a document.")] = 4096,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens that exact continues it by.")] = 128,
    tail: TAIL = 1024,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 0,
    output: OUTPUT = Path("eval/agreement"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Exact's own greedy continuation, fed to every arm: how often they would go on alike, and KL (paper 3.1).

    Example: ridgefill eval agreement model.gguf maps/split-15 --texts essays/ -o results/agreement
    """
    from ridgefill.eval.agreement import measure_agreement
    from ridgefill.eval.losses import documents_of

    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    found = documents_of(bench.tokenizer, strata(texts), tokens, documents, fitted=bench.fitted, seed=seed)
    settings = {"tail": tail, "continuation": continuation, "documents": [d.item for d in found]}
    run = bench.open(output, "agreement", tokens, **settings)
    with progress("agreement", len(found) * len(bench.arms)) as tick:
        measure_agreement(
            bench.model, bench.tokenizer, bench.arms, found, run, continuation=continuation, tick=tick
        )
    show(run)


def _unused() -> None:
    raise SettingError(EMBEDDED, "", "")
