"""First tokens of vLLM and of transformers on a real model, exact and filled with the same maps (`agreement.json`).

    VLLM_USE_V2_MODEL_RUNNER=0 python results/vllm/agreement.py FOLDER MAPS [--tokens 1536] [--tail 512]

FOLDER is what `results/vllm/folder.py` writes. Each plan is one vLLM of its own. KL in nats over the whole
vocabulary; the largest difference of log-probabilities is over the tokens above one in ten thousand.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from torch import Tensor

import ridgefill
from ridgefill.bench.environment import environment
from ridgefill.embedded import held_out
from ridgefill.engines.vllm import check_version
from ridgefill.files import write_json

NEW = 16
PLANS: dict[str, dict[str, Any]] = {
    "fill": {},
    "spans and rescale": {"rows": "spans(peak, 0.05)", "corrections": "value_rescale(128)"},
}


def theirs(
    model: Any, tokenizer: Any, maps: Any, ids: list[int], plan: dict[str, Any]
) -> tuple[list[int], Tensor]:
    """transformers' tokens and its first token's log-probabilities [vocabulary]."""
    with ridgefill.filling(model, maps, min_tokens=1, tokenizer=tokenizer, **plan):
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), out.logits[0][0].float().log_softmax(-1)


def compared(a: tuple[list[int], Tensor], b: tuple[list[int], Tensor]) -> dict[str, Any]:
    """How far two answers are from each other."""
    p, q = a[1], b[1]
    likely = p > -9.2
    return {
        "kl": float((p.exp() * (p - q)).sum()),
        "largest": float((p - q)[likely].abs().max()),
        "same tokens": a[0] == b[0],
    }


def main() -> None:
    """Measures every plan on every held-out text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("maps")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--tail", type=int, default=512)
    given = parser.parse_args()
    from vllm import LLM, SamplingParams

    model, tokenizer = ridgefill.load_model(given.folder)
    maps = ridgefill.RidgeMaps.load(given.maps)
    texts = {
        path.name: tokenizer(path.read_text(encoding="utf-8")).input_ids[: given.tokens]
        for path in held_out()
    }
    found: dict[str, Any] = {"tokens": given.tokens, "tail": given.tail, "vllm": check_version(), "rows": []}
    for name, more in PLANS.items():
        plan = {"tail": given.tail, **more}
        llm = LLM(
            given.folder, dtype="float32", enforce_eager=True, max_model_len=4096,
            max_num_batched_tokens=512, max_num_seqs=4,
            max_logprobs=-1, worker_cls="ridgefill.engines.vllm.worker.RidgeWorker", enable_prefix_caching=False,
            additional_config={"ridgefill": {"maps": given.maps, "min_tokens": 1, **plan}},
        )  # fmt: skip
        for text, ids in texts.items():
            row: dict[str, Any] = {"plan": name, "text": text}
            arms = {"exact": {**plan, "fill": "exact", "rows": None, "corrections": ""}, "filled": plan}
            wanted = {arm: theirs(model, tokenizer, maps, ids, settings) for arm, settings in arms.items()}
            for arm in arms:
                params = SamplingParams(
                    temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=-1,
                    extra_args={"ridgefill": arm == "filled"},
                )  # fmt: skip
                (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
                first = output.outputs[0].logprobs[0]
                ours = torch.tensor([first[k].logprob for k in range(len(wanted[arm][1]))])
                row[arm] = compared(wanted[arm], (list(output.outputs[0].token_ids), ours))
            row["the fill itself"] = compared(wanted["exact"], wanted["filled"])
            found["rows"].append(row)
            print(row, flush=True)
        del llm
        write_json(
            Path(__file__).with_name("agreement.json"), {**found, "environment": environment(model.device)}
        )


if __name__ == "__main__":
    main()
