"""Measures fills, corrections and row selectors on the tiny Gated DeltaNet hybrid of ``tests/data/hybrid``.

    python results/hybrid/measure.py

Fits maps at both splits on the calibration texts, then takes every arm's recall of facts that stand only in filled
rows, and its loss on the tail of documents never trained on. Every arm's figures go to a JSON as soon as they are
there; a run that was stopped goes on with the arms that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")

import numpy as np
import torch
from data import FORM, Maker, Planted, key_words, spread
from torch import Tensor
from transformers.utils import logging

from ridgefill import RidgeMaps, embedded, fit, load_model, prefill
from ridgefill.bench.environment import environment
from ridgefill.compat import cache_kwarg
from ridgefill.errors import RidgeFillError
from ridgefill.eval.loss import TailLoss, tail_nll
from ridgefill.files import whole_folder, write_text
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from ridgefill.rows.base import Prompt, Selector

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / "tests" / "data" / "hybrid"
SPLITS = {2: "1/4", 4: "1/2"}  # of 8 layers
TOKENS, LEADING = 1280, 16
TAIL = {"recall": 128, "loss": 512}
SCORED = 128  # tokens at each end of the tail whose loss is given apart
LAMBDAS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PROVENANCE = (
    "tokens",
    "rows",
    "lambda_rel",
    "heldout_mean",
    "heldout_identity_mean",
    "explained_variance",
    "terminal",
)
WINDOW = 64  # tail rows that the rescales measure on


@dataclass(frozen=True)
class Arm:
    """One row of the table; ``rows="fact"`` makes the asked fact's own rows exact.

    ``facts``: its maps were fitted on prompts with planted facts too.
    """

    fill: str
    rows: str = ""
    corrections: str = ""
    facts: bool = False

    @property
    def name(self) -> str:
        """As the table calls it."""
        fill = f"{self.fill} (facts in the calibration)" if self.facts else self.fill
        return " + ".join(part for part in (fill, self.rows, self.corrections) if part)


VALUE, KEY, TERMINAL = f"value_rescale({WINDOW})", f"key_rescale({WINDOW})", "terminal_state"
ROWS = (
    "attention(0.10)",
    "attention(0.10, hidden=True)",
    "probe(0.10)",
    "protected",
    "lexical",
    "digits",
    "random(0.10)",
    "tail(0.10)",
    "spans(attention, 0.05, spans=lines)",
    "spans(overlap, 0.05, spans=lines)",
    "spans(probe, 0.05, spans=lines)",
    "random(0.05)",
    "fact",
)
ARMS = (
    Arm("exact"),
    Arm("none"),
    Arm("identity"),
    Arm("ridge"),
    Arm("identity", corrections=VALUE),
    Arm("identity", corrections=KEY),
    *(Arm("ridge", corrections=c) for c in (VALUE, KEY, TERMINAL, f"{VALUE} | {TERMINAL}")),
    *(Arm("ridge", rows) for rows in ROWS),
    Arm("identity", "fact"),
    *(Arm("identity", rows) for rows in ("attention(0.10)", "digits", "spans(overlap, 0.05, spans=lines)")),
    Arm("ridge", facts=True),
    Arm("ridge", corrections=f"{VALUE} | {TERMINAL}", facts=True),
    Arm("ridge", "attention(0.10)", facts=True),
    Arm("ridge", "spans(overlap, 0.05, spans=lines)", f"{VALUE} | {TERMINAL}"),
)


@dataclass(frozen=True)
class FactRows(Selector):
    """The rows of one span: what a selector that knew the answer's place would choose."""

    first: int
    stop: int

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        chosen[self.first : self.stop] = True
        return chosen


