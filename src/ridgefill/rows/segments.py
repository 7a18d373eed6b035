"""Spans: the prefix cut into sentences, lines of code or fixed windows, every row in exactly one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt
from ridgefill.rows.special import control_ids

LONGEST = 80  # rows of a span; longer sentences are cut
KINDS = ("auto", "sentences", "lines")

_END = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019\u00bb)\]*_]*(?=\s)"  # a space must follow: not in 3.14
    r"|[\u3002\uff01\uff1f\uff61\u061f\u06d4\u0964\u0965\u1362\u104b\u17d4\u0f0d]+[\u300d\u300f\u201d\u2019\uff09)\]]*"
    r"|\n"
)
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")
_ABBREVIATION = re.compile(
    r"(?:^|[^\w.])(?:[^\W\d_]|(?:[^\W\d_]\.)+[^\W\d_]"
    r"|mr|mrs|ms|dr|st|prof|sen|rep|gen|gov|col|capt|lt|sgt|rev|hon|mt|messrs|vs|cf|fig|eq|vol|pp|approx|dept)$",
    re.IGNORECASE,
)
_ITEM_NUMBER = re.compile(r"(?:^|\n)\s*(?:\d{1,3}|[ivxIVX]{1,4})$")
_CODE_SIGNS = re.compile(r"[{}()\[\]<>=;|&^$\\]|::|->|_\w")
_CODE_SHARE = 0.05  # signs of code among the characters of a block
_CODE_LINE = 120  # characters; a longer line is a paragraph
_WRAPPED = range(40, 101)  # characters of a line that was broken to fit a page
_STATEMENT_END = tuple(")]}>([{<=+|\\/")  # a line of prose seldom ends with one of these
_CLAUSE_END = re.compile(r"[,;:\u3001\uff0c\uff1b\uff1a\n][\"'\u201d\u2019)\]]*\s*$")


def check_spans(asked: str, kind: str | int) -> None:
    """Raises SettingError for what is neither one of `KINDS` nor a number of rows."""
    rows = isinstance(kind, int) and not isinstance(kind, bool) and kind >= 1
    if not rows and kind not in KINDS:
        raise SettingError(
            f"{asked} by {kind!r}", "no such spans", f"use {', '.join(KINDS)}, or a number of rows such as 32"
        )


def prompt_spans(prompt: Prompt, kind: str | int = "auto", longest: int = LONGEST) -> list[range]:
    """The prefix as spans, in order, each row in exactly one.

    Args:
        kind: see `split_rows`; a number of rows needs no tokenizer.

    Raises:
        SettingError: there is no tokenizer.
    """
    if isinstance(kind, int):
        return [range(i, min(i + kind, prompt.prefix)) for i in range(0, prompt.prefix, kind)]
    pieces = prompt.pieces[: prompt.prefix]
    ids = prompt.ids[: prompt.prefix].cpu()
    control = torch.isin(ids, torch.tensor(sorted(control_ids(prompt.tokenizer)), dtype=torch.long))
    return split_rows(pieces, kind, longest, control.nonzero().flatten().tolist())


def split_rows(
    pieces: Sequence[str], kind: str = "auto", longest: int = LONGEST, control: Collection[int] = ()
) -> list[range]:
    """Rows as spans, in order, each row in exactly one.

    A row belongs where its first visible character does; blank rows, and the rest of a character of several
    rows, belong to the span before.

    Args:
        pieces: [m] the text of every row.
        kind: "lines"; "sentences" (of any script; line ends count too, unless a line of prose was broken to fit
            a page); "auto" takes lines where the text between two blank lines looks like source code.
        longest: longer spans are cut after a clause or before a word where that leaves half of it.
        control: rows of control tokens; a span starts at the first of several.
    """
    control = set(control)
    # Their spelling must not pass for source code.
    pieces = ["X" * len(piece) if i in control else piece for i, piece in enumerate(pieces)]
    starts = list(accumulate(map(len, pieces), initial=0))
    visible = [start + len(p) - len(p.lstrip()) for start, p in zip(starts, pieces, strict=False)]
    shown = [i for i, piece in enumerate(pieces) if piece.strip()]
    places = [visible[i] for i in shown]
    ends = _ends("".join(pieces), kind)
    first = {shown[at] for at in (bisect_left(places, end) for end in ends) if at < len(shown)}
    first |= {i for i in control if i - 1 not in control}
    cuts = sorted({0, len(pieces)} | first)
    return [part for a, b in pairwise(cuts) for part in _cut(range(a, b), pieces, longest)]


def _ends(text: str, kind: str) -> Iterator[int]:
    """Places in the text after which a span ends."""
    at = 0
    for gap in [*(m.span() for m in _BLANK_LINE.finditer(text)), (len(text), len(text))]:
        block = text[at : gap[0]]
        lines = kind == "lines" or (kind == "auto" and _is_code(block))
        for end in _line_ends(block) if lines else _sentence_ends(block):
            yield at + end
        yield gap[0]
        at = gap[1]


def _line_ends(block: str) -> Iterator[int]:
    return (match.end() for match in re.finditer("\n", block))


def _sentence_ends(block: str) -> Iterator[int]:
    for match in _END.finditer(block):
        before, after = block[max(0, match.start() - 120) : match.start()], block[match.end() :][:40].lstrip()
        if match[0] == "\n":
            stays = _is_wrapped(before.rpartition("\n")[2], after)
        elif match[0][0] in ".!?\u2026":
            dot = match[0] == "." and (_ABBREVIATION.search(before) or _ITEM_NUMBER.search(before))
            stays = bool(dot) or after[:1].islower()
        else:
            stays = False
        if not stays:
            yield match.end()


def _is_wrapped(line: str, after: str) -> bool:
    """Whether a line ends only because the page does."""
    line = line.strip()
    return len(line) in _WRAPPED and after[:1].isalpha() and not line.endswith(_STATEMENT_END)


def _is_code(block: str) -> bool:
    """Whether a block's lines are statements or records rather than prose."""
    if "\n" not in block or len(block) > _CODE_LINE * (block.count("\n") + 1):
        return False
    return len(_CODE_SIGNS.findall(block)) > _CODE_SHARE * sum(map(len, block.split()))


def _cut(rows: range, pieces: Sequence[str], longest: int) -> Iterator[range]:
    """A span in parts of about equal length, none above ``longest``."""
    first = rows.start
    while (left := rows.stop - first) > longest:
        target = first + -(-left // -(-left // longest))
        stop = _cut_at(range(target, first + max(1, (target - first) // 2) - 1, -1), pieces)
        yield range(first, stop)
        first = stop
    yield range(first, rows.stop)


def _cut_at(rows: range, pieces: Sequence[str]) -> int:
    """The best row of ``rows``, latest first, for a new part to start at: after a clause, before a word."""
    after_clause = (i for i in rows if pieces[i] and _CLAUSE_END.search(pieces[i - 1]))
    before_word = (i for i in rows if pieces[i][:1].isspace() or pieces[i - 1][-1:].isspace())
    whole = (i for i in rows if pieces[i])
    return next((i for kind in (after_clause, before_word, whole) for i in kind), rows.start)
