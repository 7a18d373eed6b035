"""The loss on tokens that need the prefix, of every arm on the same tokens (paper 3.1, 3.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import BASELINE, Arm
from ridgefill.eval.documents import held_out_documents
from ridgefill.eval.loss import (
    SCORED,
    Scores,
    arm_outputs,
    check_length,
    nats,
    run_rows,
    score,
    scored_outputs,
    scored_plan,
)
from ridgefill.eval.masks import RISE, RUN, key, novel
from ridgefill.eval.results import Run
from ridgefill.fill import Exact
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan
from ridgefill.prefill import check_prompt

CONTEXT = 4096
STRIDE = 512


@dataclass(frozen=True, eq=False)
class Document:
    """One text to score.

    Attributes:
        item: its name, of its own in a run.
        stratum: the kind of text.
        ids: [1, n].

    Raises:
        PromptError: ids of another shape, or empty.
    """

    item: str
    stratum: str
    ids: Tensor

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape[0] != 1 or self.ids.numel() == 0:
            raise PromptError(
                f"document {self.item} of shape {tuple(self.ids.shape)}",
                "it is not one sequence of tokens",
                "give its ids as [1, n]",
            )


@dataclass(frozen=True)
class _Settings:
    """What decides which tokens are scored, and into which sets they fall."""

    tail: int
    scored: int
    context: int
    run_length: int
    rise: float
    stride: int

    def __post_init__(self) -> None:
        for name, least in {"tail": 2, "scored": 1, "context": 1, "run_length": 1, "stride": 1}.items():
            if asdict(self)[name] < least:
                raise SettingError(
                    f"{name}={asdict(self)[name]}", "it counts tokens", f"give {name}={least} or more"
                )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A document's scored tokens, k = tail - 1 of them.

    Attributes:
        novel: [k] bool.
        key: [k] bool, or None where the document is too short to be cut.
    """

    novel: Tensor
    key: Tensor | None


def measure_losses(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    documents: Sequence[Document],
    run: Run,
    *,
    tail: int,
    scored: int = SCORED,
    context: int = CONTEXT,
    run_length: int = RUN,
    rise: float = RISE,
    stride: int = STRIDE,
    tick: Callable[[], None] = lambda: None,
    kept: dict[str, Tensor] | None = None,
) -> None:
    """Scores every arm on the last ``tail`` - 1 tokens of every document, and keeps the results in ``run``.

    Metrics, nats per token of the arm itself: ``nll`` over all scored tokens, ``nll_first`` and ``nll_last`` over the
    first and the last ``scored`` of them (which overlap where there are fewer than twice as many), ``novel_nll``,
    ``novel_nll_first`` and ``novel_nll_last`` over the novel tokens among these, ``key_nll`` over the key tokens;
    ``kl``, the mean KL(exact || arm), and ``top1``, the share of rows with exact's most likely token. A metric whose
    tokens a document lacks is left out.

    Facts: ``length`` of the document, ``tokens`` scored, and how many of them are ``novel`` and ``key``. Key tokens
    are found once, from the exact arm, whose item holds their places in the document (``key_tokens``); a run that
    goes on takes them from there. A document has none of this where its first scored token has no more than
    ``context`` tokens before it: there is nothing to cut.

    Args:
        tail: T of the arms compared; arms with another tail are scored on the same tokens (`scored_plan`).
        context: what the exact model keeps of a token's context to see whether the rest helped.
        run_length: tokens in a run that a token must not be copied with to be novel.
        rise: nats by which a key token's exact loss rises, at least.
        stride: tokens whose context is cut together (`cut_nll`).
        tick: called once for every arm and document, those that were done before included.
        kept: item -> exact's last-layer outputs [1, tail - 1, W], which callers that measure arm after arm hand in
            each time, so that exact does not run again for each; filled here. Of one model, tail and documents.

    Raises:
        PromptError: a document is too short for an arm, or longer than the model's context; before anything runs.
        SettingError: a setting is out of range, or two documents have one name.
    """
    settings = _Settings(tail, scored, context, run_length, rise, stride)
    decoder = Decoder(model)
    _check(decoder, arms, documents, tail)
    for document in documents:
        if any(not run.done(arm.name, document.item) for arm in arms):
            _measure(decoder, tokenizer, arms, document, run, settings, tick, {} if kept is None else kept)
        else:
            for _ in arms:
                tick()


@torch.no_grad()
def _measure(
    decoder: Decoder,
    tokenizer: Any,
    arms: Sequence[Arm],
    document: Document,
    run: Run,
    settings: _Settings,
    tick: Callable[[], None],
    kept: dict[str, Tensor],
) -> None:
    """Every arm that is missing, on one document."""
    ids = document.ids.to(decoder.model.device)
    if document.item not in kept:
        kept[document.item] = scored_outputs(decoder, FillPlan(Exact(), 1), ids, settings.tail)
    exact = kept[document.item]
    sets = _token_sets(decoder, tokenizer, ids, exact, settings, exact_item(run, document.item))
    first = ids.shape[1] - exact.shape[1]
    facts = {"length": ids.shape[1], "tokens": exact.shape[1], "novel": int(sets.novel.sum())}
    if sets.key is not None:
        facts["key"] = int(sets.key.sum())
    for arm in arms:
        if not run.done(arm.name, document.item):
            own = exact if runs_all(arm) else arm_outputs(decoder, arm, ids, settings.tail, tokenizer)
            metrics = _metrics(score(decoder, own, exact, ids), sets, settings.scored)
            places = {}
            if arm.name == BASELINE and sets.key is not None:
                places["key_tokens"] = (sets.key.nonzero()[:, 0] + first).tolist()
            run.add(arm.name, document.item, document.stratum, metrics, **facts, **places)
        tick()


