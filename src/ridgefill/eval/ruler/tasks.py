"""The 13 official tasks with their parameters, and what each needs to be made."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.ruler import lists, qa, vt
from ridgefill.eval.ruler.draft import Draft
from ridgefill.eval.ruler.niah import Needles
from ridgefill.eval.ruler.words import Library

BUDGETS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # tokens to generate


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: its official name.
        family: "niah", "vt", "cwe", "fwe" or "qa".
        needles: the haystack's parameters, for niah.
        needs: what the user must name: "essays", "squad", "hotpotqa", or None.
        worded: whether it draws from the word list.
    """

    name: str
    family: str
    needles: Needles | None = None
    needs: str | None = None
    worded: bool = False

    @property
    def budget(self) -> int:
        """Tokens that the answer may have (the official ``tokens_to_generate``)."""
        return BUDGETS[self.family]


def _niah(name: str, haystack: str, **parameters: str | int) -> Task:
    needles = Needles(haystack, **parameters)  # type: ignore[arg-type]
    return Task(name, "niah", needles, "essays" if haystack == "essay" else None, True)


_ALL = (
    _niah("niah_single_1", "noise"),
    _niah("niah_single_2", "essay"),
    _niah("niah_single_3", "essay", value_type="uuids"),
    _niah("niah_multikey_1", "essay", keys=4),
    _niah("niah_multikey_2", "needle"),
    _niah("niah_multikey_3", "needle", key_type="uuids", value_type="uuids"),
    _niah("niah_multivalue", "essay", values=4),
    _niah("niah_multiquery", "essay", queries=4),
    Task("vt", "vt"),
    Task("cwe", "cwe", worded=True),
    Task("fwe", "fwe"),
    Task("qa_1", "qa", needs="squad"),
    Task("qa_2", "qa", needs="hotpotqa"),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}
_NEEDED = {
    "essays": (
        "its haystack is an essay, and none was named",
        "name text files with essays=, or the embedded speeches with essays='embedded'",
    ),
    "squad": ("it asks SQuAD's questions, and no copy was named", "name SQuAD's dev-v2.0.json with squad="),
    "hotpotqa": (
        "it asks HotpotQA's questions, and no copy was named",
        "name HotpotQA's hotpot_dev_distractor_v1.json with hotpotqa=",
    ),
}


@dataclass(frozen=True)
class Material:
    """What prompts are made of; None where the user named nothing.

    Attributes:
        words: the word list.
        essay: the essay's words.
        squad, hotpotqa: the data sets.
    """

    words: Library
    essay: Sequence[str] | None = None
    squad: qa.Bank | None = None
    hotpotqa: qa.Bank | None = None

    def has(self, task: Task) -> bool:
        """Whether the task can be made of it."""
        needed = {"essays": self.essay, "squad": self.squad, "hotpotqa": self.hotpotqa}
        return task.needs is None or needed[task.needs] is not None


def known(names: Sequence[str]) -> list[Task]:
    """The tasks of these names.

    Raises:
        SettingError: one is unknown.
    """
    for name in names:
        if name not in TASKS:
            raise SettingError(
                f"the RULER task {name!r}", "it is not known", f"use one of {', '.join(TASKS)}"
            )
    return [TASKS[name] for name in dict.fromkeys(names)]


def choose(names: Sequence[str] | None, material: Material) -> list[Task]:
    """The tasks asked for; None: all that can be made.

    Raises:
        SettingError: one is unknown.
        CorpusError: one needs what was not named.
    """
    if names is None:
        return [task for task in _ALL if material.has(task)]
    chosen = known(names)
    for task in chosen:
        if not material.has(task):
            raise CorpusError(f"the RULER task {task.name}", *_NEEDED[str(task.needs)])
    return chosen


def draft(
    task: Task, rng: random.Random, index: int, wanted: int, room: int, material: Material, count: Callable
) -> Draft:
    """Draws sample ``index`` of the task.

    Args:
        wanted: length in tokens that was asked for.
        room: of those, what is left for the prompt.
        count: text -> tokens.
    """
    if task.needles is not None:
        return task.needles.draft(rng, material.words, material.essay or ())
    if task.family == "vt":
        return vt.draft(rng, count)
    if task.family == "cwe":
        return lists.cwe(rng, material.words, wanted)
    if task.family == "fwe":
        return lists.fwe(rng, room)
    bank = material.squad if task.needs == "squad" else material.hotpotqa
    if bank is None:
        raise CorpusError(f"the RULER task {task.name}", *_NEEDED[str(task.needs)])
    return qa.draft(rng, bank, index)
