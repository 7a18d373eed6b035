"""Arms: what is compared, in words such as "ridge rows=spans(peak,0.05)" (paper Table 3, Table 6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ridgefill.bench.cost import ModelShape, Setting, macs
from ridgefill.bench.ttft import setting_of
from ridgefill.engines.transformers import Filling
from ridgefill.errors import PromptError, SettingError
from ridgefill.fill import Exact
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, layer_of, make_plan
from ridgefill.rows.snapkv import PooledAttentionRows

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps

BASELINE = "exact"
MATCHED = "matched"  # tail=matched: as long as the compute of the ridge fill pays for
KEYS = ("rows", "correct", "tail", "leading", "split", "maps", "preset")
SWIFTKV = "swiftkv"
_FIELD = re.compile(rf"(?:^|\s)({'|'.join(KEYS)})=")


class Compact(Protocol):
    """Shortens a prompt, and runs what is left of it exactly."""

    def keep(
        self,
        model: Any,
        tokenizer: Any,
        ids: Tensor,
        question: tuple[int, int] | None = None,
        tail: int = 1,
    ) -> Tensor:
        """[k] ascending rows of the prompt ids [1, n] that remain, its last ``tail`` ones among them."""
        ...


@dataclass(frozen=True)
class Arm:
    """One way to prefill.

    Attributes:
        name: its label in tables.
        make: prompt length n -> plan.
        words: the text that it was read from.
        compact: for arms that shorten the prompt; what is left runs by the plan, which is exact.
        notes: what a reader of its figures should know.
    """

    name: str
    make: Callable[[int], FillPlan]
    words: str = ""
    compact: Compact | None = None
    notes: str = field(default="", compare=False)

    def plan(self, n: int) -> FillPlan:
        """The plan for a prompt of n tokens."""
        return self.make(n)

    @property
    def is_exact(self) -> bool:
        """Whether every token runs every layer."""
        return self.compact is None and self.make(1 << 30).fill_is_exact

    def on(
        self, model: Any, n: int, tokenizer: Any = None, question: tuple[int, int] | None = None
    ) -> AbstractContextManager[Any]:
        """The model as this arm runs a prompt of n tokens, however short; nothing is on for exact."""
        plan = self.plan(n)
        if plan.fill_is_exact:
            return nullcontext()
        filling = Filling(model, plan, plan.shortest, tokenizer)
        filling.question = question
        return filling

    @torch.no_grad()
    def generate(
        self,
        model: Any,
        tokenizer: Any,
        ids: Tensor,
        *,
        question: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Greedily (or as ``kwargs`` of ``model.generate`` say) continues ids [1, n] -> [1, n + new].

        Args:
            question: rows [first, stop) of the question, for selectors.

        Raises:
            PromptError: the prompt was long enough and yet ran exactly, which would be measured as the arm's.
        """
        ids = ids.to(model.device)
        seen = ids if self.compact is None else ids[:, self.compact.keep(model, tokenizer, ids, question)]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        given = {"do_sample": False, "pad_token_id": pad, "attention_mask": torch.ones_like(seen)} | kwargs
        n = seen.shape[1]
        with self.on(model, n, tokenizer, None if self.compact else question) as filling:
            out = model.generate(seen, **given)
        if filling is not None and filling.stats.reason is not None and n >= filling.min_tokens:
            raise PromptError(
                f"a prompt of {n} tokens with the arm {self.name!r}",
                f"it ran exactly: {filling.stats.reason}",
                "shorten the prompt, or leave the arm out",
            )
        return out if self.compact is None else torch.cat([ids, out[:, seen.shape[1] :]], 1)

    def macs_over_exact(self, shape: ModelShape, n: int) -> float | None:
        """Multiply-accumulates of a prompt of n tokens over exact's; None where the count does not know the arm.

        The rows that a selector will choose are counted where its words name a share.
        """
        if self.compact is not None:
            counted = getattr(self.compact, "macs", None)
            return None if counted is None else counted(shape, n) / macs(shape, n, Setting.exact())
        plan = self.plan(n)
        if plan.fill_is_exact:
            return 1.0
        if plan.fill.name == "none" and isinstance(plan.rows, PooledAttentionRows):
            from ridgefill.eval.rivals import kept_macs

            return kept_macs(shape, n, plan, expected_rows(plan, n) or 0) / macs(shape, n, Setting.exact())
        rows = expected_rows(plan, n)
        if rows is None or plan.fill.name not in ("ridge", "identity", "none"):
            return None
        return macs(shape, n, setting_of(plan, shape, rows)) / macs(shape, n, Setting.exact())


