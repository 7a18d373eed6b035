"""Rows of LongBench v2 as samples: four choices, zero-shot, with or without reasoning first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgefill.errors import CorpusError
from ridgefill.eval.longbench.fields import text
from ridgefill.eval.longbench.sample import REASONING, Sample
from ridgefill.eval.longbench.scorers import CHOICE

LETTERS = "ABCD"
ANSWER_TOKENS, REASONING_TOKENS = 128, 1024

_TEXT = "<text>\n$DOC$\n</text>"
_OMITTED = "The text is too long and omitted here."
_ASK = (
    "What is the correct answer to this question: $Q$\nChoices:\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$"
)
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_READ = "Please read the following text and answer the question{s} below."
_STEPS = "Let’s think step by step:"

DIRECT = f"{_READ.format(s='')}\n\n{_TEXT}\n\n{_ASK}\n\n{_FORMAT}"
REASONED = f"{_READ.format(s='s')}\n\n{_TEXT}\n\n{_ASK}\n\n{_STEPS}"
CONCLUDED = (
    f"{_READ.format(s='s')}\n\n{_OMITTED}\n\n{_ASK}\n\n{_STEPS} {REASONING}\n\n"
    f"Based on the above, what is the single, most likely answer choice? {_FORMAT}"
)


def sample_of(row: Mapping[str, Any], where: str, cot: bool = False) -> Sample:
    """One row of the official form.

    Its fields are _id, domain, difficulty, length, question, choice_A to choice_D, answer and context.

    Args:
        where: names the row in errors.
        cot: ask for reasoning first (1,024 tokens), then for the answer in a second prompt without the text.

    Raises:
        CorpusError: a field that is missing or no text, or an answer that is no letter from A to D.
    """
    marks = {"$DOC$": "context", "$Q$": "question", **{f"$C_{x}$": f"choice_{x}" for x in LETTERS}}
    parts = {mark: text(row, name, where).strip() for mark, name in marks.items()}
    answer, length = text(row, "answer", where), text(row, "length", where)
    if answer not in tuple(LETTERS):
        raise CorpusError(f"read {where}", f"its answer is {answer!r}", f"give one of {', '.join(LETTERS)}")
    return Sample(
        item=f"v2/{text(row, '_id', where)}",
        task="v2",
        stratum=length,
        prompt=_filled_in(REASONED if cot else DIRECT, parts),
        answers=(answer,),
        max_new_tokens=REASONING_TOKENS if cot else ANSWER_TOKENS,
        scorer=CHOICE,
        question=_filled_in(_ASK, parts),
        version=2,
        followup=_filled_in(CONCLUDED, parts) if cot else None,
        facts={
            "length_group": length,
            "difficulty": text(row, "difficulty", where),
            "domain": text(row, "domain", where),
        },
    )


def _filled_in(template: str, parts: Mapping[str, str]) -> str:
    for mark, part in parts.items():
        template = template.replace(mark, part)
    return template
