"""Mixed serving on vLLM's CPU build with SmolLM2, exact and filled in turn on one server (`serve-*.json`).

    .venv-vllm/bin/python results/vllm/load.py FOLDER MAPS [--port 8123] [--core 0] [--eager]

FOLDER is what `results/vllm/folder.py` writes. The server runs in bf16, on one core, compiled unless --eager.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
CELLS = {
    "4k": (4096, "1,2,4,8"),
    "8k": (7600, "1,2"),
}  # tokens, users; room for the answer in a context of 8,192


def main() -> None:
    """Starts the server, measures, ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("maps")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--core", default="0")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    ours = [sys.executable, "-m", "ridgefill.cli"]
    flags = subprocess.run(
        [*ours, "vllm-args", given.maps, "--tail", "1024"], capture_output=True, text=True, check=True
    ).stdout.split()
    settings = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": given.core, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.folder]
    command += ["--served-model-name", "smollm2", "--dtype", "bfloat16", "--max-model-len", "8192"]
    command += ["--max-num-batched-tokens", "2048", "--port", str(given.port), *flags]
    command += ["--enforce-eager"] if given.eager else []
    server = subprocess.Popen(["taskset", "-c", given.core, *command], env={**os.environ, **settings})
    address = f"http://127.0.0.1:{given.port}"
    try:
        while not _up(address):
            if server.poll() is not None:
                raise SystemExit("the server ended; see above")
            time.sleep(2)
        for name, (tokens, users) in CELLS.items():
            out = HERE / f"serve-{name}{'-eager' if given.eager else ''}.json"
            wanted = ["--tokens", str(tokens), "--users", users, "--repeats", "3", "--texts", "embedded"]
            subprocess.run(
                [*ours, "bench", "serve", address, "--model", "smollm2", *wanted, "-o", out], check=True
            )
    finally:
        server.terminate()
        server.wait()


def _up(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=2).status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
