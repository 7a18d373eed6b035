"""Token windows drawn from documents, and the documents' parting into fit and held-out ones (paper 2.2).

`draw_windows` serves the fit and evaluation alike; `plan_windows` is the fit's own.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import CorpusError
from ridgefill.fit.corpus import Document, Source, Text

WINDOWS_A_VISIT = 4  # windows taken from a document before the next one's turn: keeps the mix broad
MIN_WINDOW_ROWS = 64  # rows a window must have beyond its leading ones
ROWS_NEEDED, ROWS_WANTED = 2, 10  # fit rows per column of the map: at least, and for maps that carry over


@dataclass(frozen=True, eq=False)
class Window:
    """A run of token ids [m] (int32) from one document.

    Attributes:
        source: index of its source.
        document: name of its document, for messages.
        digest: sha256 of the document's text.
        chat: wrapped as a user message.
    """

    ids: Tensor
    source: int
    document: str
    digest: str
    chat: bool


@dataclass(frozen=True)
class Plan:
    """Windows to fit on and windows held out; no document is in both."""

    fit: list[Window]
    heldout: list[Window]
    sources: list[dict[str, Any]]
    documents_sha256: str
    tokens_sha256: str

    def rows(self, leading: int) -> int:
        """Rows that enter the moments."""
        return sum(len(w.ids) - leading for w in self.fit)


class Cutter:
    """Cuts documents into token windows, in an order that only the seed decides.

    Args:
        tokenizer: a transformers tokenizer.
        length: tokens of a window at most.
        shortest: tokens of a window at least; shorter ones are dropped.
        chat_share: share of the windows wrapped as a user message, if the tokenizer has a chat template.
    """

    def __init__(
        self, tokenizer: Any, *, length: int, shortest: int, chat_share: float = 0.0, seed: int = 0
    ) -> None:
        self.tokenizer, self.length, self.shortest, self.seed = tokenizer, length, shortest, seed
        bare, whole = self._ids("a"), tokenizer("a")["input_ids"]
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        self.prefix: list[int] = whole[: starts[0]] if starts else []  # what opens a prompt, such as <s>
        self.overhead = self._template_overhead()
        self.chat_share = chat_share if self.overhead is not None else 0.0

    def windows(self, document: Document, source: int) -> Iterator[Window]:
        """All windows of a document, lazily: a span of its text is tokenised when it is reached."""
        rng = random.Random(f"{self.seed}/{source}/{document.name}")
        text = document.load()
        plain = self._plain(text)
        named = plain if document.whole is None else self._plain(document.whole())
        digest = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()
        # 16 characters a token of the window is about four windows of English.
        spans = _spans(plain, 16 * self.length)
        rng.shuffle(spans)
        for start, end in spans:
            ids = self._ids(plain[start:end])
            ids = ids[len(self.prefix) :] if self.prefix and ids[: len(self.prefix)] == self.prefix else ids
            body = self.length - len(self.prefix)
            for at in range(0, len(ids), body):
                chat = isinstance(text, str) and rng.random() < self.chat_share
                cut = self._wrap(ids[at : at + body]) if chat else self.prefix + ids[at : at + body]
                if len(cut) >= self.shortest:
                    yield Window(torch.tensor(cut, dtype=torch.int32), source, document.name, digest, chat)

    def _plain(self, text: Text) -> str:
        return text if isinstance(text, str) else self._render(text)

    def _ids(self, text: str) -> list[int]:
        # verbose=False: a document longer than the model's context is no mistake here, it is cut next
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _template_overhead(self) -> int | None:
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        try:
            overhead = len(self._ids(self._template([{"role": "user", "content": "a"}])))
        except Exception:  # a template may raise anything: it is the model author's program
            return None
        return overhead if overhead + self.shortest <= self.length else None

    def _template(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)

    def _wrap(self, ids: list[int]) -> list[int]:
        room = self.length - (self.overhead or 0)
        content = self.tokenizer.decode(ids[:room], skip_special_tokens=True)
        wrapped = self._ids(self._template([{"role": "user", "content": content}]))
        return wrapped[: self.length]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            if self.overhead is not None:
                return self._template(messages, answer=False)
        except Exception:  # such as two user messages in a row, which some templates refuse
            pass
        return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _spans(text: str, size: int) -> list[tuple[int, int]]:
    """Cuts ``text`` into spans of about ``size`` characters that end at white space where it is near."""
    spans, start = [], 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            near = re.search(r"\s", text[end : end + 200])
            end += near.end() if near else 0
        spans.append((start, end))
        start = end
    return spans


def draw_windows(sources: Sequence[Source], cutter: Cutter, tokens: int) -> Iterator[Window]:
    """Windows of ``tokens`` tokens in all, every source having an equal share while it lasts.

    Within a source the documents come in a seeded order, at most `WINDOWS_A_VISIT` windows of one before
    the next one's turn; only documents whose turn comes are read.
    """
    streams = {i: _round_robin(s.documents, cutter, i) for i, s in enumerate(sources)}
    used = dict.fromkeys(streams, 0)
    left = tokens
    while streams and left >= cutter.shortest:
        at = min(streams, key=lambda i: (used[i], i))
        window = next(streams[at], None)
        if window is None:
            del streams[at]
            continue
        window = replace(window, ids=window.ids[:left])
        used[at] += len(window.ids)
        left -= len(window.ids)
        yield window


def _round_robin(documents: Sequence[Document], cutter: Cutter, source: int) -> Iterator[Window]:
    order = list(documents)
    random.Random(f"{cutter.seed}/{source}/order").shuffle(order)
    waiting = deque(cutter.windows(d, source) for d in order)
    while waiting:
        document = waiting.popleft()
        taken = 0
        for window in islice(document, WINDOWS_A_VISIT):
            taken += 1
            yield window
        if taken == WINDOWS_A_VISIT:
            waiting.append(document)


# --- planning -------------------------------------------------------------------------------------------


def plan_windows(
    sources: Sequence[Source],
    cutter: Cutter,
    *,
    tokens: int,
    holdout: float,
    leading: int,
    width: int,
    blocks: int = 1,
) -> Plan:
    """The windows of one fit.

    Args:
        tokens: budget in tokens; a share ``holdout`` of it is held out.
        holdout: share of every source's documents that is kept apart, one document in all at least.
        leading: rows of each window that stay out of the fit.
        width: columns of what is read, which decides how many rows are too few.
        blocks: how many states these columns are of: with several, maps that read one need fewer rows.

    Raises:
        CorpusError: too little text, saying how many rows there are and how many it takes.
    """
    apart = _hold_out(sources, cutter, holdout)
    # One short window still has to fit into a small budget.
    heldout_tokens = max(round(holdout * tokens), cutter.shortest)
    heldout = list(draw_windows([replace(s, documents=h) for s, (_, h) in apart], cutter, heldout_tokens))
    fitted = [replace(s, documents=f) for s, (f, _) in apart]
    fit = list(draw_windows(fitted, cutter, tokens - heldout_tokens))
    plan = Plan(fit, heldout, _account(sources, fit, heldout), *_digests(fit, heldout))
    _refuse_too_little(plan, tokens, leading, width, blocks, cutter.shortest)
    return plan


def _hold_out(
    sources: Sequence[Source], cutter: Cutter, holdout: float
) -> list[tuple[Source, tuple[tuple[Document, ...], tuple[Document, ...]]]]:
    """Every source with its (fit, held-out) documents."""
    apart = []
    counts = []
    for at, source in enumerate(sources):
        # A document too short for a window would leave nothing to score on: draw from the others.
        long = [d for d in source.documents if d.chars >= 6 * cutter.shortest] or list(source.documents)
        random.Random(f"{cutter.seed}/{at}/heldout").shuffle(long)
        apart.append(long)
        counts.append(min(round(holdout * len(long)), len(source.documents) - 1))
    if not any(counts):
        at = max(range(len(sources)), key=lambda i: len(apart[i]))
        counts[at] = min(1, len(sources[at].documents) - 1)
    if not any(counts):  # every source is one document: part each, rather than lose a source
        return [(s, _part(s.documents[0], holdout)) for s in sources]
    parted = []
    for source, long, count in zip(sources, apart, counts, strict=True):
        held = {id(d) for d in long[:count]}
        fit = tuple(d for d in source.documents if id(d) not in held)
        parted.append((source, (fit, tuple(long[:count]))))
    return parted


def _part(document: Document, holdout: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """The one document of a source as two: its beginning to fit on, its end held out."""
    at = round((1 - holdout) * document.chars)

    def half(name: str, piece: slice, chars: int) -> Document:
        def load() -> str:
            text = document.load()
            plain = text if isinstance(text, str) else "\n\n".join(m["content"] for m in text)
            return plain[piece]

        return Document(f"{document.name} ({name})", chars, load, whole=document.load)

    first = half("beginning", slice(0, at), at)
    return (first,), (half("end", slice(at, None), document.chars - at),)


def _account(sources: Sequence[Source], fit: list[Window], heldout: list[Window]) -> list[dict[str, Any]]:
    lines = []
    for at, source in enumerate(sources):
        line: dict[str, Any] = {"name": source.name, "kind": source.kind}
        line |= {"documents": len(source.documents), "skipped_files": source.skipped}
        for name, windows in (("fit", fit), ("heldout", heldout)):
            mine = [w for w in windows if w.source == at]
            line[name] = {
                "documents": len({w.digest for w in mine}),
                "windows": len(mine),
                "chat_windows": sum(w.chat for w in mine),
                "tokens": sum(len(w.ids) for w in mine),
            }
        lines.append(line)
    return lines


def _digests(fit: list[Window], heldout: list[Window]) -> tuple[str, str]:
    """sha256 over the used documents' own sha256 (sorted), and over every window's tokens in order."""
    names = sorted({w.digest for w in fit} | {w.digest for w in heldout})
    tokens = hashlib.sha256()
    for windows in (fit, heldout):
        tokens.update(f"{len(windows)} windows\n".encode())
        for window in windows:
            tokens.update(f"{len(window.ids)}\n".encode() + window.ids.numpy().tobytes())
    return hashlib.sha256("\n".join(names).encode()).hexdigest(), tokens.hexdigest()


def _refuse_too_little(plan: Plan, tokens: int, leading: int, width: int, blocks: int, shortest: int) -> None:
    rows, needed = plan.rows(leading), ROWS_NEEDED * width
    if rows < needed:
        spent = sum(len(w.ids) for w in plan.fit + plan.heldout)
        raise CorpusError(
            f"fit maps of width {width}",
            f"the text is too short for the split: it gives {rows} rows to fit on, and {needed} are the "
            f"least ({ROWS_WANTED * width} are better)",
            ("raise the token budget" if spent >= tokens - 2 * shortest else "name more text")
            + (", or fit maps that read one state (form 'direct' or 'plain')" if blocks > 1 else ""),
        )
    if not plan.heldout:
        raise CorpusError(
            "choose the penalty on held-out text",
            f"the held-out documents give no window of {shortest} tokens",
            "name more or longer documents, or raise the held-out share",
        )
