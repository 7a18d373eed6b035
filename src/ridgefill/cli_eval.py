"""`ridgefill eval` and `ridgefill report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgefill.console import EMBEDDED, err, held_out_texts, load, load_maps, numbers, out, whole_number
from ridgefill.errors import SettingError
from ridgefill.options import DEVICE, DTYPE, LEADING, MAYBE_MAPS, MODEL, SPLIT, TEXTS

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm
    from ridgefill.eval.haystack import Item
    from ridgefill.eval.losses import Document
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
TAIL = Annotated[
    int, typer.Option(min=1, help="Last tokens that run every layer, where an arm names no other.")
]
DOCUMENTS = Annotated[int, typer.Option(min=1, help="Documents of each --texts, at most.")]
TOKENS = Annotated[int, typer.Option(min=2, help="Tokens of a document or prompt.")]
SCORED = Annotated[int, typer.Option(min=1, help="First and last tokens of the tail that are averaged.")]
CONTEXT = Annotated[int, typer.Option(min=1, help="Key tokens: those that need more than this much context.")]
OUTPUT = Annotated[
    Path, typer.Option("-o", "--output", help="Folder of this run; an unfinished one goes on.")
]
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

    def open(self, folder: Path, kind: str, tokens: int, settings: dict[str, Any]) -> Run:
        """The run's folder."""
        from ridgefill.eval.runs import open_run

        return open_run(
            folder, kind, settings, self.model, self.tokenizer, self.arms, self.maps, tokens, self.entry
        )

    def documents(self, texts: Sequence[str] | None, tokens: int, count: int, seed: int) -> list[Document]:
        """Documents of each of the texts that the maps were not fitted on."""
        from ridgefill.eval.losses import documents_of

        return documents_of(self.tokenizer, strata(texts), tokens, count, fitted=self.fitted, seed=seed)

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

    out.print(table(run.finish(**({} if margin is None else {"margin": margin}))))
    out.print(
        f"Written: {run.folder}; `ridgefill report {run.folder}` makes a page of it.",
        soft_wrap=True,
        markup=False,
    )


def strata(texts: Sequence[str] | None) -> dict[str, list[str | Path]]:
    """The texts of each domain: a stratum for every --texts, named by it."""
    if not texts:
        docs, code = held_out_texts(None)
        return {"documentation": [docs], "code": [code]}
    return {Path(name).name: held_out_texts([name]) for name in texts}


def losses(
    bench: Bench,
    output: Path,
    kind: str,
    tokens: int,
    documents: list[Document],
    tail: int,
    scored: int,
    context: int,
) -> Run:
    """The loss of every arm on the documents."""
    from ridgefill.eval.losses import measure_losses

    counts: dict[str, Any] = {"tail": tail, "scored": scored, "context": context}
    run = bench.open(output, kind, tokens, counts | {"documents": [d.item for d in documents]})
    with progress(kind, len(documents) * len(bench.arms)) as tick:
        measure_losses(bench.model, bench.tokenizer, bench.arms, documents, run, **counts, tick=tick)
    return run


