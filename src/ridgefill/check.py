"""Are these maps safe to use with this model on this machine? (paper section 9: what to check before shipping)"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill.bench import break_even
from ridgefill.bench.environment import environment
from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.correct import Correction, TerminalState
from ridgefill.errors import SettingError
from ridgefill.eval.documents import held_out_documents
from ridgefill.eval.loss import TailLoss, compare
from ridgefill.eval.needle import Needle, find_needles
from ridgefill.fill import Exact, Fill, Identity, TrueInputs
from ridgefill.maps import RidgeMaps
from ridgefill.measured import remember
from ridgefill.models.decoder import Decoder
from ridgefill.models.gathered import held
from ridgefill.plan import FillPlan, make_plan
from ridgefill.prefill import check_prompt, fill_prefix
from ridgefill.rows.base import Selector

SMALL_LOSS = 0.05  # nats: the paper's "within 0.05 nats of exact" (section 9)
LARGE_LOSS = 0.25
PROBE_TAIL = 64  # tail of the bit-for-bit comparison: any length serves, a short one is quick


@dataclass(frozen=True)
class Verdict:
    """One comparison with the stock model: its name, whether it held, and what was compared."""

    what: str
    holds: bool
    detail: str


@dataclass
class Check:
    """What `check` found.

    Attributes:
        verdicts: the bit-for-bit comparisons.
        losses: per document and arm ("exact", "identity", "ridge"), nats of the tail's tokens.
        needles: facts planted in filled rows, and whether each arm's answer held them.
        min_tokens: the prompt length from which filling pays here; None if it did not within what was tried.
        tried_tokens: the longest prompt timed; 0 if that was left out or the text was too short for any.
    """

    plan: FillPlan
    verdicts: list[Verdict]
    losses: list[dict[str, TailLoss]] = field(default_factory=list)
    needles: list[Needle] = field(default_factory=list)
    min_tokens: int | None = None
    tried_tokens: int = 0

    @property
    def correct(self) -> bool:
        """Every comparison with the stock model held."""
        return all(v.holds for v in self.verdicts)

    def delta(self, arm: str, part: str = "all") -> float:
        """An arm's loss minus exact's in nats per token, documents weighted equally."""
        return statistics.mean(getattr(d[arm].minus(d["exact"]), part) for d in self.losses)

    @property
    def verdict(self) -> str:
        """ "not correct", "not recommended", "care" or "safe"."""
        if not self.correct:
            return "not correct"
        ridge = self.delta("ridge")
        # NaN compares false, and is not recommended either
        if not (ridge < LARGE_LOSS and ridge <= max(self.delta("identity"), SMALL_LOSS)):
            return "not recommended"
        known, kept = self.retrieved()
        return "safe" if ridge < SMALL_LOSS and kept == known else "care"

    @property
    def safe(self) -> bool:
        """Safe, or usable with care: correct, better than the identity fill, and not far from exact."""
        return self.verdict in ("safe", "care")

    def retrieved(self) -> tuple[int, int]:
        """Planted facts that the exact model found, and how many of those the fill kept."""
        known = [n for n in self.needles if n.exact]
        return len(known), sum(n.filled for n in known)

    def words(self) -> list[str]:
        """The findings in plain words, the conclusion first."""
        if not self.correct:
            failed = ", ".join(v.what for v in self.verdicts if not v.holds)
            return [
                f"NOT SAFE: {failed}. This model's cache cannot be filled correctly by this version; "
                "run it without the fill, and report it."
            ]
        return [self._conclusion(), self._loss(), self._retrieval(), self._break_even()]

    def _conclusion(self) -> str:
        cost = (
            f"the fill is computed correctly, and the tail's loss rises by {self.delta('ridge'):+.3f} nats per token "
            f"(identity fill {self.delta('identity'):+.3f})"
        )
        return {
            "safe": f"SAFE TO USE: {cost}.",
            "care": f"USABLE WITH CARE: {cost}. A deeper split costs less.",
            "not recommended": f"NOT RECOMMENDED: {cost}. Fit a deeper split or on text like yours.",
        }[self.verdict]

    def _loss(self) -> str:
        return (
            f"Right after the filled rows the loss rises by {self.delta('ridge', 'first'):+.3f} nats, at the end "
            f"of the tail by {self.delta('ridge', 'last'):+.3f}."
        )

    def _retrieval(self) -> str:
        known, kept = self.retrieved()
        if not known:
            return (
                "Whether facts that stand only in filled rows survive was not measured: the exact model itself "
                f"found none of {len(self.needles)} planted ones. Try your own prompts with `ridgefill run`, filled "
                "and with `--fill exact`."
            )
        found = (
            f"Of {known} numbers planted in filled rows that the exact model found, the fill found {kept}."
        )
        if kept == known:
            return f"{found} That is a small sample, not a proof."
        return (
            f"{found} What stands only in filled rows can be lost although the loss hardly moves: put what will be "
            "asked about in the tail, or use a deeper split."
        )

    def _break_even(self) -> str:
        if not self.tried_tokens:
            return (
                "From which prompt length filling pays was not measured: it was left out, or the documents are "
                "too short."
            )
        if self.min_tokens is None:
            return (
                f"On this machine filling did not pay up to {self.tried_tokens:,} tokens; `filling` and `run` "
                "leave prompts up to that length exact by themselves."
            )
        return (
            f"On this machine filling pays from about {self.min_tokens:,} tokens; `filling` and `run` leave "
            "shorter prompts exact by themselves."
        )

    def to_json(self, model: Any) -> dict[str, Any]:
        """Everything, JSON-able."""
        arms = ("ridge", "identity")
        return {
            "model": model.config._name_or_path,
            "plan": self.plan.to_json(),
            "correct": self.correct,
            "verdict": self.verdict,
            "safe": self.safe,
            "verdicts": [vars(v) for v in self.verdicts],
            "delta_nll": {a: {p: _finite(self.delta(a, p)) for p in ("first", "last", "all")} for a in arms}
            if self.losses
            else None,
            "documents": [
                {arm: {part: _finite(v) for part, v in vars(loss).items()} for arm, loss in d.items()}
                for d in self.losses
            ],
            "needles": [vars(n) for n in self.needles],
            "min_tokens": self.min_tokens,
            "tried_tokens": self.tried_tokens,
            "environment": environment(model.device),
        }


def check(
    model: Any,
    tokenizer: Any,
    maps: RidgeMaps,
    texts: Sequence[str | Path],
    *,
    preset: str | None = None,
    tail: int | None = None,
    leading: int | None = None,
    rows: Selector | str | None = None,
    corrections: Sequence[Correction] | str | None = None,
    tokens: int | None = None,
    documents: int = 4,
    needles: int = 8,
    timing: bool = True,
    seed: int = 0,
    tick: Callable[[str], None] = lambda stage: None,
) -> Check:
    """Compares with the stock model bit for bit, measures loss and retrieval, and times the break-even length.

    Args:
        preset, tail, leading, rows, corrections: as in `ridgefill.prefill`.
        texts: held-out text, as `ridgefill.fit` takes it; documents that the maps were fitted on are left out.
        tokens: length of the documents whose loss is measured; 2,048 more than the tail unless given.
        documents: how many at most.
        needles: facts planted in filled rows and asked for; 0 leaves that out.
        timing: measure from which prompt length filling pays here, and remember it.
        tick: called with the stage's name before each.

    Raises:
        MapsMismatchError, CorpusError, SettingError, OutputError: by name.
    """
    decoder = Decoder(model)
    maps.check_model(model, tokenizer)
    plan = make_plan(
        decoder.n_layers,
        maps,
        preset=preset,
        tail=tail,
        leading=leading,
        rows=rows,
        corrections=corrections,
    )
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    length = min(plan.tail + 2048 if tokens is None else tokens, longest)
    _refuse_short(length, plan)
    fitted = set(maps.provenance.get("fitted_documents", ()))
    texts_ids = held_out_documents(tokenizer, texts, length, documents, fitted=fitted, seed=seed)
    texts_ids = [ids.to(model.device) for ids in texts_ids]
    tick("bit-for-bit comparison")
    found = Check(plan, compare_with_stock(decoder, plan.split, texts_ids[0]))
    if not found.correct:
        return found
    needs_maps = any(isinstance(correction, TerminalState) for correction in plan.corrections)
    plans = {
        "exact": replace(plan, fill=Exact(), corrections=()),
        "identity": replace(plan, fill=Identity(), corrections=() if needs_maps else plan.corrections),
        "ridge": plan,
    }
    for i, ids in enumerate(texts_ids):
        tick(f"loss, document {i + 1} of {len(texts_ids)}")
        found.losses += compare(decoder, plans, [ids], tokenizer)
    found.needles = find_needles(
        model,
        tokenizer,
        plan,
        texts_ids,
        needles,
        seed=seed,
        tick=lambda i: tick(f"planted fact {i} of {needles}"),
    )
    if not timing:
        return found
    tick("break-even length")
    if tried := break_even.tried_lengths(plan, length):
        found.tried_tokens = tried[-1]
        found.min_tokens = break_even.measure_break_even(model, plan, texts_ids[0], tokenizer=tokenizer)
        remember(maps, plan, model.device, found.min_tokens or found.tried_tokens + 1)
    return found


def _finite(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def _refuse_short(length: int, plan: FillPlan) -> None:
    needed = max(plan.shortest, PROBE_TAIL + 1)
    if length < needed:
        raise SettingError(
            f"check on documents of {length} tokens",
            f"with a tail of {plan.tail} and {plan.leading} leading rows they need {needed}",
            f"give --tokens {needed} or more where the model's context allows it, or a shorter --tail",
        )


@torch.no_grad()
def compare_with_stock(decoder: Decoder, split: int, ids: Tensor) -> list[Verdict]:
    """Promise 1 on the user's own model: off is exact, and so is writing from true inputs.

    Args:
        ids: [1, n] real text.

    Returns:
        Three verdicts: the exact walk's cache, the cache written from true inputs, and greedy tokens.
    """
    windows = [w for i in range(decoder.n_layers) if (w := decoder.window(i)) is not None]
    ids = ids[:, : max(512, max(windows, default=0) + 256)]  # beyond any window, so that it slides
    m = ids.shape[1] - PROBE_TAIL
    stock = new_cache(decoder.model)
    decoder.base(ids[:, :m], use_cache=True, **cache_kwarg(stock))
    caches = {"stock": stock}
    arms: tuple[Fill, ...] = (Exact(), TrueInputs())
    for arm in arms:
        caches[arm.name] = new_cache(decoder.model)
        plan = FillPlan(arm, split, PROBE_TAIL, leading=0)
        _, positions = check_prompt(ids, None, 0, decoder.config)
        fill_prefix(decoder, plan, ids[:, :m], positions[:, :m], None, caches[arm.name])
    off = _unequal_layers(caches["exact"], stock)
    true = _unequal_layers(caches["true"], stock)
    tokens = {name: _greedy(decoder.model, ids, cache) for name, cache in caches.items()}
    equal = torch.equal(tokens["exact"], tokens["stock"]) and torch.equal(tokens["true"], tokens["stock"])
    return [
        Verdict("with the fill off the cache equals the stock model's bit for bit", not off, _where(off, m)),
        Verdict(
            "a cache filled from true layer inputs equals the stock model's bit for bit",
            not true,
            _where(true, m),
        ),
        Verdict("both give the stock model's tokens", equal, f"{tokens['stock'].numel()} greedy tokens"),
    ]


def _unequal_layers(ours: Any, stock: Any) -> list[int]:
    pairs = enumerate(zip(ours.layers, stock.layers, strict=True))
    return [i for i, (a, b) in pairs if not all(map(torch.equal, held(a), held(b)))]


def _where(layers: list[int], rows: int) -> str:
    return f"unequal in layers {layers}" if layers else f"all layers, {rows} rows"


def _greedy(model: Any, ids: Tensor, cache: Any, tokens: int = 16) -> Tensor:
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **cache_kwarg(cache)
    )
    return out[0, ids.shape[1] :]
