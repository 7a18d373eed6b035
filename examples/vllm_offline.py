"""Fill long prompts in vLLM from Python: `python examples/vllm_offline.py MODEL MAPS PROMPT.txt`.

The arguments are those that `ridgefill vllm-args MAPS --json` prints. Needs vLLM's environment (docs/vllm.md).
"""

import json
import subprocess
import sys

from vllm import LLM, SamplingParams


def main(model: str, maps: str, prompt_file: str) -> None:
    """The same prompt filled, with a longer tail, and exactly; in one batch."""
    command = [sys.executable, "-m", "ridgefill.cli", "vllm-args", maps, "--tail", "1024", "--json"]
    arguments = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    llm = LLM(model, **arguments)
    with open(prompt_file, encoding="utf-8") as file:
        prompt = file.read()
    asked = {"filled": {}, "a longer tail": {"ridgefill_tail": 2048}, "exact": {"ridgefill": False}}
    params = [SamplingParams(temperature=0.0, max_tokens=64, extra_args=extra) for extra in asked.values()]
    for name, output in zip(asked, llm.generate([prompt] * len(asked), params), strict=True):
        print(f"{name}: {output.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
