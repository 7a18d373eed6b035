"""Makes sets of samples, each once, into files that every arm and every later run read."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.answer import as_prompt
from ridgefill.errors import CorpusError, PromptError
from ridgefill.eval.documents import read_whole
from ridgefill.eval.haystack import prose
from ridgefill.eval.ruler import qa, tasks
from ridgefill.eval.ruler.draft import largest
from ridgefill.eval.ruler.jsonl import FILE, Sample, read_set, to_sample, write_set
from ridgefill.eval.ruler.niah import essay_words
from ridgefill.eval.ruler.tasks import Material, Task
from ridgefill.eval.ruler.words import library
from ridgefill.files import sha256_file
from ridgefill.models.identity import tokenizer_sha256

EMBEDDED = "embedded"
FORMAT = 1


@dataclass(frozen=True)
class Suite:
    """Samples and what they were made of.

    Attributes:
        samples: of all tasks and lengths.
        settings: for a run's settings: tasks, lengths, count, seed, words, and hashes of what the user named.
    """

    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]


def make_suite(
    tokenizer: Any,
    folder: str | Path,
    *,
    lengths: Sequence[int],
    count: int = 25,
    names: Sequence[str] | None = None,
    seed: int = 42,
    essays: str | Path | Sequence[str | Path] | None = None,
    squad: str | Path | None = None,
    hotpotqa: str | Path | None = None,
    fitted: Collection[str] = (),
    tick: Callable[[], None] = lambda: None,
) -> Suite:
    """Samples of the official tasks: those in ``folder`` where they are, else made and kept there.

    A set lies in ``folder/<tokenizer>/<length>-seed<seed>-<what it is made of>/<task>/validation.jsonl``, in the
    official form. A length counts prompt, chat form, answer prefix and the answer's budget, in tokens.

    Args:
        tokenizer: the model's.
        lengths: such as 4096, 8192.
        count: samples of each task and length; more can be asked for later.
        names: official names; None: all that can be made of what is named.
        essays: text files for the essay haystacks, or "embedded" for the embedded speeches.
        squad, hotpotqa: SQuAD's and HotpotQA's JSON files, for qa_1 and qa_2.
        fitted: digests of embedded speeches to leave out, as the maps' provenance has them.
        tick: called once a sample.

    Raises:
        SettingError: an unknown task.
        CorpusError: a task's text was not named, or cannot be read.
        PromptError: a length that a task does not fit in.
        OutputError: the folder cannot be written.
    """
    material, sources = gather(essays, squad, hotpotqa, fitted)
    chosen = tasks.choose(names, material)
    maker = _Maker(tokenizer, Path(folder).expanduser(), material, sources, seed)
    samples = [s for task in chosen for wanted in lengths for s in maker.samples(task, wanted, count, tick)]
    used = {task.needs for task in chosen} | ({"words"} if any(task.worded for task in chosen) else set())
    settings = {
        "tasks": [task.name for task in chosen],
        "lengths": list(lengths),
        "count": count,
        "seed": seed,
        **{name: value for name, value in sources.items() if name in used},
    }
    return Suite(tuple(samples), settings)


def gather(
    essays: str | Path | Sequence[str | Path] | None,
    squad: str | Path | None,
    hotpotqa: str | Path | None,
    fitted: Collection[str] = (),
) -> tuple[Material, dict[str, str]]:
    """Reads what the user named; also the word list's name and hashes of the rest.

    Raises:
        CorpusError: one cannot be read.
    """
    words = library()
    sources = {"words": words.name}
    text = None if essays is None else _essay(essays, fitted)
    if text is not None:
        sources["essays"] = hashlib.sha256(text.encode()).hexdigest()
    banks: dict[str, qa.Bank | None] = {"squad": None, "hotpotqa": None}
    for name, given, read in (("squad", squad, qa.read_squad), ("hotpotqa", hotpotqa, qa.read_hotpotqa)):
        if given is not None:
            path = Path(given).expanduser()
            banks[name] = read(path)
            sources[name] = sha256_file(path)
    essay = None if text is None else essay_words(text)
    return Material(words, essay, banks["squad"], banks["hotpotqa"]), sources


def _essay(essays: str | Path | Sequence[str | Path], fitted: Collection[str]) -> str:
    if essays == EMBEDDED:
        return "\n".join(prose(fitted))
    paths = [essays] if isinstance(essays, str | Path) else list(essays)
    for path in paths:  # a missing file is no name of a data set to stream
        if not Path(path).expanduser().exists():
            raise CorpusError(
                f"read the essay {path}", "there is no such file", "check the path, or use 'embedded'"
            )
    return "\n".join(read_whole(paths))


class _Maker:
    """Makes and finds sets for one tokenizer."""

    def __init__(
        self, tokenizer: Any, root: Path, material: Material, sources: Mapping[str, str], seed: int
    ) -> None:
        self.tokenizer, self.material, self.sources, self.seed = tokenizer, material, sources, seed
        self.sha256 = tokenizer_sha256(tokenizer)
        self.root = root / self.sha256[:12]
        self.form = form_tokens(tokenizer)

    def samples(self, task: Task, wanted: int, count: int, tick: Callable[[], None]) -> list[Sample]:
        """``count`` samples: those of the file, and new ones behind them if it has fewer."""
        made = self._made(task, wanted)
        name = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:8]
        folder = self.root / f"{wanted}-seed{self.seed}-{name}" / task.name
        lines = read_set(folder)[0][:count] if (folder / FILE).exists() else []
        for _ in lines:
            tick()
        if len(lines) < count:
            size = 0
            for index in range(len(lines), count):
                line, size = self._make(task, wanted, index, size)
                lines.append(line)
                tick()
            write_set(folder, lines, made)
        return [to_sample(task.name, i, wanted, line) for i, line in enumerate(lines)]

    def _made(self, task: Task, wanted: int) -> dict[str, Any]:
        """Everything that decides the set, but how many samples it has."""
        used = {"words"} if task.worded else set()
        return {
            "format": FORMAT,
            "task": task.name,
            "wanted": wanted,
            "seed": self.seed,
            "tokenizer": self.sha256,
            "form_tokens": self.form,
            **{k: v for k, v in self.sources.items() if k in used or k == task.needs},
        }

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _make(self, task: Task, wanted: int, index: int, guess: int) -> tuple[dict[str, Any], int]:
        """One sample's JSON fields and its size, the next one's first guess."""
        rng = random.Random(f"{task.name} {wanted} {self.seed} {index}")
        room = wanted - task.budget - self.form
        draft = tasks.draft(task, rng, index, wanted, room, self.material, self._count)

        def length(size: int) -> int:
            prompt = draft.render(size)
            return self._count(prompt.input + prompt.answer_prefix)

        size = largest(length, room, draft.least, guess)
        if size is None:
            raise PromptError(
                f"a sample of {task.name} of {wanted} tokens",
                f"it takes {length(draft.least) + task.budget + self.form} at least",
                "ask for a greater length, or leave the task out",
            )
        prompt = draft.render(size)
        own = length(size) + task.budget
        sample = Sample(
            task.name, index, wanted, own, prompt.input, prompt.answer_prefix, prompt.outputs, prompt.gold
        )
        more: dict[str, Any] = {"length_w_model_temp": own + self.form}
        if task.family == "niah":
            before = prompt.input[: prompt.input.index(prompt.outputs[0])]
            more["token_position_answer"] = self._count(before)
        return sample.to_json(**more), size


def form_tokens(tokenizer: Any) -> int:
    """Tokens that the chat form adds to a message, or a plain prompt's special ones if they are more."""
    text = "x"
    bare = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    plain = len(tokenizer(text)["input_ids"])
    form = (
        len(tokenizer(as_prompt(tokenizer, text), add_special_tokens=False)["input_ids"])
        if getattr(tokenizer, "chat_template", None)
        else 0
    )
    return max(plain, form) - bare
