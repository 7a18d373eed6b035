"""A prompt as the model expects it, and its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        text: without the prompt and without special tokens.
        tokens: how many were generated.
        first_token_seconds: from the call to the first token.
        seconds: from the call to the last.
    """

    text: str
    tokens: int
    first_token_seconds: float
    seconds: float


class _Clock(BaseStreamer):
    """Notes when the first token comes; passes tokens on to another streamer."""

    def __init__(self, then: TextStreamer | None) -> None:
        self.then, self._prompt_seen = then, False
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        if self._prompt_seen and self.first is None:
            self.first = time.perf_counter()
        self._prompt_seen = True  # `generate` puts the prompt itself first
        if self.then is not None:
            self.then.put(value)

    def end(self) -> None:
        if self.then is not None:
            self.then.end()


def as_prompt(tokenizer: Any, text: str) -> str:
    """``text`` as a user message in the model's chat form, up to the answer; unchanged if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return text
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def prompt_ids(tokenizer: Any, text: str, *, chat: bool = True) -> Tensor:
    """Token ids [1, n] of ``text``, in the model's chat form where ``chat`` and the tokenizer has one."""
    formed = chat and bool(
        getattr(tokenizer, "chat_template", None)
    )  # the form brings its own special tokens
    prompt = as_prompt(tokenizer, text) if formed else text
    return tokenizer(prompt, return_tensors="pt", add_special_tokens=not formed)["input_ids"]


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, ids: Tensor, *, max_new_tokens: int = 128, stream: bool = False
) -> Answer:
    """Generates greedily from ids [1, n]; fills if called within ``filling``.

    Args:
        stream: print the text as it comes.
    """
    ids = ids.to(model.device)
    printer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    clock = _Clock(printer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        streamer=clock,
    )
    end = time.perf_counter()
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return Answer(text, len(new), (clock.first or end) - start, end - start)
