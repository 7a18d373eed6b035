"""The whole main job on the embedded default model: fit, run a long prompt both ways, say what it gave and cost."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from ridgefill import embedded
from ridgefill.answer import Answer, answer, prompt_ids
from ridgefill.bench import ttft
from ridgefill.engines.transformers import Filling
from ridgefill.eval.loss import TailLoss, compare
from ridgefill.files import whole, write_json
from ridgefill.fill import Exact, Fill, Identity
from ridgefill.fit import fit
from ridgefill.load import load_model
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan

TAIL, SPLIT, LEADING = 1024, 0.5, 16
FIT_TOKENS = 49152
REPEATS = 2


@dataclass(frozen=True)
class Result:
    """What the demo measured on its one prompt."""

    plan: FillPlan
    prompt_tokens: int
    question: str
    answers: dict[str, Answer]
    timing: ttft.Ttft
    losses: dict[str, TailLoss]
    filled_rows: int

    def cost(self, arm: str) -> float:
        """Nats per tail token above exact."""
        return self.losses[arm].minus(self.losses["exact"]).all

    def to_json(self, model: Any) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            **ttft.to_json(model, self.plan, [self.timing]),
            "prompt_tokens": self.prompt_tokens,
            "filled_rows": self.filled_rows,
            "question": self.question,
            "answers": {name: vars(a) for name, a in self.answers.items()},
            "tail_loss": {name: vars(loss) for name, loss in self.losses.items()},
            "delta_nll": {name: vars(v.minus(self.losses["exact"])) for name, v in self.losses.items()},
        }


def run(out: Path, console: Console) -> Result:
    """Runs the demo; writes ``maps/``, ``demo.json`` and ``demo.png`` under ``out``.

    Raises:
        RidgeFillError: the packages cannot be fetched, or the disk is full; by name.
    """
    console.rule("1 of 4  The model and the texts")
    gguf = embedded.default_model()
    model, tokenizer = load_model(gguf)
    texts = embedded.texts()
    console.print(
        f"{model.config._name_or_path}: {Decoder(model).n_layers} layers; calibration: {', '.join(texts)}"
    )
    console.rule("2 of 4  Fit: one affine map per late layer, in closed form")
    maps = _maps(model, tokenizer, list(texts.values()), out / "maps", console)
    plan = make_plan(Decoder(model).n_layers, maps, tail=TAIL, leading=LEADING)
    document, question = embedded.demo_prompt()
    ids = prompt_ids(tokenizer, f"{document}\n\n{question}")
    console.rule(f"3 of 4  A prompt of {ids.shape[1]:,} tokens, exact and filled in turn")
    result = _measure(model, tokenizer, plan, ids, question, console)
    console.rule("4 of 4  What it gave and what it cost")
    console.print(ttft.table([result.timing]))
    for line in words(result):
        console.print(line)
    write_json(out / "demo.json", result.to_json(model))
    picture(result, out / "demo.png")
    console.print(f"Written: {out / 'demo.json'}, {out / 'demo.png'}, maps in {out / 'maps'}", markup=False)
    return result


def _maps(model: Any, tokenizer: Any, texts: list[Path], out: Path, console: Console) -> RidgeMaps:
    """The demo's maps, fitted once; a second run takes them from the disk if they still fit the model."""
    split = make_plan(Decoder(model).n_layers, fill="identity", split=SPLIT).split
    folder = out / f"split-{split:02d}"
    if folder.exists():
        maps = RidgeMaps.load(folder)
        maps.check_model(model, tokenizer)
        console.print(f"Already fitted: {folder} (remove it to fit again).", markup=False)
        return maps
    return fit(model, tokenizer, texts, [split], out, tokens=FIT_TOKENS, leading=LEADING)[split]


def _measure(
    model: Any, tokenizer: Any, plan: FillPlan, ids: Tensor, question: str, console: Console
) -> Result:
    answers: dict[str, Answer] = {}
    with console.status("answering, exact"):
        answers["exact"] = answer(model, tokenizer, ids, max_new_tokens=48)
    with console.status("answering, filled"), Filling(model, plan, min_tokens=plan.shortest) as filling:
        answers["filled"] = answer(model, tokenizer, ids, max_new_tokens=48)
    for name, each in answers.items():
        console.print(f"[bold]{name}[/bold] ({each.first_token_seconds:.1f} s to the first token):")
        console.print(textwrap.indent(textwrap.fill(each.text, console.width - 6), "    "), markup=False)
    with console.status(f"timing both, interleaved, {REPEATS} times"):  # the answers have warmed up
        timing = ttft.measure(model, plan, ids, [ids.shape[1]], repeats=REPEATS, warm_up=0)[0]
    arms: dict[str, Fill] = {"exact": Exact(), "identity": Identity(), "filled": plan.fill}
    plans = {name: FillPlan(arm, plan.split, plan.tail, plan.leading) for name, arm in arms.items()}
    with console.status("loss of the tail's tokens under exact, identity and ridge"):
        losses = compare(Decoder(model), plans, [ids])[0]
    rows = filling.stats.filled if filling.stats else 0
    return Result(plan, ids.shape[1], question, answers, timing, losses, rows)


def words(result: Result) -> list[str]:
    """The result in plain words."""
    t, same = result.timing, result.answers["exact"].text == result.answers["filled"].text
    return [
        f"First token {t.speedup:.2f} times sooner: {statistics.median(t.exact):.1f} s exact, "
        f"{statistics.median(t.filled):.1f} s filled. What it could have been: {t.macs_ceiling:.2f} by the count of "
        f"multiply-accumulates, {t.layer_pass_ceiling:.2f} by the count of layers.",
        f"{result.filled_rows:,} of {result.prompt_tokens:,} prompt rows were filled from layer "
        f"{result.plan.split} up; the last {result.plan.tail:,} and the first {result.plan.leading} ran exactly.",
        f"Cost: the loss of the last {result.plan.tail:,} tokens rose by {result.cost('filled'):+.3f} nats a token "
        f"(POP's identity fill at the same place: {result.cost('identity'):+.3f}). "
        f"The two answers are {'the same' if same else 'different'}.",
        "What stands only in filled rows can be lost although the loss hardly moves: read "
        "docs/how-it-works.md before you rely on it, and `ridgefill check` for your own model.",
    ]


def picture(result: Result, path: Path) -> None:
    """Stage by stage, where the time of both arms goes; and the loss beside it.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    t = result.timing
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    seconds, loss = figure.subplots(1, 2, width_ratios=[2, 1])
    seconds.barh("exact", statistics.median(t.exact), color="tab:gray")
    left = 0.0
    for name, value in t.stages.items():
        seconds.barh("filled", value, left=left, label=name)
        left += value
    seconds.set(xlabel="seconds to first token", title=f"{t.tokens:,} tokens: {t.speedup:.2f}x")
    seconds.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
    names = ("identity", "filled")
    loss.bar(names, [result.cost(n) for n in names], color=["tab:orange", "tab:blue"])
    loss.axhline(0, color="black", linewidth=0.8)
    loss.set(ylabel="nats per token above exact", title="loss of the tail")
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=150)
