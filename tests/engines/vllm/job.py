"""Runs vLLM in a process of its own: `python -m tests.engines.vllm.job JOB.json ANSWER.json`.

A job is {"engine": arguments of `vllm.LLM`, "batches": [[{"ids": [...], "params": {...}}, ...], ...]}; the answer
has for each request its tokens, its first token's log-probabilities, the prompt tokens that came from the cache,
and the preemptions.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"], disable_log_stats=False)
    answers = []
    for batch in job["batches"]:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, **request["params"]) for request in batch]
        outputs = llm.generate([{"prompt_token_ids": r["ids"]} for r in batch], params, use_tqdm=False)
        answers.append([_answer(output) for output in outputs])
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "preempted": preempted}))


def _answer(output):
    first = output.outputs[0].logprobs
    return {
        "tokens": list(output.outputs[0].token_ids),
        "first": None if first is None else {str(k): v.logprob for k, v in first[0].items()},
        "cached": output.num_cached_tokens,
    }


if __name__ == "__main__":
    main()
