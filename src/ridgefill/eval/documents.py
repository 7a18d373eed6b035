"""Held-out documents of a wanted length, from the texts that users name."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import CorpusError
from ridgefill.fit.corpus import Source, Text, read_sources


def held_out_documents(
    tokenizer: Any,
    texts: Sequence[str | Path],
    tokens: int,
    count: int,
    *,
    fitted: Collection[str] = (),
    seed: int = 0,
) -> list[Tensor]:
    """Draws documents of exactly ``tokens`` tokens, from each text in turn.

    Short documents of one text are joined until they are long enough; what maps were fitted on is left out.

    Args:
        texts: as `ridgefill.fit` takes them.
        tokens: length of each.
        count: how many at most.
        fitted: digests (`digest`) of documents to leave out.

    Returns:
        [1, tokens] each; at least one.

    Raises:
        CorpusError: unreadable text, or not one document's worth of it left.
    """
    streams = [_long(tokenizer, source, tokens, fitted, seed) for source in read_sources(texts)]
    found: list[Tensor] = []
    while streams and len(found) < count:
        for stream in list(streams):
            ids = next(stream, None)
            if ids is None:
                streams.remove(stream)
            elif len(found) < count:
                found.append(ids)
    if not found:
        raise CorpusError(
            f"draw a document of {tokens} tokens",
            "the text has no such stretch" + (" that the maps were not fitted on" if fitted else ""),
            "name more text, or a shorter --tail",
        )
    return found


def read_whole(paths: Sequence[str | Path]) -> list[str]:
    """Every document of the named texts, whole; a chat as its messages, one after the other.

    Raises:
        CorpusError: unreadable text.
    """
    loaded = [document.load() for source in read_sources(paths) for document in source.documents]
    return [t if isinstance(t, str) else "\n".join(m["content"] for m in t) for t in loaded]


def digest(text: str) -> str:
    """Names a document's text: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _long(
    tokenizer: Any, source: Source, tokens: int, fitted: Collection[str], seed: int
) -> Iterator[Tensor]:
    documents = list(source.documents)
    random.Random(f"{seed} {source.name}").shuffle(documents)
    joined: list[str] = []
    length = 0
    for document in documents:
        loaded = document.load()
        if any(digest(form) in fitted for form in _as_fitted(tokenizer, loaded)):
            continue
        text = loaded if isinstance(loaded, str) else "\n\n".join(m["content"] for m in loaded)
        joined.append(text)
        length += len(text)
        if length < 2 * tokens:  # no tokenizer makes a token of less than two characters of prose
            continue
        ids = tokenizer("\n\n".join(joined), return_tensors="pt", truncation=True, max_length=tokens)
        if ids["input_ids"].shape[1] >= tokens:
            yield ids["input_ids"].to(torch.long)
            joined, length = [], 0


def _as_fitted(tokenizer: Any, text: Text) -> Iterator[str]:
    """The forms in which the fit (`fit.windows.Cutter`) may have read a document, and named it by."""
    if isinstance(text, str):
        yield text
        return
    yield "\n\n".join(f"{m['role']}: {m['content']}" for m in text)
    with contextlib.suppress(Exception):  # no template, or one that refuses these messages
        yield tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=False)
