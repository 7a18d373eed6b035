"""The project's own study: what the fill costs at four depths, on three real models (paper 6.1, 6.2, 6.5).

    python results/study/study.py declare          # once, before anything runs
    python results/study/study.py smollm2|gemma3|hybrid [--part loss|needles]
    python results/study/study.py page             # README.md from what was found

Every measurement names the ledger entry that declared it, and goes on where a stopped one was.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")

import torch
from rich.progress import Progress
from torch import Tensor

from ridgefill import RidgeMaps, embedded, fit, load_model
from ridgefill.eval.arms import Arm, parse_arms
from ridgefill.eval.haystack import Haystack, Item, prose
from ridgefill.eval.losses import documents_of, measure_losses
from ridgefill.eval.retrieval import measure_retrieval
from ridgefill.eval.runs import open_run
from ridgefill.files import sha256_file
from ridgefill.ledger import Ledger
from ridgefill.models.decoder import Decoder
from ridgefill.rows.base import Prompt, Selector
from ridgefill.rows.reader import attention_layers

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LEDGER = HERE / "ledger.jsonl"
MAPS = ROOT / ".cache" / "rows-maps"
ANSWER = 20  # tokens: the answer prefix leaves the number alone to be said
CELLS = ("noise-single", "prose-single", "prose-multikey")


@dataclass(frozen=True)
class Study:
    """One model's part.

    Attributes:
        splits: nearest to depths 1/4, 3/8 (not of Gemma, which is slow), 1/2 and 5/8.
        sink_splits: where maps fitted with the sink's rows are tried.
        documents: of each domain. tokens, tail: of a document.
        needle_tokens, needle_tail: of a needle prompt; prompts of each cell.
        spans: the selector that is tried at every split.
    """

    splits: tuple[int, ...]
    sink_splits: tuple[int, ...]
    fitted: int
    documents: int
    prompts: int
    tokens: int = 2560
    tail: int = 768
    context: int = 768
    needle_tokens: int = 1024
    needle_tail: int = 256
    spans: str = "spans(peak,0.05)"


STUDIES = {
    "smollm2": Study((7, 11, 15, 19), (7, 15), 65536, 3, 6),
    "gemma3": Study((4, 9, 11), (4, 9), 24576, 2, 2),
    "hybrid": Study(
        (2, 3, 4, 5), (2, 4), 65536, 6, 0, tokens=1280, tail=512, context=256, spans="spans(overlap,0.05)"
    ),
}
CLAIM, PREDICTION = (HERE / "PREDICTION.md").read_text().split("\n\n## Predictions\n\n")


@dataclass(frozen=True)
class Half(Selector):
    """Half of the asked needle's rows, for the question whether a part of a fact hurts; made for each prompt."""

    rows: tuple[int, int] = (0, 0)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        chosen[self.rows[0] : self.rows[1]] = True
        return chosen


def model_folder(name: str) -> Path:
    """Where the model's files are."""
    if name == "hybrid":
        return ROOT / "tests" / "data" / "hybrid"
    return {"smollm2": embedded.default_model, "gemma3": embedded.gemma_model}[name]()


def maps_folder(name: str, split: int, model: Any, tokenizer: Any, sink: bool = False) -> Path:
    """Maps of one split, fitted if they are not there: all of a model's in one pass."""
    study, folder = STUDIES[name], MAPS / (f"{name}-sink" if sink else name)
    if not (folder / f"split-{split:02d}").exists():
        wanted = study.sink_splits if sink else study.splits
        splits = [s for s in wanted if not (folder / f"split-{s:02d}").exists()]
        fit(
            model,
            tokenizer,
            list(embedded.texts().values()),
            splits,
            folder,
            tokens=study.fitted,
            leading=0 if sink else 16,
            form="plain",
        )
    return folder / f"split-{split:02d}"


def arms_of(name: str, model: Any, tokenizer: Any, tail: int) -> tuple[list[Arm], RidgeMaps]:
    """Every arm of a model's study."""
    study, words, decoder = STUDIES[name], ["pop"], Decoder(model)
    for s in study.splits:
        maps = f"maps={maps_folder(name, s, model, tokenizer)}"
        words += [
            f"none {s}: none split={s}",
            f"identity {s}: identity split={s}",
            f"ridge {s} no leading: ridge leading=0 {maps}",
            f"ridge {s}: ridge {maps}",
        ]
        # Gemma-3's first layer of full attention is its sixth: below that nothing ranks the spans
        if "peak" not in study.spans or any(i <= s for i in attention_layers(decoder)):
            words.append(f"ridge {s} spans: ridge rows={study.spans} {maps}")
        if s in study.sink_splits:
            words.append(f"ridge {s} random: ridge rows=random(0.05) {maps}")
    for s in study.sink_splits:
        words.append(f"ridge {s} sink in fit: ridge maps={maps_folder(name, s, model, tokenizer, sink=True)}")
    first = RidgeMaps.load(maps_folder(name, study.splits[0], model, tokenizer))
    arms = parse_arms("; ".join(words), decoder, split=0.5, tail=tail, leading=16)
    # paths are this machine's own: what is kept names the folder alone
    return [replace(arm, words=arm.words.replace(f"{MAPS}/", "")) for arm in arms], first


