"""`ridgefill report`: runs as one self-contained HTML page and as Markdown, what they found first."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgefill.eval import pictures, report_tables
from ridgefill.eval.evaluation import Evaluation, Finding, open_all, plural
from ridgefill.eval.findings import find, find_across, headline
from ridgefill.eval.limits import limits, limits_across
from ridgefill.eval.pictures import Picture
from ridgefill.eval.report_tables import Table
from ridgefill.files import write_text

NAME = "report"
DOCUMENTS = ("loss", "agreement")  # kinds whose items are documents


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 4."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """One sentence or more for each; a finding's parts stand below it."""

    texts: Sequence[str | Finding]


@dataclass(frozen=True)
class Folded:
    """A table that opens on a click."""

    title: str
    table: Table


_NUMBER = re.compile(r"[-+\d\[]|not known|yes|no ")
Block = Heading | Paragraph | Bullets | Folded | Table | Picture


def write_report(folder: Path, output: Path | None = None, *, title: str | None = None) -> tuple[Path, Path]:
    """Writes both pages, and the Markdown page's pictures into a folder beside it.

    Args:
        folder: a run's folder, or one with runs anywhere below it.
        output: the HTML page (``.html``) or a folder for both; ``folder`` unless named.
        title: of the page; the models' names unless given.

    Returns:
        The HTML page and the Markdown page.

    Raises:
        SettingError: there is no run there, or none that can be read.
        OutputError: a page cannot be written.
    """
    folder = Path(folder)
    runs, refused = open_all(folder)
    page = _page(output if output is not None else folder)
    blocks = list(build(runs, refused, title))
    beside = page.with_name(f"{page.stem}-pictures")
    for block in blocks:
        if isinstance(block, Picture):
            write_text(beside / f"{block.name}.svg", block.file())
    markdown = page.with_suffix(".md")
    write_text(markdown, to_markdown(blocks, beside.name))
    write_text(page, to_html(blocks))
    return page, markdown


def _page(output: Path) -> Path:
    return Path(output) if Path(output).suffix in (".html", ".htm") else Path(output) / f"{NAME}.html"


def build(
    runs: Sequence[Evaluation], refused: Sequence[str] = (), title: str | None = None
) -> Iterator[Block]:
    """The page: findings, limits, pictures over several runs, then each run's tables.

    Args:
        refused: runs that could not be read, in words.
    """
    models = ", ".join(sorted({run.model for run in runs}))
    kinds = ", ".join(dict.fromkeys(run.kind for run in runs))
    yield Heading(1, title or f"Evaluation of {models}")
    yield Paragraph(
        f"{plural(len(runs), 'run')} ({kinds}) on {models}. Every arm is compared with "
        f"{', '.join(sorted({run.baseline for run in runs}))} on the same items. Intervals are 95 % and stand in "
        "brackets; differences of scores are points of 100, of losses nats per token."
    )
    yield Heading(2, "What it found")
    across = find_across(runs)
    if across:
        yield Bullets(across)
    for run in runs:
        yield from _named(
            run, runs, find(run) or [Finding("Nothing: no arm has an item that exact has too.")]
        )
    yield Heading(2, "What it cannot tell")
    for run in runs:
        yield from _named(run, runs, limits(run))
    yield Bullets([*limits_across(runs), *(f"A run was left out. {text}." for text in refused)])
    yield from _overview(runs)
    for number, run in enumerate(runs, 1):
        yield from _run(run, number)


def _named(run: Evaluation, runs: Sequence[Evaluation], texts: Sequence[str | Finding]) -> Iterator[Block]:
    """A run's sentences, below its name where there are several runs."""
    if texts and len(runs) > 1:
        yield Heading(3, f"{run.name} ({run.kind}, {run.model})")
    if texts:
        yield Bullets(texts)


def _overview(runs: Sequence[Evaluation]) -> Iterator[Block]:
    """Pictures that may take several runs: over splits, speed against error."""
    groups = pictures.groups(runs)
    for number, group in enumerate(groups, 1):
        drawn = [
            pictures.pareto(group, f"{number:02}-speed-and-error"),
            pictures.curve(group, f"{number:02}-splits"),
        ]
        found = [picture for picture in drawn if picture is not None]
        if found:
            names = f" ({', '.join(run.name for run in group)})" if len(groups) > 1 else ""
            yield Heading(2, f"Speed against error: {group[0].kind} on {group[0].model}{names}")
        yield from found


