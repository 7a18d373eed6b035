"""Where in a sample's text the question stands, and what the answer hangs on."""

from __future__ import annotations

import re

from ridgefill.eval.ruler.draft import Span
from ridgefill.eval.ruler.jsonl import Sample
from ridgefill.eval.ruler.tasks import TASKS

_ASKED = re.compile(r"for (\S+(?:, (?:and )?\S+)*) mentioned in the provided text\?\s*$")
_DOCUMENT = re.compile(r"Document \d+:\n")


def question_span(sample: Sample) -> Span | None:
    """Characters [first, stop) of the question: what follows the input's last newline, in every task."""
    first = sample.input.rstrip().rfind("\n") + 1
    return (first, len(sample.input.rstrip())) if first else None


def evidence_spans(sample: Sample) -> tuple[Span, ...] | None:
    """Characters of every part that the answer hangs on, in order: all must be filled for a filled sample.

    niah: the needles asked for, not those that distract. vt: every assignment of the chain. qa: the paragraphs
    that hold the answer, as the set says; where it does not, all that one of the answers stands in. cwe, fwe: the
    whole list counts, so None. None too where a text has another form than the official one.
    """
    family = TASKS[sample.task].family
    if family == "niah":
        return _needles(sample)
    if family == "vt":
        return _assignments(sample)
    return (sample.gold or _documents(sample)) if family == "qa" else None


def _needles(sample: Sample) -> tuple[Span, ...] | None:
    asked = _ASKED.search(sample.input)
    if asked is None:
        return None
    keys = [re.escape(key) for key in re.split(r", (?:and )?", asked[1])]
    found = []
    for output in sample.outputs:
        needle = rf"One of the special magic \w+ for (?:{'|'.join(keys)}) is: {re.escape(output)}\."
        match = re.search(needle, sample.input)
        if match is None:
            return None
        found.append(match.span())
    return tuple(sorted(set(found)))


def _assignments(sample: Sample) -> tuple[Span, ...] | None:
    found = []
    for name in sample.outputs:
        match = re.search(rf"VAR {re.escape(name)} = (?:VAR [A-Z]+|\d+)", sample.input)
        if match is None:
            return None
        found.append(match.span())
    return tuple(sorted(found))


def _documents(sample: Sample) -> tuple[Span, ...] | None:
    question = question_span(sample)
    starts = [match.start() for match in _DOCUMENT.finditer(sample.input)]
    stops = [*starts[1:], question[0] if question else len(sample.input)]
    answers = [output.lower() for output in sample.outputs]
    held = [
        (a, b)
        for a, b in zip(starts, stops, strict=True)
        if any(answer in sample.input[a:b].lower() for answer in answers)
    ]
    return tuple(held) or None