def runs_all(arm: Arm) -> bool:
    """Whether the arm is the stock model, so that its rows need no second run."""
    return arm.is_exact and isinstance(arm.plan(1 << 30).fill, Exact)


def exact_item(run: Run, item: str) -> Mapping[str, Any]:
    """What the run holds of the exact arm on an item; empty if it has not run."""
    found = (line for line in run.lines if line["arm"] == BASELINE and line["item"] == item)
    return next(found, {})


def _token_sets(
    decoder: Decoder,
    tokenizer: Any,
    ids: Tensor,
    exact: Tensor,
    settings: _Settings,
    known: Mapping[str, Any],
) -> _Tokens:
    """Which of the tokens that ``exact`` [1, k, W] predicts are novel, and which are key."""
    k = exact.shape[1]
    fresh = novel(ids[0], settings.run_length)[-k:].to(ids.device)
    first = ids.shape[1] - k  # as many tokens come before it
    if first <= settings.context:
        return _Tokens(fresh, None)
    if "key_tokens" in known:
        keys = torch.zeros(k, dtype=torch.bool, device=ids.device)
        keys[torch.tensor(known["key_tokens"], dtype=torch.long, device=ids.device) - first] = True
        return _Tokens(fresh, keys)
    bos = getattr(tokenizer, "bos_token_id", None)
    cut = cut_nll(decoder, ids, k, settings.context, settings.stride, bos)
    return _Tokens(fresh, key(nats(decoder, exact, ids), cut, settings.rise))


@torch.no_grad()
def cut_nll(
    decoder: Decoder, ids: Tensor, count: int, context: int, stride: int = STRIDE, bos: int | None = None
) -> Tensor:
    """The exact model's nats of a document's last ``count`` tokens when their context is cut to its end.

    ``stride`` tokens run together, after the ``context`` tokens before the first of them: a token sees ``context`` to
    ``context + stride - 1`` tokens. Stride 1 gives each token a window of its own, at its own cost.

    Args:
        ids: [1, n], n - count >= context.
        bos: a document that begins with this token keeps it before every window: models that were trained with it
            are lost without it, and every token would look like a key token.

    Returns:
        [count] fp32.
    """
    n, found = ids.shape[1], []
    begins = ids[:, :1] if bos is not None and int(ids[0, 0]) == bos else ids[:, :0]
    for start in range(n - count, n, stride):
        stop = min(start + stride, n)
        window = torch.cat([begins, ids[:, start - context : stop]], 1)
        positions = torch.arange(window.shape[1] - 1, device=ids.device)[None]
        h = run_rows(decoder, window[:, :-1], positions, new_cache(decoder.model))
        found.append(nats(decoder, h[:, -(stop - start) :], window))
    return torch.cat(found)


def _metrics(scores: Scores, sets: _Tokens, scored: int) -> dict[str, float]:
    """Means over the sets that have a token."""
    k = len(scores.nll)
    every = torch.ones_like(sets.novel)
    place = torch.arange(k, device=every.device)
    parts = {"": every, "_first": place < scored, "_last": place >= k - scored}
    chosen = {"nll" + end: part for end, part in parts.items()}
    chosen |= {"novel_nll" + end: part & sets.novel for end, part in parts.items()}
    if sets.key is not None:
        chosen["key_nll"] = sets.key
    found = {name: scores.nll[part].mean().item() for name, part in chosen.items() if part.any()}
    return found | {"kl": scores.kl.mean().item(), "top1": scores.same.float().mean().item()}


def _check(decoder: Decoder, arms: Sequence[Arm], documents: Sequence[Document], tail: int) -> None:
    """Refuses what cannot be scored, before anything runs."""
    check_names(documents)
    for document in documents:
        n = document.ids.shape[1]
        check_context(decoder, document, n)
        check_length(scored_plan(FillPlan(Exact(), 1), tail), n, tail, f" ({document.item})")
        for arm in arms:
            if arm.compact is None:
                where = f" (arm {arm.name!r}, {document.item})"
                check_length(scored_plan(arm.plan(n), tail), n, tail, where)


def check_names(documents: Sequence[Document]) -> None:
    """Raises SettingError if two documents have one name: the second would count as done."""
    names = [document.item for document in documents]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(
            f"a run over {len(names)} documents", f"two are named {twice!r}", "give each its own item"
        )


def check_context(decoder: Decoder, document: Document, n: int) -> None:
    """Raises PromptError if n tokens, a document's and what follows it, are more than the model's context."""
    try:
        check_prompt(document.ids, None, n - document.ids.shape[1], decoder.config)
    except PromptError as error:
        raise PromptError(f"score {document.item}, {error.asked}", error.why, error.instead) from error


def documents_of(
    tokenizer: Any,
    texts: Mapping[str, Sequence[str | Path]],
    tokens: int,
    count: int,
    *,
    fitted: Collection[str] = (),
    seed: int = 0,
) -> list[Document]:
    """Held-out documents of exactly ``tokens`` tokens, at most ``count`` of every stratum.

    Args:
        texts: stratum -> its texts, as `held_out_documents` takes them.
        fitted: digests of documents that the maps were fitted on, which are left out.

    Returns:
        In the strata's order; an item's name holds its stratum, number and the SHA-256 of its ids.

    Raises:
        CorpusError: a stratum's text is unreadable, or has no such document.
    """
    return [
        Document(f"{stratum}/{i}/{_digest(ids)}", stratum, ids)
        for stratum, paths in texts.items()
        for i, ids in enumerate(held_out_documents(tokenizer, paths, tokens, count, fitted=fitted, seed=seed))
    ]


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().to(torch.long).numpy().astype("<i8").tobytes()).hexdigest()[:12]