def _run(run: Evaluation, number: int) -> Iterator[Block]:
    """One run: what it was, every metric, by length and depth, by document."""
    yield Heading(2, f"{run.name}: {run.kind} on {run.model}")
    main = headline(run)
    if main is not None:
        yield report_tables.glance(run)
    yield report_tables.arms(run)
    yield Folded("Settings and environment", report_tables.what_ran(run))
    if main is None:
        return
    for metric in run.metrics:
        yield Heading(3, report_tables.METRIC_WORDS.get(metric, metric))
        yield report_tables.overall(run, metric)
        strata = report_tables.by_stratum(run, metric)
        if strata is not None:
            yield Folded("By stratum", strata)
    yield from _places(run, number)
    table = report_tables.by_document(run, main)
    if table is not None:
        yield Heading(3, "By document" if run.kind in DOCUMENTS else "By item")
        yield table
        picture = pictures.documents(run, main, f"{number:02}-documents") if run.kind in DOCUMENTS else None
        if picture is not None:
            yield picture


def _places(run: Evaluation, number: int) -> Iterator[Block]:
    tables = [
        table for table in (report_tables.by_length(run), report_tables.by_depth(run)) if table is not None
    ]
    picture = pictures.depth(run, f"{number:02}-length-and-depth")
    if tables or picture is not None:
        yield Heading(3, "By length and depth")
    yield from tables
    if picture is not None:
        yield picture


STYLE = """
:root { color-scheme: light dark; }
body { background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid rgba(128,128,128,.4); }
li { margin: .35rem 0; max-width: 60rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0 1.5rem; overflow-x: auto; } figcaption, caption { text-align: left; opacity: .8;
  font-size: .9rem; padding: .3rem 0; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid rgba(128,128,128,.3); text-align: right;
  vertical-align: top; }
td { white-space: nowrap; } td.words { white-space: normal; }
th { font-weight: 600; } th:first-child { text-align: left; } td.words { text-align: left; }
summary { cursor: pointer; margin: .5rem 0; }
"""


def to_html(blocks: Sequence[Block]) -> str:
    """One page that loads nothing; it follows the reader's light or dark setting."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), NAME)
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(texts):
            return "<ul>\n" + "\n".join(f"<li>{_html_bullet(text)}</li>" for text in texts) + "\n</ul>"
        case Folded(title, table):
            return f"<details>\n<summary>{html.escape(title)}</summary>\n{_html(table)}\n</details>"
        case Picture():
            return f"<figure>\n{block.inline()}\n<figcaption>{html.escape(block.caption)}</figcaption>\n</figure>"
        case Table():
            return _html_table(block)


def _html_bullet(text: str | Finding) -> str:
    if isinstance(text, str) or not text.parts:
        return html.escape(str(text))
    parts = "".join(f"<li>{html.escape(part)}</li>" for part in text.parts)
    return f"<strong>{html.escape(text.text)}:</strong>\n<ul>{parts}</ul>"


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in table.head)
    rows = []
    for i, (first, *cells) in enumerate(table.rows):
        made = [f'<th scope="row">{html.escape(first)}</th>']
        made += [_html_cell(text, table.shades.get((i, j))) for j, text in enumerate(cells, 1)]
        rows.append(f"<tr>{''.join(made)}</tr>")
    caption = f"<caption>{html.escape(table.caption)}</caption>\n" if table.caption else ""
    return (
        f"<figure>\n<table>\n{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>\n</figure>"
    )


def _numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers; the first one names the rows."""
    cells = [row[column] for row in table.rows if row[column]]
    return column > 0 and all(map(_NUMBER.match, cells))


def _html_cell(text: str, shade: float | None) -> str:
    """A cell; a shaded one goes from red (0) to green (1), thin enough to read on light and dark."""
    words = "" if _NUMBER.match(text) or not text else ' class="words"'
    colour = "" if shade is None else f' style="background: hsl({120 * shade:.0f} 70% 45% / .35)"'
    return f"<td{words}{colour}>{html.escape(text)}</td>"


def to_markdown(blocks: Sequence[Block], folder: str) -> str:
    """The same page in Markdown, its pictures in ``folder``."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Bullets(texts):
            return "\n".join(_markdown_bullet(text) for text in texts)
        case Folded(title, table):
            return f"{_plain(title)}:\n\n{_markdown(table, folder)}"
        case Picture():
            place = f"{folder}/{block.name}.svg".replace(" ", "%20")
            return f"![{_plain(block.caption)}]({place})\n\n{_plain(block.caption)}"
        case Table():
            rule = ["---:" if _numeric(block, j) else "---" for j in range(len(block.head))]
            lines = [block.head, rule, *block.rows]
            cells = [[text if n == 1 else _plain(text) for text in line] for n, line in enumerate(lines)]
            made = "\n".join(f"| {' | '.join(line)} |" for line in cells)
            return f"{_plain(block.caption)}\n\n{made}" if block.caption else made


def _markdown_bullet(text: str | Finding) -> str:
    if isinstance(text, str) or not text.parts:
        return f"- {_plain(str(text))}"
    return "\n".join([f"- **{_plain(text.text)}:**", *(f"  - {_plain(part)}" for part in text.parts)])


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    one_line = " ".join(html.escape(text, quote=False).split())
    return re.sub(r"([\\`*_|~$])", r"\\\1", one_line).replace("](", "]\\(")