def loss(name: str, entry: str) -> None:
    """Loss on prose, code and documentation that no map was fitted on."""
    study = STUDIES[name]
    model, tokenizer = load_model(model_folder(name))
    arms, maps = arms_of(name, model, tokenizer, study.tail)
    fitted = set(maps.provenance["fitted_documents"])
    domains: dict[str, Sequence[str | Path]] = {"prose": embedded.held_out()}
    if name != "hybrid":  # it has read nothing but prose
        domains |= {"documentation": [embedded.doc_texts()], "code": [embedded.code_texts()]}
    documents = documents_of(tokenizer, domains, study.tokens, study.documents, fitted=fitted, seed=0)
    settings = {
        "tail": study.tail,
        "context": study.context,
        "documents": [d.item for d in documents],
    }
    run = open_run(HERE / name / "loss", "loss", settings, model, tokenizer, arms, None, study.tokens, entry)
    # a domain's second document comes after every domain's first: a stopped run has seen them all
    documents = sorted(documents, key=lambda d: int(d.item.split("/")[1]))
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{name}, loss", total=len(arms) * len(documents))
        measure_losses(
            model, tokenizer, arms, documents, run,
            tail=study.tail, scored=min(512, study.tail // 2), context=study.context, tick=lambda: bar.advance(task),
        )  # fmt: skip
    run.finish()


def needle_items(name: str, tokenizer: Any, maps: RidgeMaps) -> list[tuple[str, str, Item]]:
    """Prompts whose facts all lie in filled rows."""
    study, found = STUDIES[name], []
    text = prose(maps.provenance["fitted_documents"])
    for cell in CELLS:
        hay, needles = cell.split("-")
        kind = Haystack(tokens=study.needle_tokens, tail=study.needle_tail, hay=hay, needles=needles, seed=11)
        items = kind.items(tokenizer, study.prompts, text if hay == "prose" else ())
        found += [(f"{cell}/{i}", cell, item) for i, item in enumerate(items)]
    return found


def needles(name: str, entry: str) -> None:
    """Retrieval from filled rows."""
    study = STUDIES[name]
    model, tokenizer = load_model(model_folder(name))
    arms, maps = arms_of(name, model, tokenizer, study.needle_tail)
    items = needle_items(name, tokenizer, maps)
    settings = {"tail": study.needle_tail, "items": [item for item, *_ in items], "seed": 11}
    run = open_run(
        HERE / name / "needles", "needles", settings, model, tokenizer, arms, None, study.needle_tokens, entry
    )
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{name}, needles", total=len(arms) * len(items))
        items = sorted(items, key=lambda item: int(item[0].split("/")[1]))  # all kinds from the start
        measure_retrieval(
            model, tokenizer, arms, items, run, new_tokens=ANSWER, tick=lambda: bar.advance(task)
        )
    run.finish()


def halves(name: str, entry: str) -> None:
    """Does half a needle hurt? The asked needle's rows exact: all, the first half, the last half, none."""
    study = STUDIES[name]
    model, tokenizer = load_model(model_folder(name))
    arms, maps = arms_of(name, model, tokenizer, study.needle_tail)
    exact, by_name = arms[0], {arm.name: arm for arm in arms}
    items = [(i, cell, item) for i, cell, item in needle_items(name, tokenizer, maps) if "single" in cell]
    plain = [by_name[f"ridge {s}"] for s in study.splits]
    parts = ("whole", "first half", "last half")
    named = [replace(arm, name=f"{arm.name}, {part} exact", words=part) for arm in plain for part in parts]
    settings = {"tail": study.needle_tail, "items": [i for i, *_ in items], "seed": 11}
    about = [exact, *plain, *named]
    run = open_run(
        HERE / name / "halves", "needles", settings, model, tokenizer, about, None, study.needle_tokens, entry
    )
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{name}, halves", total=len(about) * len(items))
        for key, cell, item in items:
            own = [exact, *plain]
            for arm in plain:
                first, stop = item.asked[0]
                half = (first + stop) // 2
                spans = {"whole": (first, stop), "first half": (first, half), "last half": (half, stop)}
                own += [_with(arm, part, spans[part]) for part in parts]
            measure_retrieval(model, tokenizer, own, [(key, cell, item)], run, tick=lambda: bar.advance(task))
    run.finish()


def _with(arm: Arm, part: str, rows: tuple[int, int]) -> Arm:
    plan = replace(arm.plan(0), rows=Half(rows))
    return Arm(f"{arm.name}, {part} exact", lambda n: plan, part)


def declare() -> str:
    """Writes the claim and the predictions to the ledger, once; returns the entry's hash."""
    ledger = Ledger.open(LEDGER)
    known = next((e for e in ledger.entries() if e.said.get("claim") == CLAIM), None)
    if known is not None:
        return known.hash
    configuration = {name: vars(study) | {"cells": list(CELLS)} for name, study in STUDIES.items()}
    configuration = {
        n: {k: list(v) if isinstance(v, tuple) else v for k, v in c.items()} for n, c in configuration.items()
    }
    files = {path.name: sha256_file(path) for path in (HERE / "study.py", HERE / "PREDICTION.md")}
    return ledger.declare(CLAIM, PREDICTION, configuration, files).hash


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("declare", "page", *STUDIES))
    parser.add_argument("--part", choices=("loss", "needles", "halves"))
    given = parser.parse_args()
    if given.what == "declare":
        print(declare())
    elif given.what == "page":
        from page import write_page

        write_page(HERE)
    else:
        entry = declare()
        parts = (
            {"loss": loss} if given.what == "hybrid" else {"loss": loss, "needles": needles, "halves": halves}
        )
        if given.what == "gemma3":
            parts.pop("halves")
        for part, run in parts.items():
            if given.part in (None, part):
                run(given.what, entry)


if __name__ == "__main__":
    main()
