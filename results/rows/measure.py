"""What each selector brings back, and at what cost (paper 2.4, 3.1): retrieval from filled rows, and the tail's loss.

    python results/rows/measure.py smollm2-07 [--prompts 4] [--arms "exact;random 5 %"] [--loss]

Prompts are `ridgefill.eval.haystack`'s; all arms get the same ones. Results go to results/rows/<setting>.json after
every arm, and what is there is not measured again. `table.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ridgefill.bench.environment import environment
from ridgefill.compat import cache_kwarg
from ridgefill.embedded import code_texts, default_model, doc_texts, gemma_model, held_out, texts
from ridgefill.eval.documents import held_out_documents
from ridgefill.eval.haystack import Haystack, Item, prose, retrieved, ruler_score
from ridgefill.eval.loss import TailLoss, tail_nll
from ridgefill.files import write_json
from ridgefill.fit import fit
from ridgefill.load import load_model
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.plan import make_plan
from ridgefill.prefill import prefill

HERE = Path(__file__).parent
MAPS = HERE.parent.parent / ".cache" / "rows-maps"
TOKENS, TAIL = 2048, 512
SETTINGS = ("smollm2-07", "smollm2-15", "gemma3-09")
SPLITS = {"smollm2": (7, 11, 15, 19), "gemma3": (4, 7, 9, 11)}  # nearest to depths 1/4, 3/8, 1/2, 5/8
FITTED = {"smollm2": 65536, "gemma3": 24576}  # tokens; a pass of Gemma takes three times as long
PROMPTS = 40  # of each cell; an arm may take every tenth of them
LOSS_TOKENS, LOSS_TAIL, LOSS_DOCUMENTS = 3072, 1024, 2
CELLS = ("noise-single", "noise-multikey", "prose-single", "prose-multikey")
EXTRA = ("prose-single-paraphrased",)  # the question shares no content word with the needle
ARMS: dict[str, str | None] = {
    "exact": None,
    "fill alone": "none",
    "spans 5 %": "spans(peak, 0.05)",
    "spans 2.5 %": "spans(peak, 0.025)",
    "spans 5 %, question hidden": "spans(peak(hidden=true), 0.05)",
    "spans 5 %, shared words": "spans(overlap, 0.05)",
    "spans 5 %, mean attention": "spans(attention, 0.05, pool=mean)",
    "spans 5 %, probe": "spans(probe(heads=max), 0.05)",
    "attention rows 5 %": "attention(0.05)",
    "attention rows 10 % (the paper)": "attention(0.10)",
    "attention rows 10 %, question hidden": "attention(0.10, hidden=true)",
    "probe 5 %": "probe(0.05)",
    "probe 10 %": "probe(0.10)",
    "random 5 %": "random(0.05)",
    "random 10 %": "random(0.10)",
    "longer tail 5 %": "tail(0.05)",
    "longer tail 10 %": "tail(0.10)",
    "protected tokens": "protected(0.25)",
    "lexical net": "lexical",
    "special tokens": "special",
    "the 27b preset": "27b",
}


def settings(name: str) -> tuple[Any, int]:
    """The model folder and the split of a setting such as smollm2-07."""
    model, split = name.rsplit("-", 1)
    return {"smollm2": default_model, "gemma3": gemma_model}[model](), int(split)


def maps_of(name: str, model: Any, tokenizer: Any, split: int) -> RidgeMaps:
    """The setting's maps; fitted if they are not there."""
    folder = MAPS / name.split("-")[0]
    if not (folder / f"split-{split:02d}").exists():
        splits = [s for s in SPLITS[folder.name] if not (folder / f"split-{s:02d}").exists()]
        fit(
            model, tokenizer, list(texts().values()), splits, folder, tokens=FITTED[folder.name], form="plain"
        )
    return RidgeMaps.load(folder / f"split-{split:02d}")


def plan_words(arm: str) -> dict[str, Any]:
    """An arm as `prefill` takes it."""
    words = ARMS[arm]
    if words is None:
        return {"fill": "exact"}
    return {"preset": words} if words == "27b" else {"rows": words}


def items_of(cell: str, tokenizer: Any, count: int, maps: RidgeMaps) -> list[Item]:
    """The prompts of a cell."""
    hay, needles, *rest = cell.split("-")
    kind = Haystack(
        tokens=TOKENS, tail=TAIL, hay=hay, needles=needles, wording=rest[0] if rest else "ruler", seed=7
    )
    return kind.items(tokenizer, count, prose(maps.provenance["fitted_documents"]) if hay == "prose" else ())


