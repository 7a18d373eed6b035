"""One question of LongBench, ready to be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One question, its prompt, and how its answer is judged.

    Attributes:
        item: names it in results: "task/_id".
        task: a name of `ridgefill.eval.longbench.TASKS` (or that with "_e"), or "v2".
        stratum: what results are grouped by: the task, and for v2 the length group.
        prompt: the official template with the text and the question in it; neither cut nor in chat form.
        answers: the true ones; the best match counts. For v2 one letter.
        max_new_tokens: the official budget, in tokens.
        scorer: a name of `ridgefill.eval.longbench.scorers`.
        question: the part of the prompt that asks, where it stands behind the text.
        classes: all classes of a classification task.
        chat: whether the official protocol asks in chat form.
        first_line: whether only the first line of the answer counts.
        newline_stops: whether a line break ends the answer.
        version: 1 or 2; each has its own way to cut a prompt.
        followup: for v2 with reasoning: the second prompt, with `REASONING` where the first answer goes.
        facts: what results keep beside the answer.
    """

    item: str
    task: str
    stratum: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    scorer: str
    question: str | None = None
    classes: tuple[str, ...] = ()
    chat: bool = True
    first_line: bool = False
    newline_stops: bool = False
    version: int = 1
    followup: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


REASONING = "$COT$"
