"""The prompt's text row by row: the text of every token, and the words that rows hold."""

from __future__ import annotations

import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

# Scripts written without spaces: each character counts as a word.
UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3040-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_UNREADABLE = "\ufffd"
_LONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how SentencePiece spells a byte
_LONGEST_CHARACTER = (
    16  # tokens looked at to complete a character; four bytes, and tokens that hold two halves
)


class Word(NamedTuple):
    """A word, case folded, and the rows [first, stop) that hold it."""

    text: str
    first: int
    stop: int


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token, [n], special tokens spelled out; together they are the decoded text.

    A character of several tokens stands whole in the first of them; the others are empty. Bytes that are no
    text show as U+FFFD. Nothing is assumed of the tokenizer but that a token's text does not depend on what
    stands two tokens before it, so that byte-level, SentencePiece and byte-fallback vocabularies all do.
    """
    if not ids:
        return []
    decode = _Decode(tokenizer)
    unique = sorted(set(ids))
    alone = dict(zip(unique, decode.each(unique), strict=True))
    names = tokenizer.convert_ids_to_tokens(unique)
    part = {i for i, name in zip(unique, names, strict=True) if _is_part(alone[i], name)}
    pieces = [alone[i] for i in ids]
    if ids[0] not in part:
        pieces[0] = decode(ids[:1], start=True)  # some tokenizers drop the text's first space
    for first, stop in _runs([i in part for i in ids]):
        pieces[first:stop] = _join_bytes(decode, ids[first:stop], start=first == 0)
    return pieces


class _Decode:
    """Decodes tokens as they stand inside a text, or at its start."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self.cut = len(self._text(self.anchor))

    def __call__(self, ids: Sequence[int], start: bool = False) -> str:
        return self._text(list(ids)) if start else self._text([*self.anchor, *ids])[self.cut :]

    def each(self, ids: Sequence[int]) -> list[str]:
        """The text of every token by itself."""
        texts = self.tokenizer.batch_decode(
            [[*self.anchor, i] for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return [text[self.cut :] for text in texts]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _is_part(text: str, name: str | None) -> bool:
    """Whether a token may hold a part of a character."""
    return _UNREADABLE in text or (name is not None and _LONE_BYTE.fullmatch(name) is not None)


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[first, stop) of every run of True."""
    at = 0
    for flag, run in groupby(flags):
        stop = at + sum(1 for _ in run)
        if flag:
            yield at, stop
        at = stop


def _join_bytes(decode: _Decode, ids: Sequence[int], start: bool) -> list[str]:
    """Pieces of a run of tokens that may be parts of characters: each character at its first token."""
    pieces: list[str] = []
    while (first := len(pieces)) < len(ids):
        for stop in range(first + 1, min(first + _LONGEST_CHARACTER, len(ids)) + 1):
            text = decode(ids[first:stop], start and first == 0)
            if not text.endswith(_UNREADABLE):
                break
        else:  # no text at all
            stop, text = first + 1, decode(ids[first : first + 1], start and first == 0)
        pieces += [text, *[""] * (stop - first - 1)]
    whole = decode(ids, start)
    if "".join(pieces) == whole:
        return pieces
    # Byte fallback reads a run with one bad byte as bad throughout, one sign a byte.
    return list(whole) if len(whole) == len(ids) else [whole, *[""] * (len(ids) - 1)]


def words(pieces: Sequence[str]) -> list[Word]:
    """The words of a text, in order: letters, digits and marks, an apostrophe within; no other punctuation.

    In scripts without spaces every character is a word.
    """
    starts = [0, *accumulate(map(len, pieces))][:-1]
    found = []
    for match in _word().finditer("".join(pieces)):
        first, stop = bisect_right(starts, match.start()) - 1, bisect_right(starts, match.end() - 1)
        while stop < len(pieces) and not pieces[stop]:  # the rest of a character
            stop += 1
        found.append(Word(match[0].casefold(), first, stop))
    return found


@cache
def _word() -> re.Pattern[str]:
    marks = [c for c in map(chr, range(0x300, sys.maxunicode >> 4)) if unicodedata.category(c)[0] == "M"]
    mark, letter = f"[{''.join(marks)}]", rf"[^\W_{UNSPACED}]"
    return re.compile(rf"[{UNSPACED}]{mark}*|{letter}(?:{letter}|{mark}|['’](?={letter}))*")