def answered_in_text(model: Any, tokenizer: Any, item: Item, cache: Any) -> bool:
    """Whether RULER's scorer finds the answer in 24 greedy tokens: a base model may put other words first."""
    ids = item.ids.to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **cache_kwarg(cache)
    )
    return ruler_score(tokenizer.decode(out[0, ids.shape[1] :]), item.answers) == 1


def measure(
    model: Any, tokenizer: Any, maps: RidgeMaps, items: list[tuple[int, Item]], arm: str
) -> dict[str, Any]:
    """Retrieval of one arm, prompt by prompt, with rows run exactly and seconds of the prefill."""
    found = []
    for index, item in track(items, description=arm, transient=True):
        start = time.perf_counter()
        words = plan_words(arm)
        cache = prefill(
            model,
            item.ids,
            maps,
            tail=TAIL,
            split=maps.split,
            tokenizer=tokenizer,
            question=item.question,
            **words,
        )
        seconds = time.perf_counter() - start
        found.append(
            {
                "item": index,
                "found": answered_in_text(model, tokenizer, item, cache)
                if tokenizer.chat_template is None
                else retrieved(model, item, cache),
                "selected": cache.stats.selected,
                "prefill_s": round(seconds, 3),
                "depth": item.depth,
            }
        )
    return {"arm": arm, "words": plan_words(arm), "prompts": found}


def measure_loss(model: Any, tokenizer: Any, maps: RidgeMaps, documents: list[Any], arm: str) -> Any:
    """The tail's loss of one arm, document by document: first and last 512 tokens, and all."""
    decoder, words = Decoder(model), plan_words(arm)
    if "hidden" in str(words.get("rows")):
        return None  # a document asks no question that could be hidden
    plan = make_plan(decoder.n_layers, maps, tail=LOSS_TAIL, split=maps.split, **words)
    if plan.fill_is_exact:
        plan = replace(plan, rows=None, corrections=())
    return [vars(TailLoss.of(tail_nll(decoder, plan, ids, tokenizer))) for ids in documents]


def main() -> None:
    """All cells and arms of one setting, and the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"prompts of each cell, of {PROMPTS}")
    parser.add_argument("--arms", default="", help="names of arms, separated by semicolons; all by default")
    cells = f"names of cells, separated by semicolons, of: {'; '.join((*CELLS, *EXTRA))}"
    parser.add_argument("--cells", default="", help=cells)
    parser.add_argument("--documents", type=int, default=LOSS_DOCUMENTS, help="of each domain, for the loss")
    parser.add_argument("--loss", action="store_true", help="measure the loss instead")
    given = parser.parse_args()
    folder, split = settings(given.setting)
    model, tokenizer = load_model(folder)
    maps = maps_of(given.setting, model, tokenizer, split)
    path = HERE / f"{given.setting}.json"
    done = json.loads(path.read_text()) if path.exists() else {"cells": {}, "loss": {}}
    wanted = [a for a in ARMS if not given.arms or a in given.arms.split(";")]
    done |= {
        "command": f"python results/rows/measure.py {given.setting}",
        "tokens": TOKENS,
        "tail": TAIL,
        "split": split,
        "loss_setting": {"tokens": LOSS_TOKENS, "tail": LOSS_TAIL},
        "environment": environment(model.device),
    }
    if given.loss:
        unseen = {"prose": held_out(), "code and docs": [doc_texts(), code_texts()]}
        fitted = set(maps.provenance.get("fitted_documents", ()))
        for domain, sources in unseen.items():
            documents = held_out_documents(
                tokenizer, sources, LOSS_TOKENS, given.documents, fitted=fitted, seed=0
            )
            kept = done["loss"].setdefault(domain, {})
            for arm in wanted:
                if arm not in kept and (found := measure_loss(model, tokenizer, maps, documents, arm)):
                    kept[arm] = found
                    write_json(path, done)
                    print(domain, arm, [round(d["all"], 4) for d in found], flush=True)
        return
    for cell in given.cells.split(";") if given.cells else CELLS:
        items = list(enumerate(items_of(cell, tokenizer, PROMPTS, maps)))[:: PROMPTS // given.prompts]
        kept = done["cells"].setdefault(cell, {})
        for arm in wanted:
            if len(kept.get(arm, {}).get("prompts", ())) >= given.prompts:
                continue
            kept[arm] = measure(model, tokenizer, maps, items, arm)
            write_json(path, done)
            hits = [p["found"] for p in kept[arm]["prompts"]]
            print(f"{cell}  {arm}: {sum(hits)} of {len(hits)}", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
