"""The official scorers: references are looked for in the answer as substrings, letter case apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def postprocess(answer: str) -> str:
    """The answer as it is scored: stripped, control characters as newlines."""
    return _UNPRINTABLE.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that stand in the answer, 0 to 1: all tasks but qa."""
    return sum(_found(answer, references)) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if any reference stands in the answer, else 0: the qa tasks."""
    return float(any(_found(answer, references)))


def score(task: str, answer: str, references: Sequence[str]) -> float:
    """The official score of one answer, 0 to 1.

    Args:
        task: official name.
        answer: as generated, without the answer's prefix.
    """
    scorer = string_match_part if task.startswith("qa") else string_match_all
    return scorer(postprocess(answer), references)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """For lm-eval: the score of its filtered answer to a sample, which names its "task"."""
    return {"score": score(doc["task"], results[0], doc["outputs"])}


def _found(answer: str, references: Sequence[str]) -> list[bool]:
    lower = answer.lower()
    return [reference.lower() in lower for reference in references]
