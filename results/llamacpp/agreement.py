"""First tokens of both engines, exact and filled with the same maps: KL in nats (`agreement.json`).

    OMP_NUM_THREADS=1 python results/llamacpp/agreement.py smollm2=MAPS gemma3=MAPS [--tokens 1536] [--tail 512]

If llama.cpp's kernels alone explain the distance between the engines, it is the same with the fill and without.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ridgefill
from ridgefill.embedded import default_model, gemma_model, held_out
from ridgefill.engines.llamacpp import RidgeLlama
from ridgefill.engines.llamacpp.bench import environment
from ridgefill.engines.llamacpp.measures import first_token, kl
from ridgefill.files import write_json

MODELS = {"smollm2": default_model, "gemma3": gemma_model}
FORMS: dict[str, dict[str, Any]] = {
    "f16": {"flash_attn": True},
    "q8_0": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
}


def main() -> None:
    """Measures every model on every held-out text, and writes after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=MAPS")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--tail", type=int, default=512)
    given = parser.parse_args()
    found: dict[str, Any] = {"tokens": given.tokens, "tail": given.tail, "rows": []}
    for name, folder in (each.split("=") for each in given.models):
        maps = ridgefill.RidgeMaps.load(folder)
        plan: dict[str, Any] = {"tail": given.tail, "min_tokens": 1}
        own = {"n_ctx": given.tokens, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
        llms = {
            form: RidgeLlama(MODELS[name](), maps=maps, **plan, **own, **args) for form, args in FORMS.items()
        }
        model, _ = ridgefill.load_model(MODELS[name]())
        for path in held_out():
            ids = llms["f16"].tokenize(path.read_text(encoding="utf-8").encode())[: given.tokens]
            theirs = {}
            with torch.no_grad():
                for arm in ("exact", "filled"):
                    fill = "exact" if arm == "exact" else None
                    with ridgefill.filling(model, maps, fill=fill, **plan):
                        logits = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits[0, -1]
                    theirs[arm] = logits.float().numpy()
            row: dict[str, Any] = {
                "model": name,
                "text": path.name,
                "fill, transformers": kl(*theirs.values()),
            }
            for form, llm in llms.items():
                ours = {arm: first_token(llm, ids, exact=arm == "exact")[0] for arm in theirs}
                row[form] = {f"engines, {arm}": kl(theirs[arm], ours[arm]) for arm in theirs}
                row[form]["fill, llama.cpp"] = kl(ours["exact"], ours["filled"])
                row[form]["same filled token"] = bool(
                    np.argmax(ours["filled"]) == np.argmax(theirs["filled"])
                )
            found["rows"].append(row)
            found["environment"] = environment(llms["f16"])
            write_json(Path(__file__).with_name("agreement.json"), found)
            print(row, flush=True)


if __name__ == "__main__":
    main()
