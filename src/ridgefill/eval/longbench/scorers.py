"""Official scorers of LongBench v1 and v2. Those that lm-eval has unchanged are imported from it."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.eval.longbench.sample import Sample

CHOICE = "choice"  # v2
Scorer = Callable[..., float]

_METRICS = "lm_eval.tasks.longbench.metrics"
_COMMENT = ("`", "#", "//")
_SAID = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def score(sample: Sample, answer: str) -> float:
    """How well ``answer`` matches the best of the sample's true answers, from 0 to 1.

    Raises:
        SettingError: the packages that the scorer needs are not installed.
    """
    if sample.scorer == CHOICE:
        return float(extract_choice(answer) == sample.answers[0])
    if sample.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    one = scorer(sample.scorer)
    return max(float(one(answer, truth, all_classes=list(sample.classes))) for truth in sample.answers)


def extract_choice(answer: str) -> str | None:
    """The letter in "The correct answer is (X)", else without brackets, asterisks left out; None without either."""
    plain = answer.replace("*", "")
    found = next(filter(None, (said.search(plain) for said in _SAID)), None)
    return None if found is None else found[1]


def code_similarity(answer: str, truth: str, **unused: Any) -> float:
    """Edit similarity of the answer's first line that is no comment and no fence, in whole hundredths.

    lm-eval's also skips empty lines, which the official one does not.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in _COMMENT)), "")
    return round(100 * SequenceMatcher(None, line, truth).ratio()) / 100  # as fuzzywuzzy computes its ratio


def scorer(name: str) -> Scorer:
    """A v1 scorer: (answer, truth, all_classes=...) -> 0 to 1.

    Raises:
        SettingError: the packages that it needs are not installed.
    """
    return code_similarity if name == "code_sim" else getattr(_metrics(), f"{name}_score")


def check_scorers(samples: Sequence[Sample]) -> None:
    """Finds out before a run, not after its first answer, whether every scorer can be had.

    Raises:
        SettingError: the packages that one needs are not installed.
    """
    for name in {sample.scorer for sample in samples} - {CHOICE}:
        scorer(name)


def _metrics() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fuzzywuzzy, which is not used: code is compared here
            found = importlib.import_module(_METRICS)
        importlib.import_module("jieba").setLogLevel(logging.WARNING)  # it reports its dictionary otherwise
        return found
    except ImportError as error:
        raise SettingError(
            "score LongBench v1",
            "its scorers are in lm-eval, and that or one of rouge, jieba and fuzzywuzzy is not installed",
            'pip install "lm-eval[longbench]"; LongBench v2 and the code tasks need none of them',
        ) from error
