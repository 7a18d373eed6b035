"""lm-eval with an arm's prefill: its own prompts, stop sequences, budgets and settings; only generation is ours."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ridgefill.errors import PromptError, RidgeFillError, SettingError
from ridgefill.eval.arms import Arm

Span = tuple[int, int]
EXTRA = "pip install 'ridgefill[eval]'"


@dataclass(frozen=True)
class Context:
    """A prompt as lm-eval renders it, and its tokens.

    Attributes:
        text: chat form and answer prefix included.
        ids: [1, n], on the host.
        offsets: characters [first, stop) of each of the n tokens; equal for special ones.
    """

    text: str
    ids: Tensor
    offsets: Sequence[Span]

    def rows(self, first: int, stop: int) -> Span:
        """Rows [first, stop) of the tokens that hold characters [first, stop) of the text.

        Raises:
            PromptError: no token does.
        """
        inside = [i for i, (a, b) in enumerate(self.offsets) if a < stop and b > first and a < b]
        if not inside:
            raise PromptError(
                f"find characters {first} to {stop} of a prompt",
                "no token of it holds them",
                "use the model's own fast tokenizer",
            )
        return inside[0], inside[-1] + 1

    def rows_within(self, part: str, spans: Sequence[Span]) -> list[Span]:
        """As `rows`, for characters counted from the start of ``part``, a text that the prompt holds.

        Raises:
            PromptError: it does not hold it; a chat template may trim its ends, but no more.
        """
        bare = part.strip()
        at = self.text.find(bare)
        if at < 0:
            raise PromptError(
                "find a task's text in its prompt",
                "the chat template changes it, so nobody knows which rows hold what",
                "run without the chat template, or with one that leaves the text as it is",
            )
        at -= len(part) - len(part.lstrip())
        return [self.rows(at + first, at + stop) for first, stop in spans]


Heard = Callable[[Mapping[str, Any], Context, str, float], None]
Asked = Callable[[Mapping[str, Any], Context], Span | None]


def arm_lm(
    model: Any,
    tokenizer: Any,
    arm: Arm,
    *,
    question: Asked = lambda doc, context: None,
    heard: Heard = lambda doc, context, answer, seconds: None,
    rehearse: bool = False,
    **hflm: Any,
) -> Any:
    """An ``lm_eval.models.huggingface.HFLM`` around a loaded model, whose prompts the arm prefills.

    Requests run one at a time, in lm-eval's order. Prompts are never truncated.

    Args:
        tokenizer: a fast one.
        question: document and its prompt -> rows [first, stop) of the question, for selectors; None: the prompt ends
            with it.
        heard: called with document, prompt, answer and seconds as soon as an answer is there.
        rehearse: nothing is generated; every answer is "", so that prompts can be looked at before a run.
        hflm: settings of HFLM, such as ``chat_template_args``.

    Raises:
        SettingError: lm-eval is not installed, or a slow tokenizer.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise SettingError(
            "run lm-eval tasks with this tokenizer", "it gives no offsets", "use the model's fast tokenizer"
        )
    own = tokenizer
    if tokenizer.pad_token_id is None:
        own = copy.deepcopy(tokenizer)  # HFLM gives it a padding token
    with _unheard():
        lm = _arm_lm_class()(pretrained=model, tokenizer=own, batch_size=1, **hflm)
    lm.set_arm(arm, question, heard, rehearse)
    return lm


def run_tasks(
    lm: Any, folder: Path, names: Sequence[str], *, chat: bool = False, **settings: Any
) -> dict[str, list[dict[str, Any]]]:
    """Runs tasks whose YAML lies in ``folder`` through ``lm_eval.simple_evaluate``.

    Args:
        lm: from `arm_lm`.
        names: of the tasks.
        chat: prompts take the model's chat form; an answer's prefix then follows the assistant's header.
        settings: more of ``simple_evaluate``, such as ``system_instruction`` or ``gen_kwargs``.

    Returns:
        Task -> what ``log_samples`` logs of it, one entry a document.

    Raises:
        RidgeFillError: what `arm_lm` refuses, and whatever lm-eval does, by its words.
    """
    lm_eval = _lm_eval()
    from lm_eval.tasks import TaskManager

    given = {"log_samples": True, "bootstrap_iters": 0, "apply_chat_template": chat, **settings}
    try:
        with _unheard() as stderr:
            lm.stderr = stderr
            manager = TaskManager(include_path=str(folder), include_defaults=False)
            found = lm_eval.simple_evaluate(model=lm, tasks=list(names), task_manager=manager, **given)
    except RidgeFillError:
        raise
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise SettingError(
            f"run {', '.join(names)} through lm-eval",
            f"it refuses ({type(error).__name__}: {error})",
            "check the settings that were passed on to it",
        ) from error
    return found["samples"]


