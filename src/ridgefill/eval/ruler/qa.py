"""Questions over documents: qa_1 (SQuAD) and qa_2 (HotpotQA), from the user's own copies of those data sets."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgefill.errors import CorpusError
from ridgefill.eval.ruler.draft import Draft, Prompt, Span

_ASK = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
TEMPLATE = f"{_ASK}\n\nThe following are given documents.\n\n{{context}}\n\n{_ASK}\n\nQuestion: {{query}}"
PREFIX = " Answer:"
DOCUMENT = "Document {i}:\n{text}"


@dataclass(frozen=True)
class Question:
    """A question and the documents that go with it, by their places in `Bank.documents`.

    Attributes:
        query: its text.
        outputs: the answers; any of them counts.
        own: documents that must be in the prompt.
        gold: those of them that hold the answer.
        near: documents to add before any others.
    """

    query: str
    outputs: tuple[str, ...]
    own: tuple[int, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bank:
    """All questions and documents of a data set."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@cache
def read_squad(path: Path) -> Bank:
    """Reads SQuAD's JSON (``dev-v2.0.json`` officially); unanswerable questions are left out.

    Raises:
        CorpusError: it cannot be read or has another form.
    """
    articles = _read(path, "SQuAD")
    try:
        documents = sorted({p["context"] for a in articles["data"] for p in a["paragraphs"]})
        place = {text: i for i, text in enumerate(documents)}
        questions = []
        for article in articles["data"]:
            all_own = [place[p["context"]] for p in article["paragraphs"]]
            for paragraph in article["paragraphs"]:
                own = place[paragraph["context"]]
                near = tuple(dict.fromkeys(i for i in all_own if i != own))
                for asked in paragraph["qas"]:
                    if not asked.get("is_impossible", False):
                        outputs = tuple(answer["text"] for answer in asked["answers"])
                        questions.append(Question(asked["question"], outputs, (own,), (own,), near))
    except (KeyError, TypeError) as error:
        raise _form(path, "SQuAD", error) from error
    return _bank(path, questions, documents)


@cache
def read_hotpotqa(path: Path) -> Bank:
    """Reads HotpotQA's JSON (``hotpot_dev_distractor_v1.json`` officially).

    Raises:
        CorpusError: it cannot be read or has another form.
    """
    entries = _read(path, "HotpotQA")
    try:
        full = lambda title, sentences: f"{title}\n{''.join(sentences)}"  # noqa: E731
        documents = sorted({full(*c) for entry in entries for c in entry["context"]})
        place = {text: i for i, text in enumerate(documents)}
        questions = []
        for entry in entries:
            titles = {title for title, _ in entry.get("supporting_facts", [])}
            own = tuple(dict.fromkeys(place[full(*c)] for c in entry["context"]))
            gold = tuple(dict.fromkeys(place[full(*c)] for c in entry["context"] if c[0] in titles))
            questions.append(Question(entry["question"], (entry["answer"],), own, gold))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _form(path, "HotpotQA", error) from error
    return _bank(path, questions, documents)


def draft(rng: random.Random, bank: Bank, index: int) -> Draft:
    """The prompt of one question of the bank; its other documents are drawn.

    Raises:
        CorpusError: the bank has no such question.
    """
    if index >= len(bank.questions):
        raise CorpusError(
            f"question {index + 1} of a data set",
            f"it has {len(bank.questions)} that can be answered",
            "ask for fewer samples, or name the whole data set",
        )
    question, seed = bank.questions[index], rng.getrandbits(64)
    others = _others(rng, question, len(bank.documents))
    drawn: list[int] = []

    def render(size: int) -> Prompt:
        while len(drawn) < size - len(question.own):
            drawn.append(next(others))
        chosen = [*question.own, *drawn[: size - len(question.own)]]
        random.Random(seed).shuffle(chosen)
        return _ask(question, chosen, bank.documents)

    return Draft(render, len(question.own))


def _others(rng: random.Random, question: Question, count: int) -> Iterator[int]:
    """The article's other documents, then any; all of them again where that is not enough."""
    taken = {*question.own, *question.near}
    near, far = list(question.near), [i for i in range(count) if i not in taken]
    rng.shuffle(near)
    rng.shuffle(far)
    return itertools.chain(near, far, itertools.cycle([*question.own, *near, *far]))


def _ask(question: Question, chosen: Sequence[int], documents: Sequence[str]) -> Prompt:
    parts = [DOCUMENT.format(i=i, text=documents[place]) for i, place in enumerate(chosen, 1)]
    before, after = TEMPLATE.split("{context}")
    gold: list[Span] = []
    at = len(before)
    for place, part in zip(chosen, parts, strict=True):
        if place in question.gold:
            gold.append((at, at + len(part)))
        at += len(part) + 2
    # not str.format: documents hold braces
    text = before + "\n\n".join(parts) + after.replace("{query}", question.query)
    return Prompt(text, PREFIX, question.outputs, tuple(gold) or None)


def _read(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorpusError(
            f"read {name} from {path.name}", error.strerror or str(error), "check the path"
        ) from error
    except ValueError as error:
        raise CorpusError(
            f"read {name} from {path.name}", "it is not JSON", f"name {name}'s own JSON file"
        ) from error


def _form(path: Path, name: str, error: Exception) -> CorpusError:
    return CorpusError(
        f"read {name} from {path.name}",
        f"it is not in {name}'s form ({type(error).__name__}: {error})",
        f"name {name}'s own JSON file, unchanged",
    )


def _bank(path: Path, questions: Sequence[Question], documents: Sequence[str]) -> Bank:
    asked = [question for question in questions if question.outputs]
    if not asked:
        raise CorpusError(f"read {path.name}", "no question in it has an answer", "name another file")
    return Bank(tuple(asked), tuple(documents))
