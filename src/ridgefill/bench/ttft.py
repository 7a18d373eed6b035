"""Time to first token, exact and filled interleaved in one run (paper 4.4), beside the ceilings of 2.5."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ridgefill.bench.cost import ModelShape, Setting, layer_pass_ceiling, macs_ceiling
from ridgefill.bench.environment import environment
from ridgefill.devices import wait
from ridgefill.engines.transformers import Filling
from ridgefill.errors import PromptError, SettingError
from ridgefill.files import whole
from ridgefill.plan import FillPlan


@dataclass
class Ttft:
    """Both arms at one prompt length.

    Attributes:
        tokens: prompt length.
        exact, filled: seconds of every repetition, in the order measured.
        stages: median seconds of the filled arm's stages.
        macs_ceiling, layer_pass_ceiling: the speedup that the two counts of 2.5 allow.
    """

    tokens: int
    macs_ceiling: float
    layer_pass_ceiling: float
    exact: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Median exact seconds over median filled seconds."""
        return statistics.median(self.exact) / statistics.median(self.filled)

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
) -> list[Ttft]:
    """Times both arms at every length, one after the other in each repetition.

    Args:
        ids: [1, n] tokens of real text, as long as the longest length.
        repeats: measured repetitions.
        warm_up: repetitions before them that are thrown away.
        tick: called after each repetition.

    Raises:
        PromptError, SettingError: a length that the text, the model's context or the plan does not allow.
    """
    check_lengths(model, plan, ids, lengths)
    rows = []
    for n in lengths:
        row = Ttft(n, *ceilings(model, plan, n))
        stages: list[dict[str, float]] = []
        for repetition in range(warm_up + repeats):
            exact = first_token(model, ids[:, :n])[1]
            with Filling(model, plan, min_tokens=plan.shortest) as filling:
                filled = first_token(model, ids[:, :n])[1]
            tick()
            if repetition >= warm_up:
                row.exact.append(exact)
                row.filled.append(filled)
                stages.append(filling.stats.seconds if filling.stats else {})
        row.stages = {name: statistics.median(s.get(name, 0.0) for s in stages) for name in stages[0]}
        rows.append(row)
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


def setting_of(plan: FillPlan) -> Setting:
    """A plan as the cost model's setting. The engine applies no map in the split layer: its input is known."""
    kind = "exact" if plan.fill.name == "true" else plan.fill.name
    return Setting(plan.split, plan.tail, leading=plan.leading, fill=kind, map_at_split=False)


def ceilings(model: Any, plan: FillPlan, n: int) -> tuple[float, float]:
    """The speedups that multiply-accumulates and layer passes allow at n tokens."""
    shape = ModelShape.from_config(model.config)
    return macs_ceiling(shape, n, setting_of(plan)), layer_pass_ceiling(
        n, plan.split, plan.tail, shape.layers
    )


def table(rows: Sequence[Ttft]) -> Table:
    """The measurement for a terminal."""
    out = Table(title="Time to first token, medians", title_justify="left")
    for name in ("tokens", "exact s", "filled s", "speedup", "MAC ceiling", "layer-pass ceiling"):
        out.add_column(name, justify="right")
    for r in rows:
        out.add_row(
            f"{r.tokens:,}",
            f"{statistics.median(r.exact):.2f}",
            f"{statistics.median(r.filled):.2f}",
            f"{r.speedup:.2f}x",
            f"{r.macs_ceiling:.2f}x",
            f"{r.layer_pass_ceiling:.2f}x",
        )
    return out


def to_json(model: Any, plan: FillPlan, rows: Sequence[Ttft]) -> dict[str, Any]:
    """The measurement with all that made it."""
    return {
        "model": model.config._name_or_path,
        "plan": {"fill": plan.fill.name, "split": plan.split, "tail": plan.tail, "leading": plan.leading},
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
