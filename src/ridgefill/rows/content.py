"""Content rows: text that somebody wrote, without control tokens and the chat template's own words."""

from __future__ import annotations

import re
from typing import Any

import torch

from ridgefill.rows.base import Prompt
from ridgefill.rows.special import control_ids, special_ids
from ridgefill.rows.text import Word, words

_MARKS = ("Ridgefillmarka", "Ridgefillmarkb", "Ridgefillmarkc")
_ROLES = (("user", "assistant", "user"), ("system", "user"), ("user",))


def content_rows(prompt: Prompt) -> list[bool]:
    """Whether each row [n] is content.

    The template's words are found by rendering it around marks: what stands between two messages is its own.

    Raises:
        SettingError: there is no tokenizer.
    """
    pieces = prompt.pieces
    control = torch.tensor(sorted(control_ids(prompt.tokenizer)), dtype=torch.long)
    content = (~torch.isin(prompt.ids.cpu(), control)).tolist()
    if not (own := _template_texts(prompt.tokenizer)):
        return content
    own_text = re.compile("|".join(map(re.escape, sorted(own, key=len, reverse=True))))
    spans = [match.span() for match in own_text.finditer("".join(pieces))]
    at, place = 0, 0
    for first, stop in spans:
        while at < len(pieces) and place + len(pieces[at]) <= first:
            place += len(pieces[at])
            at += 1
        row, start = at, place
        while row < len(pieces) and start < stop:
            content[row] = False
            start += len(pieces[row])
            row += 1
    return content


def content_words(prompt: Prompt) -> list[Word]:
    """The words of the content rows of the whole prompt, in order."""
    kept = zip(prompt.pieces, content_rows(prompt), strict=True)
    return words([piece if content else "\n" for piece, content in kept])


def question_rows(prompt: Prompt, window: int, hidden: bool) -> set[int]:
    """The last ``window`` content rows of the question, or of the prompt; of what is before it, if it is hidden.

    Raises:
        SettingError: no tokenizer, or no question to hide.
    """
    content = content_rows(prompt)
    rows = [i for i in prompt.queries(prompt.n, hidden) if content[i]]
    return set(rows[-window:])


def _template_texts(tokenizer: Any) -> set[str]:
    """What the chat template writes around messages, cut at control tokens; blanks left out."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    names = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    texts: set[str] = set()
    for roles in _ROLES:
        rendered = _render(tokenizer, roles)
        own = re.split("|".join(_MARKS), rendered) if rendered else []
        for text in own:
            inside = [name for name in names if name and name in text]
            cut = f"(?={'|'.join(map(re.escape, inside))})" if inside else "(?!)"
            texts.update(part for part in re.split(cut, text) if re.search(r"\w", part))
    return texts


def _render(tokenizer: Any, roles: tuple[str, ...]) -> str | None:
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program, and may refuse a role in any way it likes
        return None