def _lm_eval() -> Any:
    try:
        import lm_eval
    except ImportError as error:
        raise SettingError("run tasks through lm-eval", "it is not installed", EXTRA) from error
    return lm_eval


@contextlib.contextmanager
def _unheard() -> Iterator[Any]:
    """lm-eval's and datasets' chatter is off; yields the stderr that was, for what the user should see."""
    log, stderr = logging.getLogger("lm_eval"), sys.stderr
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield stderr
    finally:
        log.setLevel(level)


@cache
def _arm_lm_class() -> Any:
    _lm_eval()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class ArmLM(HFLM):
        """HFLM whose ``model.generate`` is an arm's."""

        stderr: Any = None
        _speaker: Any = None

        def set_arm(self, arm: Arm, question: Asked, heard: Heard, rehearse: bool) -> None:
            self._arm, self._question, self._heard, self._rehearse = arm, question, heard, rehearse
            self._current: tuple[Context, Span | None] | None = None

        @property
        def model(self) -> Any:
            """The model; while an answer is generated, what stands in for it."""
            return super().model if self._speaker is None else self._speaker

        def context(self, text: str) -> Context:
            """The prompt's tokens, exactly those that HFLM runs, and where they lie in it."""
            ids, _ = self.tok_batch_encode([text])
            for extra in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
                coded = self.tokenizer(text, return_offsets_mapping=True, verbose=False, **extra)
                if coded["input_ids"] == ids[0].tolist():
                    return Context(text, ids, coded["offset_mapping"])
            raise PromptError(
                "find out which token is where", "lm-eval tokenises the prompt otherwise", "report this"
            )

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            back = contextlib.nullcontext()
            with back if self.stderr is None else contextlib.redirect_stderr(self.stderr):
                for request in requests:  # before anything runs
                    self._check_length(request)
                return [self._answer(request) for request in requests]

        def _check_length(self, request: Any) -> None:
            text, settings = request.args
            budget = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            n = self.tok_batch_encode([text])[0].shape[1]
            if n + budget > self.max_length:
                name = request.doc.get("item", f"{request.task_name} {request.doc_id}")
                raise PromptError(
                    f"run {name}, of {n} tokens and {budget} for the answer",
                    f"the model's context is {self.max_length} tokens",
                    "make a set of shorter samples, or load the model with its context extended",
                )

        def _answer(self, request: Any) -> str:
            context = self.context(request.args[0])
            self._current = context, self._question(request.doc, context)
            began = time.perf_counter()
            (answer,) = [""] if self._rehearse else super().generate_until([request], disable_tqdm=True)
            self._heard(request.doc, context, answer, time.perf_counter() - began)
            return answer

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
            if self._current is None or not torch.equal(context.cpu(), self._current[0].ids):
                raise PromptError("run a prompt with an arm", "lm-eval changed its tokens", "report this")
            self._speaker = _Speaker(self.model, self.tokenizer, self._arm, self._current[1])
            try:
                return super()._model_generate(context, max_length, stop, **kwargs)
            finally:
                self._speaker = None

    return ArmLM


@dataclass(frozen=True)
class _Speaker:
    """What HFLM calls ``generate`` of, in place of the model."""

    model: Any
    tokenizer: Any
    arm: Arm
    question: Span | None

    def generate(
        self, *, input_ids: Tensor, max_length: int, stopping_criteria: Any, **kwargs: Any
    ) -> Tensor:
        kwargs["max_new_tokens"] = max_length - input_ids.shape[1]  # an arm may shorten the prompt
        if self.arm.compact is not None:
            kwargs.pop("attention_mask", None)
            stopping_criteria = StoppingCriteriaList([_AfterPrompt(stopping_criteria)])
        return self.arm.generate(
            self.model,
            self.tokenizer,
            input_ids,
            question=self.question,
            stopping_criteria=stopping_criteria,
            **kwargs,
        )


class _AfterPrompt(StoppingCriteria):
    """lm-eval's criteria for a prompt that the arm has shortened: the answer begins earlier than they were told."""

    def __init__(self, criteria: Any) -> None:
        self.criteria, self.told = criteria, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if not self.told:
            for criterion in self.criteria:
                criterion.initial_decoder_input_length = input_ids.shape[1] - 1
            self.told = True
        return self.criteria(input_ids, scores, **kwargs)
