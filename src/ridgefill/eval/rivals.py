"""Methods that drop prompt tokens, as arms of the same compute as the fill's (paper 6.3, 7, Table 6).

Each is built for every prompt length: it keeps the most rows whose multiply-accumulates (`bench.cost`) do not exceed
those of the reference plan. Reading attention is counted as the least that it takes: one product per query row, key
and query head, and the keys of a layer that would not have run otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ridgefill.bench.cost import ModelShape, Setting, macs
from ridgefill.bench.ttft import setting_of
from ridgefill.errors import PromptError, SettingError, UnsupportedModelError
from ridgefill.eval.arms import Arm, expected_macs, largest
from ridgefill.fill.exact import Exact
from ridgefill.fill.none import NoFill
from ridgefill.fit.capture import layer_inputs
from ridgefill.models.decoder import Decoder
from ridgefill.models.gathered import ReadOnly, gather_rows
from ridgefill.plan import FillPlan
from ridgefill.rows.base import top
from ridgefill.rows.reader import attention_layers
from ridgefill.rows.snapkv import PooledAttentionRows, last_layer, pooled

if TYPE_CHECKING:
    from ridgefill.eval.arms import _Base

RIVALS = ("snapkv", "fastkv", "gemfilter")
FIELDS = ("split", "tail", "leading")

SNAPKV_WINDOW, SNAPKV_KERNEL = 32, 7
FASTKV_WINDOW, FASTKV_KERNEL = 8, 7
GEMFILTER_KERNEL = 5

_NOTES = {
    "snapkv": (
        "As published (arXiv:2404.14469): attention from the last 32 rows, summed, max-pooled over 7 rows, the "
        "highest kept. Different: rows are chosen once, for all heads, in the last full-attention layer up to the "
        "split, and the others never run the late layers (published: every row runs, and each head and layer "
        "forgets its own); leading rows and tail are the reference's; the number kept follows from its compute."
    ),
    "fastkv": (
        "As published (arXiv:2502.01068): every row runs the layers below the split, then only the last 8 rows, and "
        "those that they attend to most in the last of these layers (average over 7 rows), run the others. "
        "Different: no head forgets entries of rows that ran; the layer follows from the split, the number kept "
        "from the reference's compute."
    ),
    "gemfilter": (
        "As published (arXiv:2409.17422 and the released code): the last row's query in the filter layer times "
        "every key, summed over heads without a softmax, averaged over 5 rows; the highest rows run again from the "
        "first layer, as a prompt of their own. Different: the filter layer is the last full-attention layer up to "
        "the split; the last row (of a loss, all scored rows) always remains; the number kept follows from the "
        "reference's compute."
    ),
}


def rival(kind: str, name: str, words: str, base: _Base, fields: dict[str, str]) -> Arm:
    """The arm of a method that drops tokens.

    Args:
        kind: one of `RIVALS`.
        name, words: its label, and the text that it was read from.
        base: gives the model, and the plan whose compute is matched.
        fields: of `FIELDS`, as text.

    Raises:
        SettingError: another field, or no full-attention layer up to the split; and from the arm's ``plan``, where
            even no chosen row costs more than the reference.
        UnsupportedModelError: a model with several residual streams.
    """
    if wrong := [key for key in fields if key not in FIELDS]:
        raise SettingError(
            f"the arm {words!r}",
            f"{kind} chooses its rows by its own rule and has no {wrong[0]}=",
            f"name only {', '.join(FIELDS)}, or use 'none {wrong[0]}=...'",
        )
    if base.decoder.wide:
        raise UnsupportedModelError(
            f"the arm {words!r}",
            "rows cannot be dropped from a model with several residual streams",
            "compare with other arms",
        )
    reference = base.reference()
    asked = base.plan("identity", fields)
    shape = ModelShape.from_config(base.decoder.config)
    layers, exact = attention_layers(base.decoder), Match(words, reference, shape)
    if kind == "gemfilter":
        filter_ = GemFilter(last_layer(layers, asked.split), exact)
        plan = base.plan("exact", {})
        return Arm(name, lambda n: plan, words, filter_, _NOTES[kind])
    if kind == "fastkv":
        below = [i for i in layers if i < asked.split]
        rows = PooledAttentionRows(0, FASTKV_WINDOW, FASTKV_KERNEL, "avg", last_layer(layers, asked.split))
        rows = replace(rows, layer=below[-1]) if below else rows
        tail = asked.tail if "tail" in fields else FASTKV_WINDOW
        leading = asked.leading if "leading" in fields else 0
    else:
        rows = PooledAttentionRows(0, SNAPKV_WINDOW, SNAPKV_KERNEL, "max", last_layer(layers, asked.split))
        tail, leading = asked.tail, asked.leading
    plan = FillPlan(NoFill(), asked.split, tail, leading, rows, table=reference.table)
    return Arm(name, partial(matched, plan, exact), words, notes=_NOTES[kind])


# --- as many rows as the reference pays for -----------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """What an arm may cost.

    Attributes:
        asked: the arm's words, for refusals.
        reference: the plan whose compute is matched; the rows that its selector will choose count where its
            settings name their number.
        shape: of the model.
    """

    asked: str
    reference: FillPlan
    shape: ModelShape = field(repr=False)

    def budget(self, n: int) -> int:
        """Multiply-accumulates of the reference at n tokens."""
        return expected_macs(self.reference, self.shape, n)

    def pays_for_exact(self, n: int) -> bool:
        """Whether the reference costs as much as the unmodified model, as it does where it fills no row."""
        return macs(self.shape, n, Setting.exact()) <= self.budget(n)

    def most(self, n: int, least: int, most: int, cost: Callable[[int], int]) -> int:
        """The largest count from ``least`` to ``most`` that costs no more than the reference at n tokens.

        Args:
            cost: count -> multiply-accumulates; more rows cost more.

        Raises:
            SettingError: even ``least`` costs more.
        """
        budget = self.budget(n)
        if cost(least) > budget:
            raise SettingError(
                f"the arm {self.asked!r} at {n} tokens",
                f"with {least} chosen rows it takes {cost(least):,} multiply-accumulates, and the "
                f"{self.reference.fill.name} fill that it is matched to {budget:,}",
                "give it an earlier split or a shorter tail, or compare at other lengths",
            )
        return largest(least, most, lambda count: cost(count) <= budget)


def matched(plan: FillPlan, match: Match, n: int) -> FillPlan:
    """``plan`` with the most chosen rows that a prompt of n tokens may have; exact where the reference pays for that.

    Raises:
        SettingError: even none of them costs more than the reference.
    """
    if match.pays_for_exact(n):
        return replace(plan, fill=Exact(), rows=None)
    rows = plan.rows
    if not isinstance(rows, PooledAttentionRows):
        raise TypeError("a matched plan chooses its rows by pooled attention")
    free = max(0, n - plan.tail - plan.leading)
    most = match.most(n, 0, free, lambda k: kept_macs(match.shape, n, plan, k))
    return replace(plan, rows=replace(rows, budget=most))


def kept_macs(shape: ModelShape, n: int, plan: FillPlan, chosen: int) -> int:
    """Multiply-accumulates of n tokens of which the leading rows, ``chosen`` others and the tail run late layers."""
    total = macs(shape, n, setting_of(replace(plan, rows=None), shape, chosen))
    rows = plan.rows
    if n < plan.shortest or not isinstance(rows, PooledAttentionRows) or rows.layer is None:
        return total  # runs exactly: nothing is chosen
    layer = shape.costs[rows.layer]
    total += sum(range(max(0, n - rows.window) + 1, n + 1)) * layer.reads[0][0] // 2
    if rows.layer >= plan.split:  # rows that run it make their keys anyway
        total += layer.value * (n - plan.tail - plan.leading - chosen)
    return total


# --- a shorter prompt -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemFilter:
    """Shortens a prompt to the rows that its last row looks for in a lower layer (Shi et al., 2024).

    Attributes:
        layer: the filter layer, whose keys and last query are read.
        match: gives the compute that the filtering and the short prompt may take together.
        kernel: rows averaged together.
    """

    layer: int
    match: Match
    kernel: int = GEMFILTER_KERNEL

    def rows(self, n: int) -> int:
        """How many rows of n remain; all of them where the reference pays for the exact model.

        Raises:
            SettingError: the filtering and one row cost more than the reference.
        """
        if self.match.pays_for_exact(n):
            return n
        return self.match.most(n, 1, n - 1, lambda k: self.macs_of(self.match.shape, n, k))

    def macs(self, shape: ModelShape, n: int) -> int:
        """Multiply-accumulates of n tokens: the filtering, and the rows that remain in all layers."""
        kept = self.rows(n)
        return macs(shape, n, Setting.exact()) if kept == n else self.macs_of(shape, n, kept)

    def macs_of(self, shape: ModelShape, n: int, kept: int) -> int:
        """The same for a number of rows that remain."""
        below, layer = replace(shape, costs=shape.costs[: self.layer]), shape.costs[self.layer]
        filtering = n * layer.value + n * layer.reads[0][0] // 2
        return macs(below, n, Setting.exact()) + filtering + macs(shape, kept, Setting.exact())

    @torch.no_grad()
    def keep(
        self,
        model: Any,
        tokenizer: Any,
        ids: Tensor,
        question: tuple[int, int] | None = None,
        tail: int = 1,
    ) -> Tensor:
        """[k] ascending rows of the prompt ids [1, n] that remain.

        Args:
            question: not read: the method looks from the last row.
            tail: last rows that remain in any case; the filter looks from the first of them, for the others may
                hold what is to be predicted.

        Raises:
            PromptError: a batch of several prompts.
            SettingError: more last rows than the reference pays for.
        """
        if ids.ndim != 2 or len(ids) != 1:
            raise PromptError(
                f"filter ids of shape {tuple(ids.shape)}",
                "one prompt is shortened at a time",
                "give one prompt, as [1, n]",
            )
        n = ids.shape[1]
        kept, tail = self.rows(n), min(tail, n)
        if kept == n:
            return torch.arange(n, device=ids.device)
        if tail > kept:
            raise SettingError(
                f"the arm {self.match.asked!r} at {n} tokens",
                f"its last {tail} rows are to remain, and the compute that it is matched to pays for {kept}",
                "score fewer rows, or give longer prompts",
            )
        first = n - tail
        score = pooled(self.products(Decoder(model), ids[:, : first + 1]).float().cpu(), self.kernel, "avg")
        chosen = torch.ones(n, dtype=torch.bool)
        chosen[:first] = top(score[:first], kept - tail)
        return chosen.nonzero()[:, 0].to(ids.device)

    def products(self, decoder: Decoder, ids: Tensor) -> Tensor:
        """[n] the last row's query times every row's key in the filter layer, summed over heads; ids [1, n]."""
        (_, h, x) = next(layer_inputs(decoder, ids, self.layer, self.layer))
        last = torch.tensor([[ids.shape[1] - 1]], device=h.device)
        rows = decoder.rows(h, torch.arange(ids.shape[1], device=h.device)[None], ids=ids.to(h.device))
        seen = _Products()
        cache = ReadOnly(decoder.writes(self.layer, x, rows), last)
        with _reading(decoder.config):
            decoder.run_layer(self.layer, h[:, -1:], replace(gather_rows(rows, last), masks=seen), cache)
        if seen.found is None:
            raise UnsupportedModelError(
                f"the arm {self.match.asked!r}",
                f"layer {self.layer} of this model shows no queries and keys",
                "compare with other arms",
            )
        return seen.found[0]


_READING = "ridgefill_products"


@dataclass
class _Products:
    """Given to the attention in place of a mask; takes what it finds, [B, keys]."""

    found: Tensor | None = None


@contextmanager
def _reading(config: Any) -> Iterator[None]:
    """The model's attention is `_products` while it lasts."""
    if _READING not in AttentionInterface._global_mapping:
        AttentionInterface.register(_READING, _products)
    stock, config._attn_implementation = config._attn_implementation, _READING
    try:
        yield
    finally:
        config._attn_implementation = stock


def _products(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Products, **_: Any
) -> tuple[Tensor, None]:
    """Keeps the products of one query row [B, H, 1, D] with keys [B, H_kv, n, D]; what it returns is not read."""
    by_key_head = query[:, :, -1].unflatten(1, (key.shape[1], -1)).sum(2)
    attention_mask.found = torch.einsum("bhd,bhnd->bn", by_key_head.float(), key.float())
    return query.new_zeros(len(query), 1, query.shape[1], value.shape[3]), None