@dataclass(frozen=True)
class Bench:
    """The model and what it is measured on."""

    model: Any
    tokenizer: Any
    prompts: dict[str, list[Planted]]
    documents: list[Tensor]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--prompts", type=int, default=24, help="with a planted fact, for each kind of filler"
    )
    parser.add_argument("--documents", type=int, default=8, help="windows of text never trained on")
    parser.add_argument("--tokens", type=int, default=65536, help="calibration tokens")
    parser.add_argument("--maps", type=Path, default=Path(".cache/hybrid/maps"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only write the table again")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    if not args.table:
        bench = make_bench(args.model, args.prompts, args.documents)
        maps = fitted(bench, args)
        for split in SPLITS:
            measure(bench, split, {facts: found[split] for facts, found in maps.items()}, args)
    write_text(args.out / "README.md", page(args.out))


def make_bench(folder: Path, prompts: int, documents: int) -> Bench:
    """Loads the model; makes prompts about held-out words and numbers, in held-out text and in noise."""
    model, tokenizer = load_model(folder, device="cpu")
    held = [path.read_text(encoding="utf-8") for path in embedded.held_out()]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in held]
    texts = embedded.texts()
    files = sorted(texts["speeches"].glob("*.txt")) + sorted(texts["plays"].glob("*.md"))
    maker = Maker(tokenizer, np.concatenate([np.array(i, dtype=np.uint16) for i in ids]), key_words(files))
    made = {
        filler: spread(
            maker, 7, prompts, TOKENS, form=FORM["plain"], filler=filler, tail=TAIL["recall"], leading=LEADING
        )
        for filler in ("text", "noise")
    }
    windows = [w for i in ids for w in torch.tensor(i).split(TOKENS) if len(w) == TOKENS]
    step = max(1, len(windows) // documents)
    return Bench(model, tokenizer, made, [w[None] for w in windows[::step][:documents]])


def fitted(bench: Bench, args: argparse.Namespace) -> dict[bool, dict[int, RidgeMaps]]:
    """Maps of both splits, fitted on the model's own training texts: without and with planted facts."""
    texts = embedded.texts()
    sources = {False: [texts["speeches"], texts["plays"]]}
    sources[True] = [*sources[False], fact_texts(bench.tokenizer, args.maps / "fact-texts")]
    found = {}
    for facts, files in sources.items():
        folder = args.maps / ("facts" if facts else "text")
        if not all((folder / f"split-{split:02d}").is_dir() for split in SPLITS):
            fit(
                bench.model,
                bench.tokenizer,
                files,
                list(SPLITS),
                folder,
                tokens=args.tokens,
                length=TOKENS,
                lambda_grid=LAMBDAS,
                form="plain",
            )
        found[facts] = {split: RidgeMaps.load(folder / f"split-{split:02d}") for split in SPLITS}
    return found


def fact_texts(tokenizer: Any, folder: Path) -> Path:
    """Texts as the model was trained on: facts and questions about words and numbers that are never measured on."""
    if not folder.is_dir():
        texts = embedded.texts()
        files = sorted(texts["speeches"].glob("*.txt"))
        ids = tokenizer([path.read_text(encoding="utf-8") for path in files[:20]], add_special_tokens=False)
        stream = np.concatenate([np.array(i, dtype=np.uint16) for i in ids["input_ids"]])
        maker = Maker(tokenizer, stream, key_words(files + sorted(texts["plays"].glob("*.md"))))
        with whole_folder(folder) as made:
            for i in range(40):
                sequence, _ = maker.training(random.Random(f"calibration {i}"), TOKENS, hard=True)
                (made / f"{i:02d}.txt").write_text(tokenizer.decode(sequence), encoding="utf-8")
    return folder


def measure(bench: Bench, split: int, maps: dict[bool, RidgeMaps], args: argparse.Namespace) -> None:
    """Every arm that the split's JSON lacks."""
    place = args.out / f"split-{split}.json"
    kept = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {"arms": {}}
    about = {
        **environment(torch.device("cpu")),
        "split": split,
        "layers": bench.model.config.layer_types,
        "prompt_tokens": TOKENS,
        "leading": LEADING,
        "tail": TAIL,
        "scored_at_each_end": SCORED,
        "calibration": {
            "with facts" if facts else "text": {key: found.provenance.get(key) for key in PROVENANCE}
            for facts, found in maps.items()
        },
        "depths": "even, one prompt each",
    }
    for arm in ARMS:
        if arm.name in kept["arms"]:
            continue
        kept["arms"][arm.name] = one(bench, arm, split, maps[arm.facts])
        write_text(place, json.dumps({**about, "arms": kept["arms"]}, indent=1) + "\n")
        print(split, arm.name, brief(kept["arms"][arm.name]), flush=True)


def one(bench: Bench, arm: Arm, split: int, maps: RidgeMaps) -> dict[str, Any]:
    """One arm's recall and loss, or why it cannot be had."""
    if arm.fill == "exact":
        maps_or_none, at = None, split
    else:
        maps_or_none, at = (maps, None) if arm.fill == "ridge" else (None, split)
    try:
        result: dict[str, Any] = {"recall": {}}
        for filler, prompts in bench.prompts.items():
            found, selected = recall(bench, arm, at, maps_or_none, prompts)
            result["recall"][filler] = found
            result.setdefault("selected_rows", {})[filler] = selected
        if arm.rows != "fact":
            result["loss"] = loss(bench, arm, at, maps_or_none)
        return result
    except RidgeFillError as error:
        return {"refused": str(error)}


@torch.no_grad()
def recall(
    bench: Bench, arm: Arm, split: int | None, maps: RidgeMaps | None, prompts: Sequence[Planted]
) -> tuple[list[int], float]:
    """Which prompts are answered right (1) or not (0), greedily and whole; mean of the rows selected."""
    found, selected = [], 0
    for prompt in prompts:
        n = prompt.ids.shape[1]
        rows: Any = FactRows(*prompt.asked) if arm.rows == "fact" else arm.rows or "none"
        cache = prefill(
            bench.model,
            prompt.ids,
            maps,
            fill=arm.fill,
            split=split,
            tail=TAIL["recall"],
            leading=LEADING,
            rows=rows,
            corrections=arm.corrections,
            tokenizer=bench.tokenizer,
            question=prompt.question,
        )
        selected += cache.stats.selected
        ids = torch.cat([prompt.ids[0, cache.get_seq_length() :], prompt.answer[:-1]])[None]
        positions = torch.arange(cache.get_seq_length(), n + len(prompt.answer) - 1)[None]
        logits = bench.model(
            ids, position_ids=positions, logits_to_keep=len(prompt.answer), **cache_kwarg(cache)
        ).logits[0]
        found.append(int((logits.argmax(-1) == prompt.answer).all()))
    return found, selected / len(prompts)


def loss(bench: Bench, arm: Arm, split: int | None, maps: RidgeMaps | None) -> dict[str, list[float]]:
    """Nats per token of each document's tail: its first and last tokens and all of it."""
    decoder = Decoder(bench.model)
    plan: FillPlan = make_plan(
        decoder.n_layers,
        maps,
        fill=arm.fill,
        split=split,
        tail=TAIL["loss"],
        leading=LEADING,
        rows=arm.rows or "none",
        corrections=arm.corrections,
    )
    found = [TailLoss.of(tail_nll(decoder, plan, ids, bench.tokenizer), SCORED) for ids in bench.documents]
    return {part: [round(getattr(f, part), 5) for f in found] for part in ("first", "last", "all")}


def brief(result: dict[str, Any]) -> str:
    """One arm in a line."""
    if "refused" in result:
        return result["refused"]
    shares = {k: f"{sum(v)}/{len(v)}" for k, v in result["recall"].items()}
    return f"{shares} {[round(sum(v) / len(v), 4) for v in result.get('loss', {}).values()]}"


def page(folder: Path) -> str:
    """The table as Markdown."""
    lines = ["# A tiny Gated DeltaNet hybrid, measured", ""]
    for split, depth in SPLITS.items():
        place = folder / f"split-{split}.json"
        if place.exists():
            lines += section(json.loads(place.read_text(encoding="utf-8")), split, depth)
    notes = folder / "NOTES.md"
    return "\n".join(lines) + "\n" + (notes.read_text(encoding="utf-8") if notes.exists() else "")


def section(found: dict[str, Any], split: int, depth: str) -> list[str]:
    """One split's table."""
    exact = found["arms"]["exact"]
    late = ", ".join(
        f"{i} {kind.removesuffix('_attention')}" for i, kind in enumerate(found["layers"]) if i >= split
    )
    lines = [
        f"## Split {split} ({depth}; late layers: {late})",
        "",
        "| arm | rows selected of the prefix | recall in text | recall in noise "
        f"| loss over exact, tail's first {SCORED} | last {SCORED} | all |",
        "|---|---|---|---|---|---|---|",
    ]
    prefix = found["prompt_tokens"] - found["tail"]["recall"]
    for title, arm in found["arms"].items():
        name = title.replace("|", "and")  # a bar would end the cell
        if "refused" in arm:
            lines.append(f"| {name} | | refused | | | | |")
            continue
        chosen = sum(arm["selected_rows"].values()) / len(arm["selected_rows"]) / prefix
        cells = [f"{sum(arm['recall'][f])} of {len(arm['recall'][f])}" for f in ("text", "noise")]
        for part in ("first", "last", "all"):
            if "loss" not in arm:
                cells.append("")
                continue
            delta = np.subtract(arm["loss"][part], exact["loss"][part])
            error = delta.std(ddof=1) / len(delta) ** 0.5
            plain = f"{np.mean(exact['loss'][part]):.3f}"
            cells.append(plain if name == "exact" else f"{delta.mean():+.4f} ±{error:.4f}")
        lines.append(f"| {name} | {chosen:.1%} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"`{found['command']}`, {found['date'][:10]}, torch {found['torch']}, transformers "
        f"{found['transformers']}, {found['device']}, {found['threads']} thread(s).",
        "",
    ]
    return lines


if __name__ == "__main__":
    main()
