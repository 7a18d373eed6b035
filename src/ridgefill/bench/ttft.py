"""Time to first token, exact and filled interleaved in one run (paper 4.4), beside the ceilings of 2.5."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ridgefill.bench.cost import ModelShape, Setting, layer_pass_ceiling, macs_ceiling
from ridgefill.bench.environment import environment
from ridgefill.correct import KeyRescale, ValueRescale
from ridgefill.devices import wait
from ridgefill.engines.transformers import Filling
from ridgefill.errors import PromptError, SettingError
from ridgefill.files import whole
from ridgefill.plan import FillPlan
from ridgefill.rows.probe import BASE_RULES
from ridgefill.rows.ranking import REFERENCE_LAYERS
from ridgefill.stats import PrefillStats


@dataclass
class Ttft:
    """Both arms at one prompt length.

    Attributes:
        tokens: prompt length.
        macs_ceiling: the speedup that the multiply-accumulates of the rows that ran allow (2.5), selection and
            corrections included.
        layer_pass_ceiling: the speedup that layer passes allow, selected rows left out (2.5).
        exact, filled: seconds of every repetition, in the order measured.
        stages: median seconds of the filled arm's stages.
        exact_rows: prompt rows that ran every layer in the filled arm: leading, selected and tail.
    """

    tokens: int
    macs_ceiling: float
    layer_pass_ceiling: float
    exact: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    exact_rows: int = 0

    @property
    def speedup(self) -> float:
        """Median exact seconds over median filled seconds."""
        return statistics.median(self.exact) / statistics.median(self.filled)

    @property
    def counted(self) -> float:
        """Filled over exact multiply-accumulates."""
        return 1 / self.macs_ceiling

    @property
    def measured_over_counted(self) -> float:
        """Filled over exact seconds, over `counted`: 1 where time goes with the count, more where rows cost more."""
        return 1 / self.speedup / self.counted

    def to_json(self) -> dict[str, Any]:
        """Everything, and the medians and their ratio."""
        return {
            "tokens": self.tokens,
            "exact_median_s": statistics.median(self.exact),
            "filled_median_s": statistics.median(self.filled),
            "speedup": self.speedup,
            "speedup_each": [e / f for e, f in zip(self.exact, self.filled, strict=True)],
            "macs_ceiling": self.macs_ceiling,
            "layer_pass_ceiling": self.layer_pass_ceiling,
            "exact_rows": self.exact_rows,
            "counted": self.counted,
            "measured_over_counted": self.measured_over_counted,
            "exact_s": self.exact,
            "filled_s": self.filled,
            "filled_stages_median_s": self.stages,
        }


@torch.no_grad()
def first_token(model: Any, ids: Tensor) -> tuple[int, float]:
    """The greedy first token after ids [1, n], and the seconds until it is known; as ``generate`` runs it."""
    wait(ids.device)
    start = time.perf_counter()
    logits = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
    token = int(logits[0, -1].argmax())
    return token, time.perf_counter() - start


def measure(
    model: Any,
    plan: FillPlan,
    ids: Tensor,
    lengths: Sequence[int],
    repeats: int = 3,
    warm_up: int = 1,
    tick: Callable[[], None] = lambda: None,
    tokenizer: Any = None,
) -> list[Ttft]:
    """Times both arms at every length, one after the other in each repetition.

    Args:
        ids: [1, n] tokens of real text, as long as the longest length.
        repeats: measured repetitions.
        warm_up: repetitions before them that are thrown away.
        tick: called after each repetition.
        tokenizer: for selectors that read text.

    Raises:
        PromptError, SettingError: a length that the text, the model's context or the plan does not allow.
    """
    check_lengths(model, plan, ids, lengths)
    rows = []
    for n in lengths:
        exact: list[float] = []
        filled: list[float] = []
        seen: list[PrefillStats] = []
        for repetition in range(warm_up + repeats):
            without = first_token(model, ids[:, :n])[1]
            with Filling(model, plan, plan.shortest, tokenizer) as filling:
                with_fill = first_token(model, ids[:, :n])[1]
            tick()
            if repetition >= warm_up:
                exact.append(without)
                filled.append(with_fill)
                seen.append(filling.stats or PrefillStats())
        stages = {k: statistics.median(s.seconds.get(k, 0.0) for s in seen) for k in seen[0].seconds}
        kept = round(statistics.median(s.exact for s in seen))
        selected = max(0, kept - plan.tail - plan.leading)
        rows.append(Ttft(n, *ceilings(model, plan, n, selected), exact, filled, stages, kept))
    return rows


def check_lengths(model: Any, plan: FillPlan, ids: Tensor, lengths: Sequence[int]) -> None:
    """Raises a named refusal for a length that cannot be measured."""
    longest = getattr(model.config, "max_position_embeddings", None) or max(lengths, default=0)
    for n in lengths:
        if n > longest:
            raise PromptError(
                f"measure a prompt of {n} tokens",
                f"the model's context is {longest} tokens",
                f"give lengths up to {longest}",
            )
        if n < plan.shortest:
            raise SettingError(
                f"measure a prompt of {n} tokens",
                f"with a tail of {plan.tail} and {plan.leading} leading rows nothing of it would be filled",
                f"give lengths of {plan.shortest} or more, or a shorter --tail",
            )
        if n > ids.shape[1]:
            raise PromptError(
                f"measure a prompt of {n} tokens",
                f"the text has only {ids.shape[1]}",
                "give more text with --texts",
            )


def setting_of(plan: FillPlan, shape: ModelShape, selected: int = 0) -> Setting:
    """A plan as the cost model's setting. The engine applies no map in the split layer: its input is known.

    Where several selectors read attention, their query rows are added up.

    Args:
        selected: how many prefix rows its selectors chose beyond the leading ones; only a run knows.
    """
    parts = list(_parts(plan.rows))
    scores = [part for part in parts if part.attends and not part.probes]
    return Setting(
        plan.split,
        plan.tail,
        selected,
        plan.leading,
        fill="exact" if plan.fill.name == "true" else plan.fill.name,
        map_at_split=False,
        **_form(plan),
        probe=sum(getattr(part, "queries", 0) for part in parts if part.probes),
        score_rows=sum(
            getattr(part, "window", 0) * (1 + getattr(part, "baseline", False)) for part in scores
        ),
        score_layers=max((_layers(part, plan, shape) for part in scores), default=0),
        value_rescale=_window(plan, ValueRescale),
        key_rescale=_window(plan, KeyRescale),
    )


def _form(plan: FillPlan) -> dict[str, Any]:
    """What the maps are, of a plan that has some."""
    maps = getattr(plan.fill, "maps", None)
    if maps is None:
        return {}
    reduced = 0 if maps.down is None else maps.down.shape[0]
    return {"blocks": maps.reading.blocks, "rank": reduced, "gives": maps.reading.gives}


def _parts(selector: Any) -> Iterator[Any]:
    """A selector, the selectors and scores in it, and those that set its budget."""
    if hasattr(selector, "probes"):
        yield selector
    if getattr(selector, "budget", None) == "27b":
        yield from _parts(BASE_RULES)
    if is_dataclass(selector):
        for each in fields(selector):
            value = getattr(selector, each.name)
            for inner in value if isinstance(value, tuple) else (value,):
                yield from _parts(inner)


def _layers(part: Any, plan: FillPlan, shape: ModelShape) -> int:
    """The number of layers below the split whose attention a selector reads."""
    below = [i for i, layer in enumerate(shape.costs[: plan.split]) if layer.value]
    named = getattr(part, "layers", None) or [i for i in below if i in REFERENCE_LAYERS] or below
    return len(named)


def _window(plan: FillPlan, kind: type[ValueRescale] | type[KeyRescale]) -> int:
    return max((c.window for c in plan.corrections if isinstance(c, kind) and c.strength), default=0)


def ceilings(model: Any, plan: FillPlan, n: int, selected: int = 0) -> tuple[float, float]:
    """The speedups that multiply-accumulates and layer passes allow at n tokens, ``selected`` of them chosen."""
    shape = ModelShape.from_config(model.config)
    return macs_ceiling(shape, n, setting_of(plan, shape, selected)), layer_pass_ceiling(
        n, plan.split, plan.tail, shape.layers
    )


def table(rows: Sequence[Ttft]) -> Table:
    """The measurement for a terminal."""
    out = Table(title="Time to first token, medians", title_justify="left")
    for name in (
        "tokens",
        "rows exact",
        "exact s",
        "filled s",
        "speedup",
        "MAC ceiling",
        "measured / counted",
        "layer-pass ceiling",
    ):
        out.add_column(name, justify="right")
    for r in rows:
        out.add_row(
            f"{r.tokens:,}",
            f"{r.exact_rows:,}",
            f"{statistics.median(r.exact):.2f}",
            f"{statistics.median(r.filled):.2f}",
            f"{r.speedup:.2f}x",
            f"{r.macs_ceiling:.2f}x",
            f"{r.measured_over_counted:.2f}",
            f"{r.layer_pass_ceiling:.2f}x",
        )
    return out


def to_json(model: Any, plan: FillPlan, rows: Sequence[Ttft]) -> dict[str, Any]:
    """The measurement with all that made it."""
    return {
        "model": model.config._name_or_path,
        "plan": plan.to_json(),
        "lengths": [r.to_json() for r in rows],
        "environment": environment(model.device),
    }


def picture(rows: Sequence[Ttft], path: str | Path, title: str) -> None:
    """Seconds of both arms, and the speedup under its ceilings, over prompt length.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    seconds, ratio = figure.subplots(1, 2)
    n = [r.tokens for r in rows]
    for name, values in (("exact", [r.exact for r in rows]), ("filled", [r.filled for r in rows])):
        seconds.plot(n, [statistics.median(v) for v in values], "o-", label=name)
        seconds.vlines(n, [min(v) for v in values], [max(v) for v in values], alpha=0.4)
    seconds.set(xlabel="prompt tokens", ylabel="seconds to first token", ylim=(0, None), title=title)
    seconds.legend()
    ratio.plot(n, [r.speedup for r in rows], "o-", label="measured")
    ratio.plot(n, [r.macs_ceiling for r in rows], "--", label="multiply-accumulate ceiling")
    ratio.plot(n, [r.layer_pass_ceiling for r in rows], ":", label="layer-pass ceiling")
    ratio.axhline(1.0, color="grey", linewidth=0.8)
    ratio.set(xlabel="prompt tokens", ylabel="speedup", title="exact over filled")
    ratio.legend()
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=150)
