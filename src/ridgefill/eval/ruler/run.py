"""Runs RULER's samples through lm-eval, arm by arm; answers are kept as they come (paper 3.1, 4.5)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.harness import Context, Span, arm_lm, run_tasks
from ridgefill.eval.results import Run
from ridgefill.eval.ruler.jsonl import Sample
from ridgefill.eval.ruler.scorers import process_results
from ridgefill.eval.ruler.spans import evidence_spans, question_span
from ridgefill.eval.ruler.tasks import TASKS

_PREFIX = "ridgefill_ruler_"
_SCORER = "ridgefill.eval.ruler.scorers.process_results"


@dataclass(frozen=True)
class Place:
    """Where a sample's parts lie in its final prompt.

    Attributes:
        tokens: n, of the prompt.
        question: rows [first, stop) of the question, None if the text has another form than the official one.
        depth: row of the first part that the answer hangs on, as a share of n; None for cwe and fwe.
        filled: whether every row of all those parts lies in the filled rows; None for cwe and fwe.
    """

    tokens: int
    question: Span | None
    depth: float | None
    filled: bool | None


def measure_ruler(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    samples: Sequence[Sample],
    run: Run,
    *,
    tail: int,
    leading: int = 16,
    prefix: bool = True,
    chat: bool | None = None,
    tick: Callable[[], None] = lambda: None,
    chat_args: Mapping[str, Any] | None = None,
    harness: Mapping[str, Any] | None = None,
) -> None:
    """Runs every arm on every sample that the run has not done yet, and keeps score, answer and facts.

    Which samples are filled does not depend on the arm: their evidence lies in rows [leading, n - tail).

    Args:
        tail, leading: rows that run exactly at the prompt's end and start, of the arms compared.
        prefix: the answer's prefix ends the prompt; in chat form it follows the assistant's header.
        chat: prompts take the chat form; None: if the tokenizer has one.
        tick: called once an arm and sample, done ones too.
        chat_args: for the chat template, such as ``{"enable_thinking": False}``.
        harness: more settings of ``lm_eval.simple_evaluate``, such as ``gen_kwargs``.

    Raises:
        SettingError: no sample, a chat form that the tokenizer lacks, lm-eval is missing or refuses a setting.
        PromptError: no sample has its evidence in filled rows, or one is longer than the model's context; nothing
            has run then.
    """
    if not samples:
        raise SettingError("run RULER", "there is no sample", "make or name a set")
    if len({sample.item for sample in samples}) < len(samples):
        raise SettingError("run RULER", "two samples have one name", "give each task and length one set")
    formed = _formed(tokenizer, chat)
    hflm = {} if not chat_args else {"chat_template_args": dict(chat_args)}
    evaluation = _Evaluation(model, tokenizer, prefix, formed, hflm, dict(harness or {}))
    places = evaluation.places(arms[0], samples, tail, leading)
    _check_filled(places, tail, leading)
    for arm in arms:
        pending = [sample for sample in samples if not run.done(arm.name, sample.item)]
        for _ in range(len(samples) - len(pending)):
            tick()
        if pending:
            evaluation.answers(arm, pending, places, run, tick)


@dataclass(frozen=True)
class _Evaluation:
    """One way to put samples to a model."""

    model: Any
    tokenizer: Any
    prefix: bool
    chat: bool
    hflm: Mapping[str, Any]
    harness: Mapping[str, Any]

    def places(self, arm: Arm, samples: Sequence[Sample], tail: int, leading: int) -> dict[str, Place]:
        """Where every sample's parts lie, from the prompts that lm-eval renders; nothing is generated."""
        by_item = {sample.item: sample for sample in samples}
        found: dict[str, Place] = {}

        def look(doc: Mapping[str, Any], context: Context, answer: str, seconds: float) -> None:
            found[doc["item"]] = place(by_item[doc["item"]], context, tail, leading)

        lm = arm_lm(self.model, self.tokenizer, arm, heard=look, rehearse=True, **self.hflm)
        self._run(lm, samples)
        return found

    def answers(
        self,
        arm: Arm,
        samples: Sequence[Sample],
        places: Mapping[str, Place],
        run: Run,
        tick: Callable[[], None],
    ) -> None:
        """Runs one arm, and keeps every answer at once, so that a killed run goes on from it."""
        by_item = {sample.item: sample for sample in samples}

        def keep(doc: Mapping[str, Any], context: Context, answer: str, seconds: float) -> None:
            sample, at = by_item[doc["item"]], places[doc["item"]]
            run.add(
                arm.name,
                sample.item,
                sample.task,
                process_results(doc, [answer]),
                length=sample.wanted,
                tokens=at.tokens,
                depth=at.depth,
                filled=at.filled,
                answer=answer,
                seconds=round(seconds, 4),
            )
            tick()

        lm = arm_lm(
            self.model,
            self.tokenizer,
            arm,
            question=lambda doc, context: places[doc["item"]].question,
            heard=keep,
            **self.hflm,
        )
        self._run(lm, samples)

    def _run(self, lm: Any, samples: Sequence[Sample]) -> None:
        with tempfile.TemporaryDirectory(prefix="ridgefill-ruler-") as folder:
            names = write_tasks(Path(folder), samples, prefix=self.prefix)
            run_tasks(lm, Path(folder), names, chat=self.chat, **self.harness)


