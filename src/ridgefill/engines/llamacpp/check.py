"""`ridgefill check --engine llamacpp`: is the fill correct on this llama.cpp, and what does it cost?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ridgefill.check import PROBE_TAIL, Check, Verdict
from ridgefill.engines.llamacpp.bench import environment
from ridgefill.engines.llamacpp.late_rows import LateRows, Recipe
from ridgefill.engines.llamacpp.measures import first_token, forget, kl, last_logits, tail_nll
from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.engines.llamacpp.self_check import unpacked
from ridgefill.engines.llamacpp.state import SequenceState
from ridgefill.engines.llamacpp.stopped import StoppedContext, get_state, set_state
from ridgefill.engines.llamacpp.tokenizer import GgufTokenizer
from ridgefill.errors import SettingError
from ridgefill.eval.documents import held_out_documents
from ridgefill.eval.loss import TailLoss
from ridgefill.eval.needle import ANSWER_TOKENS, KEYS, Needle, plant
from ridgefill.fill import Ridge

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama

GREEDY = 16  # tokens that both arms generate in the comparison


@dataclass
class GgufCheck(Check):
    """As `Check`, on llama.cpp.

    Attributes:
        first_token_kl: KL(exact || filled) in nats of the first token after each document.
        engine: what it ran on.
    """

    first_token_kl: list[float] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    def words(self) -> list[str]:
        """The findings in plain words, the conclusion first."""
        if not self.first_token_kl:
            return super().words()
        middle = float(np.median(self.first_token_kl))
        return [
            *super().words()[:-1],
            f"The first token's distribution moves by {middle:.4f} nats (KL, median of {len(self.first_token_kl)}).",
        ]

    def to_json(self, model: RidgeLlama) -> dict[str, Any]:
        """Everything, JSON-able."""
        made = {
            "model": model._gguf.name,
            "plan": self.plan.to_json(),
            "correct": self.correct,
            "verdict": self.verdict if self.losses else None,
            "verdicts": [vars(v) for v in self.verdicts],
            "documents": [{arm: vars(loss) for arm, loss in d.items()} for d in self.losses],
            "first_token_kl": self.first_token_kl,
            "needles": [vars(n) for n in self.needles],
            "environment": self.engine,
        }
        if self.losses:
            arms = ("ridge", "identity")
            made["delta_nll"] = {a: {p: self.delta(a, p) for p in ("first", "last", "all")} for a in arms}
        return made


def check(
    llm: RidgeLlama,
    texts: Sequence[str | Path],
    *,
    tokens: int | None = None,
    documents: int = 4,
    needles: int = 8,
    seed: int = 0,
    tick: Callable[[str], None] = lambda stage: None,
) -> GgufCheck:
    """Compares with stock llama.cpp bit for bit, and measures loss, first-token KL and retrieval.

    Args:
        llm: with the ridge fill.
        texts: held-out text; documents that the maps were fitted on are left out.
        tokens: length of the documents; 2,048 more than the tail unless given, and no more than the context.
        documents: how many at most.
        needles: facts planted in filled rows and asked for; 0 leaves that out.
        tick: called with the stage's name before each.

    Raises:
        SettingError, CorpusError: by name.
    """
    plan = llm.plan
    if not isinstance(plan.fill, Ridge):
        raise SettingError("check on llama.cpp", "there are no maps to check", "name maps")
    length = min(plan.tail + 2048 if tokens is None else tokens, llm.n_ctx())
    if length < max(plan.shortest, PROBE_TAIL + 1):
        raise SettingError(
            f"check on documents of {length} tokens",
            f"with a tail of {plan.tail} and {plan.leading} leading rows they need {plan.shortest}",
            "give more --tokens, a larger n_ctx or a shorter --tail",
        )
    tokenizer = GgufTokenizer(llm)
    fitted = set(plan.fill.maps.provenance.get("fitted_documents", ()))
    found_ids = held_out_documents(tokenizer, texts, length, documents, fitted=fitted, seed=seed)
    every = [ids[0].tolist() for ids in found_ids]
    tick("bit-for-bit comparison")
    found = GgufCheck(plan, compare_with_stock(llm, every[0]), engine=environment(llm))
    if not found.correct:
        return found
    for i, ids in enumerate(every):
        tick(f"loss, document {i + 1} of {len(every)}")
        arms = {"exact": tail_nll(llm, ids, exact=True)}
        with llm.filled_by("identity"):
            arms["identity"] = tail_nll(llm, ids, exact=False)
        arms["ridge"] = tail_nll(llm, ids, exact=False)
        found.losses.append({name: TailLoss.of(nats) for name, nats in arms.items()})
        exact, filled = (_first_token(llm, ids, exact=e) for e in (True, False))
        found.first_token_kl.append(kl(exact, filled))
    for i in range(needles):
        tick(f"planted fact {i + 1} of {needles}")
        if (needle := _needle(llm, tokenizer, found_ids[i % len(found_ids)], i, needles, seed)) is not None:
            found.needles.append(needle)
    forget(llm)
    return found


def compare_with_stock(llm: RidgeLlama, ids: Sequence[int]) -> list[Verdict]:
    """Promise 1 on this llama.cpp: off is llama.cpp itself, and rows that it would have written change nothing.

    Stock is a `llama_cpp.Llama` of its own with the same settings. A state that was put back stands in other cells
    where layers have a sliding window, so the second comparison is with stock after it put back its own.

    Args:
        ids: real text.
    """
    ids = list(ids[: min(len(ids), max(512, (llm._gguf.window or 0) + 256))])
    prefix, tail = ids[:-PROBE_TAIL], ids[-PROBE_TAIL:]
    lib = llama_cpp()
    stock = lib.Llama(**lib.Llama.__getstate__(llm) | {"verbose": False})
    forget(llm)
    with llm.exactly():
        both: list[np.ndarray] = []
        greedy: list[list[int]] = []
        for each in (stock, llm):
            each.eval(prefix)
            each.eval(tail)
            both.append(last_logits(each))
            greedy.append(_greedy(each, ids))
    verdicts = [
        Verdict(
            "with the fill off logits and tokens equal stock llama.cpp's bit for bit",
            bool(np.array_equal(both[0], both[1])) and greedy[0] == greedy[1],
            f"{len(ids)} tokens, {len(greedy[0])} greedy ones",
        )
    ]
    forget(stock)
    stock.eval(prefix)
    set_state(stock._ctx.ctx, get_state(stock._ctx.ctx))
    stock.eval(tail)
    written, gap = _from_true_rows(llm, prefix)
    forget(llm)
    set_state(llm._ctx.ctx, written)
    llm.input_ids[: len(prefix)] = prefix
    llm.n_tokens = len(prefix)
    with llm.exactly():
        llm.eval(tail)
    same = np.array_equal(last_logits(llm), last_logits(stock))
    stock.close()
    verdicts.append(
        Verdict(
            "filled from true layer inputs, the logits equal stock llama.cpp's"
            + (" bit for bit" if same else " but for its own kernels' rounding"),
            same or gap < 1e-3,
            f"late rows differ by {gap:.1e} of their norm",
        )
    )
    forget(llm)
    return verdicts


def _from_true_rows(llm: RidgeLlama, prefix: Sequence[int]) -> tuple[np.ndarray, float]:
    """An exact run's state, its late rows written anew from the layers' true inputs, and how far those are off."""
    late = range(llm.plan.split, llm._gguf.layers)
    with StoppedContext(llm._model.model, llm.context_params, len(prefix), llm._gguf.width) as context:
        inputs = context.inputs_of(late, prefix, 0, stop=False)
        data = context.state()
    own = data.copy()
    state, before = SequenceState(own, llm._gguf.caches), SequenceState(data, llm._gguf.caches)
    for layer in late:
        for what in ("keys", "values"):
            blank = state.read(layer, what)
            state.write(layer, what, np.arange(len(blank)), np.zeros_like(blank))
    rows = LateRows(
        llm._gguf,
        {i: Recipe(((i, None),)) for i in late},
        llm._form,
        llm.rope_type,
        llm.n_threads_batch,
        "packed",
    )
    rows.write(state, inputs, np.arange(len(prefix), dtype=np.int32))
    rows.close()
    gap = 0.0
    for layer in late:
        for what, kind in (("keys", llm._form.key_type), ("values", llm._form.value_type)):
            ours, stock = (unpacked(s.read(layer, what), kind) for s in (state, before))
            gap = max(gap, float(np.linalg.norm(ours - stock) / max(float(np.linalg.norm(stock)), 1e-9)))
    return own, gap


def _first_token(llm: RidgeLlama, ids: Sequence[int], *, exact: bool) -> np.ndarray:
    before, llm.min_tokens = llm.min_tokens, llm.plan.shortest
    try:
        return first_token(llm, ids, exact=exact)[0]
    finally:
        llm.min_tokens = before


def _greedy(llm: Any, ids: Sequence[int], count: int = GREEDY) -> list[int]:
    """Greedy tokens after ``ids``, which the context holds."""
    made: list[int] = []
    for token in llm.generate(list(ids), temp=0.0, repeat_penalty=1.0, top_k=1):
        if token == llm.token_eos() or len(made) == count:
            break
        made.append(int(token))
    return made


def _needle(
    llm: RidgeLlama, tokenizer: GgufTokenizer, document: torch.Tensor, i: int, count: int, seed: int
) -> Needle | None:
    """One planted fact, asked for exactly and filled; None if it does not fit."""
    rng = np.random.default_rng([seed, i])
    key, value = KEYS[int(rng.integers(len(KEYS)))], str(rng.integers(1_000_000, 10_000_000))
    depth = (i + 0.5) / count
    ids = plant(tokenizer, llm.plan, document[:, : llm.n_ctx() - ANSWER_TOKENS - 1], depth, key, value)
    if ids is None:
        return None
    held = []
    before, llm.min_tokens = llm.min_tokens, llm.plan.shortest
    try:
        for exact in (True, False):
            first_token(llm, ids[0].tolist(), exact=exact)
            answer = _greedy(llm, ids[0].tolist(), ANSWER_TOKENS)
            held.append(value in tokenizer.decode(answer))
    finally:
        llm.min_tokens = before
    return Needle(depth, *held)
