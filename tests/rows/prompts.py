"""Prompts and given attention for the tests of selectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ridgefill.rows.base import Prompt
from tests.tiny import tiny_tokenizer


@dataclass
class GivenAttention:
    """Attention that the test gives: late [layers, heads, m], and for each lower layer a table by last query row."""

    early: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    late: Tensor | None = None
    split: int = 8
    n_layers: int = 16
    attention_layers: tuple[int, ...] = tuple(range(16))
    asked: list[Any] = field(default_factory=list)

    def lower(self, layers: Sequence[int], queries: range) -> Tensor:
        self.asked.append((tuple(layers), queries))
        return torch.stack([self.early[i][queries.stop] for i in layers])

    def probe(self, queries: int) -> Tensor:
        self.asked.append(queries)
        assert self.late is not None
        return self.late


def rows_prompt(m: int, tail: int = 4, **more: Any) -> Prompt:
    """A prompt of m prefix rows without text."""
    return Prompt(torch.arange(m + tail) % 256, m, **more)


def text_prompt(prefix: str, tail: str, tokenizer: Any = None, **more: Any) -> Prompt:
    """A prompt whose prefix and tail are these texts; one token a byte, unless a tokenizer is given."""
    tokenizer = tokenizer or tiny_tokenizer()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, tail)]
    return Prompt(torch.tensor(ids[0] + ids[1]), len(ids[0]), tokenizer=tokenizer, **more)


def chosen_text(prompt: Prompt, chosen: Tensor) -> str:
    """The text of the chosen rows."""
    return "".join(p for p, c in zip(prompt.pieces, chosen.tolist(), strict=False) if c)


def sentencepiece_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Letters, these words, byte fallback and SentencePiece's spaces, the text's first one dropped in decoding."""
    letters = [chr(c) for c in range(0x21, 0x7F)]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters, *words]
    core = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return tokenizer