@evaluate.command("loss")
def loss(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    documents: DOCUMENTS = 8,
    tokens: TOKENS = 6144,
    tail: TAIL = 1024,
    scored: SCORED = 512,
    context: CONTEXT = 4096,
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
    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    found = bench.documents(texts, tokens, documents, seed)
    show(losses(bench, output, "loss", tokens, found, tail, scored, context))


@evaluate.command("agreement")
def agreement(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    documents: DOCUMENTS = 5,
    tokens: TOKENS = 4096,
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

    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    found = bench.documents(texts, tokens, documents, seed)
    settings = {"tail": tail, "continuation": continuation, "documents": [d.item for d in found]}
    run = bench.open(output, "agreement", tokens, settings)
    with progress("agreement", len(found) * len(bench.arms)) as tick:
        measure_agreement(
            bench.model, bench.tokenizer, bench.arms, found, run, continuation=continuation, tick=tick
        )
    show(run)


@evaluate.command("splice")
def splice(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arm: Annotated[str, typer.Option(help="The fill to splice into.")] = "ridge",
    layers: Annotated[
        str | None, typer.Option(help="Late attention layers to splice, separated by commas; all by default.")
    ] = None,
    texts: TEXTS = None,
    documents: DOCUMENTS = 4,
    tokens: TOKENS = 6144,
    tail: TAIL = 1024,
    scored: SCORED = 512,
    context: CONTEXT = 4096,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 0,
    output: OUTPUT = Path("eval/splice"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Which part of the cache carries the error: exact keys, values or both put into the fill (paper 6.6).

    Example: ridgefill eval splice model.gguf maps/split-15 --texts essays/ -o results/splice
    """
    from ridgefill.eval.splice import removed, splice_arms

    bench = prepare(model, maps, arm, split, tail, leading, ledger, entry, device, dtype)
    if len(bench.arms) != 2:
        raise SettingError(f"splices into the arms {arm!r}", "they are made for one fill", "name one arm")
    where = None if layers is None else [whole_number(n, "--layers") for n in numbers(layers, "--layers")]
    base = bench.arms[1]
    bench.arms[1:] = splice_arms(base, layers=where)
    found = bench.documents(texts, tokens, documents, seed)
    run = losses(bench, output, "splice", tokens, found, tail, scored, context)
    show(run)
    for name, share in removed(run.lines, base.name).items():
        ends = "" if share.low is None else f" [{share.low:.1%}, {share.high:.1%}]"
        what = "unknown" if share.mean is None else f"{share.mean:.1%}"
        out.print(f"{name} removes {what}{ends} of the fill's added novel-token loss.", soft_wrap=True)


@evaluate.command("needles")
def needles(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    kinds: Annotated[
        str, typer.Option(help="single, multikey, multivalue, multiquery, separated by commas.")
    ] = "single,multikey",
    count: Annotated[int, typer.Option(min=1, help="Prompts of each kind and text.")] = 25,
    tokens: TOKENS = 4096,
    tail: TAIL = 1024,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 42,
    margin: MARGIN = 2.0,
    output: OUTPUT = Path("eval/needles"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Facts that stand only in filled rows, in RULER's words: of every prompt, unlike the official suite.

    They are planted in repeated noise and in the prose of --texts.

    Example: ridgefill eval needles model.gguf maps/split-15 --texts essays/ --count 40 -o results/needles
    """
    from ridgefill.eval.retrieval import measure_retrieval

    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    items = haystacks(bench, texts, kinds.split(","), count, tokens, tail, leading, seed)
    settings = {
        "tail": tail,
        "tokens": tokens,
        "seed": seed,
        "margin": margin,
        "items": [i for i, *_ in items],
    }
    run = bench.open(output, "needles", tokens, settings)
    with progress("needles", len(items) * len(bench.arms)) as tick:
        measure_retrieval(bench.model, bench.tokenizer, bench.arms, items, run, tick=tick)
    show(run, margin)


@evaluate.command("two-turn")
def two_turn(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    texts: TEXTS = None,
    count: Annotated[int, typer.Option(min=1, help="Conversations in each text.")] = 12,
    tokens: TOKENS = 4096,
    tail: TAIL = 1024,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 42,
    margin: MARGIN = 2.0,
    output: OUTPUT = Path("eval/two-turn"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """A second question asked of a cache that was filled, and its rows chosen, for the first (paper Appendix D).

    Example: ridgefill eval two-turn model.gguf maps/split-15 --arms "ridge; ridge rows=spans(peak,0.05)"
    """
    from ridgefill.eval.two_turn import measure_two_turn

    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    named = haystacks(bench, texts, ["multikey"], count, tokens, tail, leading, seed)
    items = [(name, item) for name, _, item in named]
    settings = {
        "tail": tail,
        "tokens": tokens,
        "seed": seed,
        "margin": margin,
        "items": [i for i, _ in items],
    }
    run = bench.open(output, "two-turn", tokens, settings)
    with progress("two turns", len(items) * len(bench.arms)) as tick:
        measure_two_turn(bench.model, bench.tokenizer, bench.arms, items, run, tick=tick)
    show(run, margin)


def haystacks(
    bench: Bench,
    texts: Sequence[str] | None,
    kinds: Sequence[str],
    count: int,
    tokens: int,
    tail: int,
    leading: int | None,
    seed: int,
) -> list[tuple[str, str, Item]]:
    """Prompts with facts in filled rows, in noise and in the prose of the texts: (item, stratum, prompt)."""
    from ridgefill.eval.documents import read_whole
    from ridgefill.eval.haystack import Haystack, prose
    from ridgefill.plan import DEFAULT_LEADING

    named = [t for t in texts or () if t != EMBEDDED]
    hays: dict[str, list[str]] = {"noise": []}
    if texts:
        own = read_whole(named) if named else []
        hays["prose"] = own + (prose(bench.fitted) if EMBEDDED in texts else [])
    found = []
    for hay, text in hays.items():
        for kind in kinds:
            made = Haystack(
                tokens=tokens,
                tail=tail,
                leading=DEFAULT_LEADING if leading is None else leading,
                hay=hay,
                needles=kind.strip(),
                seed=seed,
            )
            items = made.items(bench.tokenizer, count, text)
            found += [(f"{hay}-{kind}/{i}", f"{hay}-{kind}", item) for i, item in enumerate(items)]
    return found
