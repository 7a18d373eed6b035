"""Results by difficulty, length group and domain, as LongBench v2 and LongBench-E give them (paper Table 11)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ridgefill.errors import SettingError

BY = ("difficulty", "length_group", "domain")


def regroup(lines: Iterable[Mapping[str, Any]], by: str) -> list[dict[str, Any]]:
    """The lines of items.jsonl with another fact for their stratum, for a summary of its own.

    Args:
        by: "difficulty", "length_group" or "domain".

    Raises:
        SettingError: a line does not have that fact: v1 has length groups only.
    """
    found = []
    for line in lines:
        if by not in line:
            raise SettingError(
                f"group the results by {by}",
                f"item {line['item']} of {line['stratum']} does not say it",
                f"group by another of {', '.join(BY)}",
            )
        found.append({**line, "stratum": line[by]})
    return found


def accuracy_by_group(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean score of every arm in every group that the lines tell.

    Returns:
        {"arm", "by", "group", "n", "mean"}, the mean from 0 to 1, in the order in which groups come.
    """
    scores: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for by in BY:
        for line in lines:
            if by in line:
                scores[line["arm"], by, line[by]].append(line["metrics"]["score"])
    return [
        {"arm": arm, "by": by, "group": group, "n": len(got), "mean": sum(got) / len(got)}
        for (arm, by, group), got in scores.items()
    ]
