"""Do exact rows cost what their count says (paper 2.5)? Time to first token over its multiply-accumulates.

    python results/rows/cost.py smollm2-07

Every arm is interleaved with exact (`ridgefill.bench.ttft`). Writes results/rows/<setting>-cost.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from measure import HERE, SETTINGS, maps_of, settings
from rich.progress import Progress

from ridgefill.bench import ttft
from ridgefill.embedded import held_out
from ridgefill.eval.documents import held_out_documents
from ridgefill.files import write_json
from ridgefill.load import load_model
from ridgefill.models.decoder import Decoder
from ridgefill.plan import make_plan

TOKENS, TAIL, REPEATS = 4096, 512, 3  # of each arm, after one to warm up
ARMS: dict[str, dict[str, Any]] = {
    "no rows": {},
    "random 5 %": {"rows": "random(0.05)"},
    "random 10 %": {"rows": "random(0.10)"},
    "random 20 %": {"rows": "random(0.20)"},
    "attention rows 10 % (the paper)": {"rows": "attention(0.10)"},
    "spans 5 %": {"rows": "spans(peak, 0.05)"},
    "probe 10 %": {"rows": "probe(0.10)"},
    "value rescale": {"corrections": "value_rescale(512)"},
}


def main() -> None:
    """All arms of one setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", choices=SETTINGS)
    given = parser.parse_args()
    folder, split = settings(given.setting)
    model, tokenizer = load_model(folder)
    maps = maps_of(given.setting, model, tokenizer, split)
    fitted = set(maps.provenance.get("fitted_documents", ()))
    ids = held_out_documents(tokenizer, held_out(), TOKENS, 1, fitted=fitted, seed=0)[0]
    found: dict[str, Any] = {"command": f"python results/rows/cost.py {given.setting}", "arms": {}}
    with Progress(transient=True) as progress:
        task = progress.add_task("arms", total=len(ARMS) * (REPEATS + 1))
        for arm, words in ARMS.items():
            plan = make_plan(Decoder(model).n_layers, maps, tail=TAIL, split=split, **words)
            rows = ttft.measure(
                model, plan, ids, [TOKENS], REPEATS, tick=lambda: progress.advance(task), tokenizer=tokenizer
            )
            found["arms"][arm] = ttft.to_json(model, plan, rows)
            write_json(HERE / f"{given.setting}-cost.json", found)
            r = rows[0]
            print(
                f"{arm}: {r.speedup:.2f}x of {r.macs_ceiling:.2f}x, {r.measured_over_counted:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
