"""First token of stock llama.cpp and of the fill, interleaved: wall and processor seconds (`speed.json`).

    OMP_NUM_THREADS=1 python results/llamacpp/speed.py MAPS [--lengths 2048,4096,8192] [--repeats 3] [--threads 1]

Stock is a `llama_cpp.Llama` of its own, with the same settings. Processor seconds are those of the whole process: on
a machine with other work they tell more than the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import llama_cpp

from ridgefill.embedded import default_model, held_out
from ridgefill.engines.llamacpp import RidgeLlama
from ridgefill.engines.llamacpp.bench import environment
from ridgefill.engines.llamacpp.measures import forget, kl, last_logits
from ridgefill.files import write_json


def main() -> None:
    """Measures every length and writes after each repetition."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("maps")
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tail", type=int, default=1024)
    parser.add_argument("-o", "--output", default=Path(__file__).with_name("speed.json"))
    given = parser.parse_args()
    lengths = [int(n) for n in given.lengths.split(",")]
    settings: dict[str, Any] = {
        "n_ctx": max(lengths), "n_batch": 2048, "n_ubatch": 512, "flash_attn": True, "verbose": False,
        "n_threads": given.threads, "n_threads_batch": given.threads,
    }  # fmt: skip
    ours = RidgeLlama(default_model(), maps=given.maps, tail=given.tail, min_tokens=1, **settings)
    stock = llama_cpp.Llama(str(default_model()), **settings)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in held_out())
    ids = stock.tokenize(text.encode())
    found: dict[str, Any] = {"plan": ours.plan.to_json(), "environment": environment(ours), "lengths": {}}
    for n in lengths:
        rows: dict[str, list[Any]] = {"stock": [], "filled": [], "stages": [], "kl": []}
        for _ in range(given.repeats):
            logits = {}
            for name, llm in (("stock", stock), ("filled", ours)):
                forget(llm)
                wall, processor = time.perf_counter(), time.process_time()
                llm.eval(ids[:n])
                logits[name] = last_logits(llm)
                rows[name].append([time.perf_counter() - wall, time.process_time() - processor])
            rows["kl"].append(kl(logits["stock"], logits["filled"]))
            rows["stages"].append(ours.stats.seconds if ours.stats else {})
            found["lengths"][str(n)] = {**rows, **summary(rows)}
            write_json(given.output, found)
            print(n, {k: v for k, v in summary(rows).items()}, flush=True)


def summary(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Medians and their ratios; wall, then processor."""
    out = {}
    for i, kind in enumerate(("wall", "processor")):
        medians = {arm: statistics.median(row[i] for row in rows[arm]) for arm in ("stock", "filled")}
        out |= {f"{arm}_{kind}_s": value for arm, value in medians.items()}
        out[f"speedup_{kind}"] = medians["stock"] / medians["filled"]
    return out


if __name__ == "__main__":
    main()
