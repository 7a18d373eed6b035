"""Asks every arm every sample (paper 4.6, 6.2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ridgefill.devices import wait
from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.longbench.prompts import Prepared, Prompter
from ridgefill.eval.longbench.sample import REASONING, Sample
from ridgefill.eval.longbench.scorers import CHOICE, check_scorers, extract_choice, score
from ridgefill.eval.longbench.v2 import ANSWER_TOKENS
from ridgefill.eval.results import Run


def measure_longbench(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    samples: Sequence[Sample],
    run: Run,
    *,
    max_length: int | None = None,
    chat: bool | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Greedy answers of every arm to every sample, scored; the metric is ``score``, from 0 to 1.

    An item's facts are ``length`` (tokens of the prompt), ``answer``, ``seconds``, ``truncated``, ``fills`` (whether
    the prompt was long enough for the arm's plan; shorter ones run exactly; absent for arms that shorten prompts),
    ``length_group``, and for v2 ``difficulty``, ``domain``, ``choice`` (the letter, or null) and, with reasoning,
    ``reasoning``. An empty answer counts as a wrong one; the official code of v2 leaves it out, for there it means
    that the server failed. Official v2 samples at temperature 0.1.

    Args:
        samples: of v1, v2 or both.
        max_length: tokens to which prompts are cut before their chat form; None: as the context allows.
        chat: chat form for every task or for none; None: for those that the official code gives it.
        tick: called once for every arm and sample.

    Raises:
        CorpusError: no samples, one twice, or an arm for which every sample is too short to fill a row.
        PromptError: a sample does not fit the model's context.
        SettingError: a max_length below 2, or a scorer's packages are not installed.
    """
    if max_length is not None and max_length < 2:
        raise SettingError(f"prompts cut to {max_length} tokens", "two halves need two", "give 2 or more")
    config = model.config.get_text_config()
    prompter = Prompter(tokenizer, getattr(config, "max_position_embeddings", None), max_length, chat)
    check_scorers(samples)
    _check_samples(samples)
    _check_filled(prompter, arms, samples)
    for sample in samples:
        missing = [arm for arm in arms if not run.done(arm.name, sample.item)]
        prepared = prompter.prepare(sample) if missing else None
        for arm in arms:
            if prepared is not None and arm in missing:
                _ask(model, prompter, arm, sample, prepared, run)
            tick()


def _ask(model: Any, prompter: Prompter, arm: Arm, sample: Sample, prepared: Prepared, run: Run) -> None:
    start = time.perf_counter()
    facts = dict(sample.facts)
    answer = _answer(model, prompter.tokenizer, arm, sample, prepared, sample.max_new_tokens)
    if sample.followup is not None:
        facts["reasoning"] = answer.strip()
        prompt = sample.followup.replace(REASONING, facts["reasoning"])
        second = prompter.conclude(sample, prompt, ANSWER_TOKENS)
        answer = _answer(model, prompter.tokenizer, arm, sample, second, ANSWER_TOKENS)
    seconds = time.perf_counter() - start
    if sample.scorer == CHOICE:
        facts["choice"] = extract_choice(answer)
    n = prepared.ids.shape[1]
    if arm.compact is None:
        facts["fills"] = _fills(arm, n)
    run.add(
        arm.name,
        sample.item,
        sample.stratum,
        {"score": score(sample, answer)},
        length=n,
        answer=answer,
        seconds=seconds,
        truncated=prepared.truncated,
        **facts,
    )


def _answer(
    model: Any, tokenizer: Any, arm: Arm, sample: Sample, prompt: Prepared, max_new_tokens: int
) -> str:
    """The text after the prompt, without special tokens."""
    stops: dict[str, Any] = {}
    if sample.newline_stops:  # models that saw examples go on with the next one
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
        ends = [t for t in (tokenizer.eos_token_id, newline) if t is not None]
        stops = {"min_new_tokens": 1, "eos_token_id": ends}
    out = arm.generate(
        model, tokenizer, prompt.ids, question=prompt.question, max_new_tokens=max_new_tokens, **stops
    )
    wait(model.device)
    return tokenizer.decode(out[0, prompt.ids.shape[1] :], skip_special_tokens=True)


def _fills(arm: Arm, n: int) -> bool:
    plan = arm.plan(n)
    return not plan.fill_is_exact and n >= plan.shortest


def _check_samples(samples: Sequence[Sample]) -> None:
    if not samples:
        raise CorpusError("ask LongBench", "there is no sample", "name a file or tasks that hold some")
    item, times = Counter(sample.item for sample in samples).most_common(1)[0]
    if times > 1:
        raise CorpusError(
            f"ask LongBench's {item}",
            f"{times} samples have that name",
            "leave the doubled file or line out",
        )


def _check_filled(prompter: Prompter, arms: Sequence[Arm], samples: Sequence[Sample]) -> None:
    """Raises CorpusError for an arm that would run every sample exactly: its figures would be the exact model's."""
    left = [arm for arm in arms if arm.compact is None and not arm.is_exact]
    longest = 0
    for sample in samples:
        if not left:
            return
        n = prompter.prepare(sample).ids.shape[1]
        longest = max(longest, n)
        left = [arm for arm in left if not _fills(arm, n)]
    if left:
        raise CorpusError(
            f"measure the arm {left[0].name!r} on these samples",
            f"none has a row to fill: the longest is {longest} tokens, "
            f"and the arm needs {left[0].plan(longest).shortest}",
            "give the arm a shorter tail, or name longer samples",
        )
