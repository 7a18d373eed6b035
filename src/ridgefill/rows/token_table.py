"""What kind of text each token is and how often the calibration text holds it (paper 2.4, protected tokens).

The class of a token follows from its own surface form ``text``, leading space included, with t = text.strip()::

    t is empty                                      newline if text holds one, else space
    digits and ASCII punctuation, a digit at least  number
    ASCII punctuation only                          punct
    letters only                                    word-start if text begins with white space, else word-piece;
                                                    -cap if t begins with a capital
    anything else                                   mixed

A token that is no whole text (a part of a UTF-8 character) is mixed.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import SettingError

CLASSES = (
    "newline",
    "space",
    "number",
    "punct",
    "word-start",
    "word-start-cap",
    "word-piece",
    "word-piece-cap",
    "mixed",
)
ELIGIBLE = ("word-start-cap", "word-piece-cap", "word-piece", "mixed")  # lower-case word starts are not

_CODE = {name: code for code, name in enumerate(CLASSES)}
_PUNCTUATION = frozenset(string.punctuation)
_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells a byte
_SPACE = "\u2581"  # how SentencePiece spells a space


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Classes and calibration counts of a vocabulary of V tokens, on the host.

    Attributes:
        classes: [V] uint8, places in `CLASSES`.
        counts: [V] int64, occurrences in the calibration text.
        special: [V] bool, special and added tokens, and numbers that stand for no token.
    """

    classes: Tensor
    counts: Tensor
    special: Tensor

    @classmethod
    def of(cls, tokenizer: Any, counts: Tensor) -> TokenTable:
        """The table of a tokenizer's tokens.

        Args:
            tokenizer: a transformers tokenizer; tokens from V on are left out.
            counts: [V] occurrences of each token; V may exceed the tokenizer's own vocabulary.
        """
        n = len(counts)
        tokens = _tokens(tokenizer, n)
        special = torch.tensor([token is None for token in tokens], dtype=torch.bool)
        named = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        special[[number for number in named if 0 <= number < n]] = True
        texts = _surface(tokens, special.tolist())
        classes = torch.tensor([_CODE[token_class(text)] for text in texts], dtype=torch.uint8)
        return cls(classes, counts.to("cpu", torch.int64), special)

    @property
    def total(self) -> int:
        """Tokens of the calibration text."""
        return int(self.counts.sum())

    def rarity(self, ids: Tensor) -> Tensor:
        """[n] fp32: -ln of the add-one unigram frequency, (count + 1) / (total + V), of token ids [n].

        Raises:
            SettingError: an id outside the table.
        """
        counts = self.counts[self._checked(ids)].double()
        return -((counts + 1) / (self.total + len(self.counts))).log().float()

    def eligible(self, ids: Tensor) -> Tensor:
        """[n] bool: whether token ids [n] are of a class worth protecting; special and added tokens never are.

        Raises:
            SettingError: an id outside the table.
        """
        ids = self._checked(ids)
        kinds = torch.tensor([_CODE[name] for name in ELIGIBLE], dtype=torch.uint8)
        return torch.isin(self.classes[ids], kinds) & ~self.special[ids]

    def tensors(self) -> dict[str, Tensor]:
        """The table's tensors by name, as a file holds them."""
        return {"classes": self.classes, "counts": self.counts, "special": self.special}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> TokenTable:
        """Reads `tensors`.

        Raises:
            KeyError: one is missing.
            ValueError: they are no table: other dtypes, other lengths, or a class that is not known.
        """
        classes, counts, special = (tensors[name] for name in ("classes", "counts", "special"))
        dtypes = (classes.dtype, counts.dtype, special.dtype)
        if dtypes != (torch.uint8, torch.int64, torch.bool):
            raise ValueError(f"a token table of dtypes {dtypes}")
        if not (classes.ndim == 1 and classes.shape == counts.shape == special.shape):
            raise ValueError("a token table whose columns differ in length")
        if len(classes) and (int(classes.max()) >= len(CLASSES) or int(counts.min()) < 0):
            raise ValueError("a token table with a class or a count that cannot be")
        return cls(classes, counts, special)

    def _checked(self, ids: Tensor) -> Tensor:
        """``ids`` as indices on the host."""
        ids = ids.to("cpu", torch.long)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.classes):
            raise SettingError(
                f"look up token ids from {int(ids.min())} to {int(ids.max())}",
                f"the token table was made for a vocabulary of {len(self.classes)}",
                "use maps that were fitted with this model's tokenizer",
            )
        return ids


def token_class(text: str | None) -> str:
    """The class of a token of surface form ``text``, its leading space included; None for what is no text.

    >>> [token_class(text) for text in (" The", "ing", " 3.5", "),", " \\n", "v2")]
    ['word-start-cap', 'word-piece', 'number', 'punct', 'newline', 'mixed']
    """
    if text is None:
        return "mixed"
    stripped = text.strip()
    if not stripped:
        return "newline" if "\n" in text else "space"
    if all(c in _PUNCTUATION for c in stripped):
        return "punct"
    if all(c.isdigit() or c in _PUNCTUATION for c in stripped):
        return "number"
    if not stripped.isalpha():
        return "mixed"
    start = "word-start" if text[0] in " \t\n" else "word-piece"
    return f"{start}-cap" if stripped[0].isupper() else start


def _tokens(tokenizer: Any, n: int) -> list[str | None]:
    """Tokens 0 .. n-1 as the vocabulary spells them; None where there is none."""
    tokens: list[str | None] = [None] * n
    for token, number in tokenizer.get_vocab().items():
        if 0 <= number < n:
            tokens[number] = token
    return tokens


def _surface(tokens: Sequence[str | None], special: Sequence[bool]) -> list[str | None]:
    """The tokens' own texts, or None for one that is no whole text."""
    alphabet = _byte_alphabet()
    ordinary = [token for token, apart in zip(tokens, special, strict=True) if token and not apart]
    foreign = sum(not alphabet.keys() >= set(token) for token in ordinary)
    # A byte-level vocabulary is spelled in its 256 letters; any other has its spaces (or letters) outside them.
    if foreign <= len(ordinary) // 100:
        return [None if token is None else _from_bytes(token, alphabet) for token in tokens]
    return [None if token is None else _from_pieces(token) for token in tokens]


def _from_bytes(token: str, alphabet: dict[str, int]) -> str | None:
    try:
        return bytes(alphabet[c] for c in token).decode("utf-8")
    except KeyError:  # an added token stands for itself
        return token
    except UnicodeDecodeError:
        return None


def _from_pieces(token: str) -> str | None:
    if match := _LONE_BYTE.fullmatch(token):
        byte = int(match[1], 16)
        return chr(byte) if byte < 0x80 else None
    return token.replace(_SPACE, " ")


def _byte_alphabet() -> dict[str, int]:
    """letter -> byte of byte-level BPE: printable Latin-1 stands for itself, the others for letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
