"""Rows of LongBench v1 as samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ridgefill.errors import CorpusError
from ridgefill.eval.longbench.fields import listed, text, whole
from ridgefill.eval.longbench.sample import Sample
from ridgefill.eval.longbench.tasks import CODE, EVEN, FEW_SHOT, TASKS

_NUMBERED = {"retrieval": re.compile(r"Paragraph \d+"), "retrieval_zh": re.compile(r"段落\d+")}


def sample_of(row: Mapping[str, Any], where: str, even: bool = False) -> Sample:
    """One row of the official form {input, context, answers, length, dataset, all_classes, _id}.

    Args:
        where: names the row in errors.
        even: whether it comes from a file of LongBench-E.

    Raises:
        CorpusError: a field that is missing or of the wrong kind, or an unknown task.
    """
    name = text(row, "dataset", where)
    base = name.removesuffix(EVEN)
    if base not in TASKS:
        raise CorpusError(
            f"read {where}",
            f"LongBench has no task {name!r}",
            f"its field 'dataset' must be one of {', '.join(TASKS)}",
        )
    task, asked = TASKS[base], text(row, "input", where)
    words = whole(row, "length", where)
    named = base + EVEN if even else name
    return Sample(
        item=f"{named}/{text(row, '_id', where)}",
        task=named,
        stratum=named,
        prompt=task.template.format(context=text(row, "context", where), input=asked),
        answers=_answers(row, task.scorer, where),
        max_new_tokens=task.max_new_tokens,
        scorer=task.scorer,
        question=asked if asked.strip() and base not in CODE and "{input}" in task.template else None,
        classes=listed(row, "all_classes", where) if task.scorer == "classification" else (),
        chat=base not in FEW_SHOT + CODE,
        first_line=base in FEW_SHOT,
        newline_stops=base == "samsum",
        facts={"length_group": _length_group(words)},
    )


def _answers(row: Mapping[str, Any], scorer: str, where: str) -> tuple[str, ...]:
    answers = listed(row, "answers", where)
    form = _NUMBERED.get(scorer)
    if form is not None and not all(form.search(answer) for answer in answers):
        raise CorpusError(
            f"read {where}", "an answer names no paragraph", "give answers such as 'Paragraph 3' or '段落3'"
        )
    return answers


def _length_group(words: int) -> str:
    """The groups of LongBench-E, by its count of words (of characters in Chinese)."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
