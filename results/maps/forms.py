"""The forms of maps side by side, on documents and prompts that chose none of them (docs/decisions/0009).

    python results/maps/forms.py declare           # once, before anything runs
    python results/maps/forms.py smollm2|gemma3|hybrid [--part loss|needles|time]
    python results/maps/forms.py page              # README.md from what was found

Every measurement names the ledger entry that declared it, and goes on where a stopped one was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from rich.progress import Progress

from ridgefill import RidgeMaps, embedded, fit, load_model
from ridgefill.bench.cost import ModelShape
from ridgefill.bench.environment import environment
from ridgefill.bench.ttft import ceilings, first_token
from ridgefill.engines.transformers import Filling
from ridgefill.eval.arms import Arm, parse_arms
from ridgefill.eval.haystack import Haystack, Item, prose
from ridgefill.eval.losses import documents_of, measure_losses
from ridgefill.eval.retrieval import measure_retrieval
from ridgefill.eval.runs import open_run
from ridgefill.files import sha256_file, write_json
from ridgefill.fill import Ridge
from ridgefill.ledger import Ledger
from ridgefill.maps import AffineMap
from ridgefill.models.decoder import Decoder
from ridgefill.plan import make_plan

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "study"))
from study import ANSWER, CELLS, model_folder  # noqa: E402

LEDGER = HERE / "ledger.jsonl"
MAPS = ROOT / ".cache" / "maps-study"
FORMS = ("plain", "direct", "rich")
CLAIM, PREDICTION = (HERE / "PREDICTION.md").read_text().split("\n\n## Predictions\n\n")


@dataclass(frozen=True)
class Part:
    """One model's part.

    Attributes:
        splits: nearest to depths 1/4, 3/8, 1/2 and 5/8; ``half`` is the one at 1/2.
        fitted: calibration tokens.
        skipped: documents of each domain that chose the forms or were read before, and are left out.
        documents: of each domain after these.
        prompts: of each needle cell.
    """

    splits: tuple[int, ...]
    half: int
    fitted: int
    skipped: int
    documents: int
    prompts: int
    tokens: int = 2560
    tail: int = 768
    context: int = 768
    needle_tokens: int = 1024
    needle_tail: int = 256


PARTS = {
    "smollm2": Part((7, 11, 15, 19), 15, 65536, 3, 3, 6),
    "gemma3": Part((4, 7, 9, 11), 9, 24576, 2, 2, 2),
    "hybrid": Part((2, 3, 4, 5), 4, 65536, 6, 4, 0, tokens=1280, tail=512, context=256),
}
SEED = 23  # of the needles; the study's are 11
TIMED = 8192


def maps_of(name: str, model: Any, tokenizer: Any) -> dict[tuple[str, int], Path]:
    """(form, split) -> its folder, fitted if it is not there; one pass a form."""
    part, found = PARTS[name], {}
    for form in FORMS:
        folder = MAPS / name / form
        missing = [s for s in part.splits if not (folder / f"split-{s:02d}").exists()]
        if missing:
            fit(
                model,
                tokenizer,
                list(embedded.texts().values()),
                missing,
                folder,
                form=form,
                tokens=part.fitted,
            )
        found |= {(form, s): folder / f"split-{s:02d}" for s in part.splits}
    return found


def stored(maps: RidgeMaps, kind: str) -> RidgeMaps:
    """The maps as they are when they come back from int8 or Q8_0."""
    if kind == "int8":
        folder = MAPS / "int8" / maps.content_hash[:16]
        return RidgeMaps.load(maps.save(folder, "int8"))
    q8 = gguf.GGMLQuantizationType.Q8_0

    def back(weight: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), q8), q8))

    own = {i: AffineMap(back(m.weight), m.bias) for i, m in maps.maps.items()}
    down = None if maps.down is None else back(maps.down)
    return RidgeMaps(
        maps.split, own, maps.identity, maps.provenance, tokens=maps.tokens, reading=maps.reading, down=down
    )


def arms_of(name: str, model: Any, tokenizer: Any, tail: int) -> tuple[list[Arm], RidgeMaps]:
    """Every arm of a model's part."""
    part, decoder, folders = PARTS[name], Decoder(model), maps_of(name, model, tokenizer)
    words = [f"{form} {s}: ridge maps={folders[form, s]}" for s in part.splits for form in FORMS]
    if name == "smollm2":
        words.append(f"rich {part.half} spans: ridge rows=spans(peak,0.05) maps={folders['rich', part.half]}")
    arms = parse_arms("; ".join(words), decoder, split=0.5, tail=tail, leading=16)
    if name == "smollm2":
        by_name = {arm.name: arm for arm in arms}
        for form in ("plain", "rich"):
            base = by_name[f"{form} {part.half}"]
            for kind in ("int8", "q8_0"):
                fill = Ridge(stored(RidgeMaps.load(folders[form, part.half]), kind))
                plan = replace(base.plan(1 << 20), fill=fill)
                arms.append(
                    Arm(f"{form} {part.half} {kind}", lambda n, plan=plan: plan, f"{base.words} as {kind}")
                )
    first = RidgeMaps.load(folders["plain", part.splits[0]])
    return [replace(arm, words=arm.words.replace(f"{MAPS}/", "")) for arm in arms], first