def place(sample: Sample, context: Context, tail: int, leading: int) -> Place:
    """Where a sample's question and evidence lie in its prompt.

    Raises:
        PromptError: the prompt does not hold the sample's text.
    """
    n = context.ids.shape[1]
    asked, evidence = question_span(sample), evidence_spans(sample)
    question = None if asked is None else context.rows_within(sample.input, [asked])[0]
    if evidence is None:
        return Place(n, question, None, None)
    rows = context.rows_within(sample.input, evidence)
    filled = all(leading <= first and stop <= n - tail for first, stop in rows)
    return Place(n, question, rows[0][0] / n, filled)


def write_tasks(folder: Path, samples: Sequence[Sample], *, prefix: bool = True) -> list[str]:
    """Writes a task of lm-eval for each RULER task of the samples: YAML and the samples beside it.

    They need nothing but lm-eval and this package, so ``lm_eval --include_path`` runs them too.

    Returns:
        The tasks' names.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    for name, own in by_task.items():
        data = folder / f"{name}.jsonl"
        docs = [{**sample.to_json(), "item": sample.item, "task": name, "gold": None} for sample in own]
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
        (folder / f"{_PREFIX}{name}.yaml").write_text(_yaml(name, data, prefix), encoding="utf-8")
    return [f"{_PREFIX}{name}" for name in by_task]


def _yaml(name: str, data: Path, prefix: bool) -> str:
    """JSON's notation is YAML too, but for the function's tag."""
    config: dict[str, Any] = {
        "task": f"{_PREFIX}{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "input",
        "doc_to_target": "outputs",
        "target_delimiter": "",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": TASKS[name].budget},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
    }
    if prefix:
        config["gen_prefix"] = "answer_prefix"
    lines = [f"{key}: {json.dumps(value)}" for key, value in config.items()]
    return "\n".join([*lines, f"process_results: !function {_SCORER}"]) + "\n"


def _formed(tokenizer: Any, chat: bool | None) -> bool:
    has = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has:
        raise SettingError(
            "RULER in chat form", "the tokenizer has no chat template", "run it without (chat=False)"
        )
    return has if chat is None else chat


def _check_filled(places: Mapping[str, Place], tail: int, leading: int) -> None:
    known = [at for at in places.values() if at.filled is not None]
    if known and not any(at.filled for at in known):
        longest = max(at.tokens for at in known)
        raise PromptError(
            f"RULER with a tail of {tail} tokens and {leading} leading ones",
            f"of {len(known)} samples, the longest of {longest} tokens, none has all its evidence in filled rows",
            "make a set of longer samples, or use a shorter tail",
        )
