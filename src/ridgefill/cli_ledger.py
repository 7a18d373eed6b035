"""`ridgefill ledger`: say what is claimed before it is run, and see that nobody changed it since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgefill.console import out, refuse
from ridgefill.errors import SettingError

ledger = typer.Typer(
    no_args_is_help=True,
    help="""Declare a claim and its prediction before a run; every later change shows.

    A ledger is a text file of one entry per line, each with the hash of the one before it. Declare first, run with
    the entry's hash, then note what came out; keep the last hash somewhere else too, since a chain alone cannot
    show entries taken off its end.

    Example: ridgefill ledger declare ledger.jsonl --claim "..." --prediction "..." --file texts.jsonl""",
)

LEDGER = Annotated[Path, typer.Argument(help="The ledger's file.", show_default=False)]
HASH = Annotated[
    str,
    typer.Argument(
        metavar="HASH", help="An entry's hash, or its first 6 digits or more.", show_default=False
    ),
]


@ledger.command("declare")
def declare(
    path: LEDGER,
    claim: Annotated[str, typer.Option(help="What is claimed, in words.", show_default=False)],
    prediction: Annotated[
        str,
        typer.Option(help="What will be seen if it holds, and the rule that decides.", show_default=False),
    ],
    configuration: Annotated[
        Path | None, typer.Option("--config", help="A JSON file: the settings of the run.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", help="A file that the run goes by; its sha256 is kept. May be repeated."),
    ] = None,
) -> None:
    """Append a claim and its prediction, before the run; prints the entry's hash.

    Example: ridgefill ledger declare ledger.jsonl --claim "rows restore retrieval"
    --prediction "score within 2 points of exact" --config run.json
    """
    from ridgefill.ledger import Ledger, file_hashes

    settings = {} if configuration is None else _json_object(configuration)
    hashes = file_hashes(files or [])
    entry = Ledger.open(path).declare(claim, prediction, settings, hashes)
    out.print(f"Entry {entry.index}: {entry.hash}", soft_wrap=True, markup=False, highlight=False)


@ledger.command("note")
def note(
    path: LEDGER,
    of: HASH,
    text: Annotated[str, typer.Argument(help="What came of it.", show_default=False)],
) -> None:
    """Append what came of an earlier entry; the entry itself stays as it is.

    Example: ridgefill ledger note ledger.jsonl 3fa9c1 "holds: 0.4 points below exact, bound -1.4"
    """
    from ridgefill.ledger import Ledger

    entry = Ledger.open(path, new=False).note(of, text)
    out.print(f"Entry {entry.index}: {entry.hash}", soft_wrap=True, markup=False, highlight=False)


@ledger.command("list")
def list_entries(path: LEDGER) -> None:
    """List the entries: when, by which hash, and what they claim or note.

    Example: ridgefill ledger list ledger.jsonl
    """
    from rich.table import Table
    from rich.text import Text

    from ridgefill.ledger import Ledger

    table = Table("entry", "time", "hash", "claim or note", box=None, pad_edge=False)
    for entry in Ledger.open(path, new=False).entries():
        said = f"on {entry.said['of'][:12]}: {entry.said['note']}" if entry.is_note else entry.said["claim"]
        table.add_row(str(entry.index), entry.time, entry.hash[:12], Text(said))
    out.print(table)


@ledger.command("show")
def show(path: LEDGER, of: HASH) -> None:
    """Print one entry as JSON, and the notes on it.

    Example: ridgefill ledger show ledger.jsonl 3fa9c1
    """
    from ridgefill.ledger import Ledger

    opened = Ledger.open(path, new=False)
    entry = opened.find(of)
    notes = [e.to_json() for e in opened.entries() if e.is_note and e.said["of"] == entry.hash]
    typer.echo(
        json.dumps(entry.to_json() | ({"notes": notes} if notes else {}), indent=2, ensure_ascii=False)
    )


@ledger.command("verify")
def verify(
    path: LEDGER,
    head: Annotated[
        str | None,
        typer.Option(
            help="Hash of an entry known to have been here, from results or a copy of `ledger list`."
        ),
    ] = None,
) -> None:
    """Find any edit, reorder, deletion or torn line; exits 1 and names the first bad entry.

    Entries taken off the end, or a chain written anew, show only against a known hash: --head.

    Example: ridgefill ledger verify ledger.jsonl --head 3fa9c1
    """
    from ridgefill.ledger import Ledger

    opened = Ledger.open(path, new=False)
    problems = opened.verify(head)
    for problem in problems:
        refuse(f"{path}: {problem}", 1)
    if problems:
        raise typer.Exit(1)
    entries = opened.entries()
    last = f", the last one {entries[-1].hash}" if entries else ""
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    against = "" if head is not None else "; entries taken off its end would show only with --head"
    out.print(f"Whole: {count}{last}{against}.", soft_wrap=True, markup=False, highlight=False)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"read the settings {path}", str(error), "name a JSON file") from error
    if not isinstance(found, dict):
        raise SettingError(f"read the settings {path}", "it is no JSON object", "write it as {...}")
    return found