def loss(name: str, entry: str) -> None:
    """Loss on documents that no map was fitted on and no form chosen by."""
    part = PARTS[name]
    model, tokenizer = load_model(model_folder(name))
    arms, maps = arms_of(name, model, tokenizer, part.tail)
    domains: dict[str, Sequence[str | Path]] = {"prose": embedded.held_out()}
    if name != "hybrid":
        domains |= {"documentation": [embedded.doc_texts()], "code": [embedded.code_texts()]}
    fitted, count = set(maps.provenance["fitted_documents"]), part.skipped + part.documents
    every = documents_of(tokenizer, domains, part.tokens, count, fitted=fitted, seed=0)
    documents = [d for d in every if int(d.item.split("/")[1]) >= part.skipped]
    documents.sort(key=lambda d: int(d.item.split("/")[1]))
    settings = {"tail": part.tail, "context": part.context, "documents": [d.item for d in documents]}
    run = open_run(HERE / name / "loss", "loss", settings, model, tokenizer, arms, None, part.tokens, entry)
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{name}, loss", total=len(arms) * len(documents))
        measure_losses(
            model, tokenizer, arms, documents, run,
            tail=part.tail, scored=min(512, part.tail // 2), context=part.context, tick=lambda: bar.advance(task),
        )  # fmt: skip
    run.finish()


def needles(name: str, entry: str) -> None:
    """Retrieval from filled rows."""
    part, items = PARTS[name], list[tuple[str, str, Item]]()
    model, tokenizer = load_model(model_folder(name))
    arms, maps = arms_of(name, model, tokenizer, part.needle_tail)
    arms = [
        arm for arm in arms if not arm.name.startswith("direct") and not arm.name.endswith(("int8", "q8_0"))
    ]
    text = prose(maps.provenance["fitted_documents"])
    for cell in CELLS:
        hay, kind = cell.split("-")
        made = Haystack(tokens=part.needle_tokens, tail=part.needle_tail, hay=hay, needles=kind, seed=SEED)
        found = made.items(tokenizer, part.prompts, text if hay == "prose" else ())
        items += [(f"{cell}/{i}", cell, item) for i, item in enumerate(found)]
    items.sort(key=lambda item: int(item[0].split("/")[1]))
    settings = {"tail": part.needle_tail, "items": [item for item, *_ in items], "seed": SEED}
    run = open_run(
        HERE / name / "needles", "needles", settings, model, tokenizer, arms, None, part.needle_tokens, entry
    )
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{name}, needles", total=len(arms) * len(items))
        measure_retrieval(
            model, tokenizer, arms, items, run, new_tokens=ANSWER, tick=lambda: bar.advance(task)
        )
    run.finish()


def timed(name: str, entry: str, repeats: int = 3) -> None:
    """Seconds to the first token at 8,192 tokens, tail 1,024: exact and each form, interleaved."""
    part = PARTS[name]
    model, tokenizer = load_model(model_folder(name))
    folders, shape = maps_of(name, model, tokenizer), ModelShape.from_config(model.config)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in embedded.held_out())
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TIMED]
    plans = {
        f"{form} {s}": make_plan(shape.layers, RidgeMaps.load(folders[form, s]), tail=1024)
        for s in (part.half,)
        for form in FORMS
    }
    seconds: dict[str, list[float]] = {key: [] for key in ("exact", *plans)}
    stages: dict[str, list[dict[str, float]]] = {key: [] for key in plans}
    for repeat in range(repeats + 1):  # the first one warms up
        for key in seconds:
            if key == "exact":
                spent = first_token(model, ids)[1]
            else:
                with Filling(model, plans[key], plans[key].shortest, tokenizer) as filling:
                    spent = first_token(model, ids)[1]
                if repeat and filling.stats is not None:
                    stages[key].append(dict(filling.stats.seconds))
            if repeat:
                seconds[key].append(spent)
    counted = {key: ceilings(model, plan, TIMED)[0] for key, plan in plans.items()}
    found = {"entry": entry, "command": f"python results/maps/forms.py {name} --part time", "tokens": TIMED}
    found |= {"tail": 1024, "seconds": seconds, "stages": stages, "macs_ceiling": counted}
    write_json(HERE / name / "time.json", found | {"environment": environment(ids.device)})


def declare() -> str:
    """Writes the claim and the predictions to the ledger, once; returns the entry's hash."""
    ledger = Ledger.open(LEDGER)
    known = next((e for e in ledger.entries() if e.said.get("claim") == CLAIM), None)
    if known is not None:
        return known.hash
    configuration = {
        name: {k: list(v) if isinstance(v, tuple) else v for k, v in vars(part).items()}
        for name, part in PARTS.items()
    }
    files = {path.name: sha256_file(path) for path in (HERE / "forms.py", HERE / "PREDICTION.md")}
    return ledger.declare(CLAIM, PREDICTION, configuration, files).hash


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("declare", "page", *PARTS))
    parser.add_argument("--part", choices=("loss", "needles", "time"))
    given = parser.parse_args()
    if given.what == "declare":
        print(declare())
    elif given.what == "page":
        from forms_page import write_page

        write_page(HERE)
    else:
        entry = declare()
        parts = {"loss": loss, "needles": needles, "time": timed}
        wanted = {"smollm2": parts, "gemma3": {"loss": loss, "needles": needles}, "hybrid": {"loss": loss}}
        for part, run in wanted[given.what].items():
            if given.part in (None, part):
                run(given.what, entry)


if __name__ == "__main__":
    main()