EXACT = Arm(BASELINE, lambda n: FillPlan(Exact(), split=1), BASELINE)  # no layer is filled: any split will do


def expected_rows(plan: FillPlan, n: int) -> int | None:
    """Prefix rows that the plan's selector takes of n tokens by its budget; None where only a run knows."""
    if plan.rows is None:
        return 0
    parts = getattr(plan.rows, "parts", (plan.rows,))
    prefix, total = max(0, n - plan.tail), 0
    for part in parts:
        budget = getattr(part, "budget", None)
        if not isinstance(budget, (int, float)) or isinstance(budget, bool):
            return None
        total += budget if isinstance(budget, int) else round(budget * prefix)
    return min(prefix, total)


def parse_arms(
    text: str,
    decoder: Decoder,
    maps: RidgeMaps | None = None,
    *,
    split: int | float | None = None,
    tail: int | None = None,
    leading: int | None = None,
) -> list[Arm]:
    """Reads arms, separated by semicolons; "exact" comes first, named or not.

    An arm is a fill (ridge, identity, none, pop, exact) or a rival (snapkv, fastkv, gemfilter), with fields
    ``rows= correct= tail= leading= split= preset= maps=`` behind it and, if wanted, ``label:`` before it. ``none
    tail=matched`` is the paper's "no fill + longer tail": its tail costs as much as the ridge fill would. ``swiftkv
    maps=FOLDER`` takes a SwiftKV checkpoint's projections.

    Args:
        split, tail, leading: for arms that do not name their own.

    Raises:
        SettingError: an arm that cannot be read or is named twice, a field that is unknown.
    """
    base = _Base(decoder, maps, split, tail, leading)
    arms = [base.arm(part) for part in (piece.strip() for piece in text.split(";")) if part]
    named = [arm for arm in arms if arm.words != BASELINE]
    names = [BASELINE, *(arm.name for arm in named)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(
            f"the arms {text!r}", f"two are named {twice!r}", "give one a label: 'mine: ridge ...'"
        )
    return [base.arm(BASELINE), *named]


@dataclass(frozen=True)
class _Base:
    """What arms that name nothing else take."""

    decoder: Decoder
    maps: RidgeMaps | None
    split: int | float | None
    tail: int | None
    leading: int | None

    def arm(self, words: str) -> Arm:
        """One arm from its text."""
        name, kind, fields = _read(words)
        if kind in ("snapkv", "fastkv", "gemfilter"):
            from ridgefill.eval.rivals import rival

            return rival(kind, name, words, self, fields)
        if fields.get("tail") == MATCHED:
            return self._matched(name, words, kind, fields)
        plan = self.plan(kind, fields)
        return Arm(name, lambda n: plan, words)

    def plan(self, kind: str, fields: dict[str, str]) -> FillPlan:
        """The plan of a fill with its fields."""
        if kind == SWIFTKV:
            return self._swiftkv(fields)
        maps = self._maps(fields)
        preset = fields.get("preset")
        pop = kind == "pop"
        split = _number("split", fields["split"]) if "split" in fields else self.split
        if "split" not in fields and (pop or preset is not None or maps is not None):
            split = None  # the preset's, or the maps' own
        return make_plan(
            self.decoder.n_layers,
            None if pop else maps,
            preset=preset,
            fill=kind,
            split=self._exact_split() if kind == BASELINE and split is None and maps is None else split,
            tail=_count("tail", fields, None if pop or preset else self.tail),
            leading=_count("leading", fields, None if pop or preset else self.leading),
            rows=fields.get("rows"),
            corrections=fields.get("correct"),
        )

    def reference(self) -> FillPlan:
        """The plan whose compute a matched arm gets: the ridge fill, or identity where there are no maps."""
        return self.plan("identity" if self.maps is None else "ridge", {})

    def _matched(self, name: str, words: str, kind: str, fields: dict[str, str]) -> Arm:
        plan = self.plan(kind, {k: v for k, v in fields.items() if k != "tail"})
        make = partial(_longer, plan, self.reference(), ModelShape.from_config(self.decoder.config))
        return Arm(name, make, words, notes="its tail costs as much as the ridge fill")

    def _swiftkv(self, fields: dict[str, str]) -> FillPlan:
        """The fill by a checkpoint's projections, at their own split."""
        from ridgefill.fill.swiftkv import SwiftKV

        if "maps" not in fields or "split" in fields:
            raise SettingError(
                f"the arm {SWIFTKV}",
                "its split is its maps' own" if "maps" in fields else "it needs its maps",
                f"write it as '{SWIFTKV} maps=CHECKPOINT_FOLDER'",
            )
        found: Any = SwiftKV.load(fields["maps"], self.decoder)
        return make_plan(
            self.decoder.n_layers,
            fill=found,
            split=found.split,
            tail=_count("tail", fields, self.tail),
            leading=_count("leading", fields, self.leading),
            rows=fields.get("rows"),
            corrections=fields.get("correct"),
        )

    def _maps(self, fields: dict[str, str]) -> RidgeMaps | None:
        if "maps" not in fields:
            return self.maps
        from ridgefill.maps import RidgeMaps

        found = RidgeMaps.load(fields["maps"])
        found.check_model(self.decoder.model)
        return found

    def _exact_split(self) -> int:
        return layer_of(0.5, self.decoder.n_layers)  # no layer is filled: any split will do


def _longer(plan: FillPlan, reference: FillPlan, shape: ModelShape, n: int) -> FillPlan:
    """``plan`` with the longest tail that costs no more than ``reference`` at n tokens (paper Table 6)."""
    budget = expected_macs(reference, shape, n)
    cost = lambda tail: macs(shape, n, setting_of(replace(plan, tail=tail), shape))  # noqa: E731
    return replace(plan, tail=largest(min(plan.tail, n), n, lambda tail: cost(tail) <= budget))


def expected_macs(plan: FillPlan, shape: ModelShape, n: int) -> int:
    """Multiply-accumulates of n tokens, with the rows that the plan's selector will choose where a budget says."""
    return macs(shape, n, setting_of(plan, shape, expected_rows(plan, n) or 0))


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest count from ``low``, which is taken to fit, to ``high`` that fits; larger ones fit less."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _read(words: str) -> tuple[str, str, dict[str, str]]:
    """Label, kind and fields of an arm's text."""
    label, colon, rest = words.partition(":")
    if not colon or "=" in label:
        label, rest = "", words
    rest = rest.strip()
    marks = list(_FIELD.finditer(rest))
    kind = rest[: marks[0].start()].strip() if marks else rest
    fields: dict[str, str] = {}
    ends = [*(mark.start() for mark in marks[1:]), len(rest)]
    for mark, end in zip(marks, ends, strict=False):
        if mark[1] in fields:
            raise SettingError(f"the arm {words!r}", f"it names {mark[1]} twice", "name each field once")
        fields[mark[1]] = rest[mark.end() : end].strip()
    if not kind or " " in kind or "=" in kind:
        raise SettingError(
            f"the arm {words!r}",
            f"{kind or rest!r} is no fill with fields",
            f"write it as 'ridge rows=spans(peak,0.05) tail=1024'; the fields are {', '.join(KEYS)}",
        )
    return label.strip() or rest, kind, fields


def _number(name: str, text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise SettingError(
            f"{name}={text}", "it is not a number", f"write {name}=15 or, for a depth, {name}=0.5"
        ) from None


def _count(name: str, fields: dict[str, str], default: int | None) -> int | None:
    if name not in fields:
        return default
    if not fields[name].isdecimal():
        raise SettingError(f"{name}={fields[name]}", "it counts tokens", f"write {name}=1024")
    return int(fields[name])
