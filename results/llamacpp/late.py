"""Late keys and values of filled rows, four ways: which is fastest, and is it right? (`late.json`)

    OMP_NUM_THREADS=1 python results/llamacpp/late.py MAPS [--rows 7152] [--threads 1]

Each way gets the split states [rows, d] and gives the cache's f16 keys and values of every late layer: numpy and
torch on weights dequantised to fp32 once; ggml in fp32, or packed: maps in Q8_0, projections as the file has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch

from ridgefill.bench.environment import environment
from ridgefill.embedded import default_model
from ridgefill.engines.llamacpp.gguf_model import GgufModel
from ridgefill.engines.llamacpp.late_rows import CacheForm, LateRows
from ridgefill.engines.llamacpp.settings import recipes
from ridgefill.files import write_json
from ridgefill.maps import RidgeMaps
from ridgefill.plan import make_plan

Layer = tuple[Any, Any, Any, Any, Any]  # map or None, bias, norm, keys' weight, values' weight


def weights(model: GgufModel, plan: Any) -> dict[int, Layer]:
    """fp32 weights of every late layer."""
    out = {}
    for layer, recipe in recipes(plan, model).items():
        names = ("attn_norm", "attn_k", "attn_v")
        norm, k, v = (model.needed(f"blk.{layer}.{name}.weight").unpacked() for name in names)
        out[layer] = recipe.terms[0][1], recipe.bias, norm, k, v
    return out


def angles(model: GgufModel, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [rows, width / 2] of the rotary embedding."""
    dims, base, scale = model.rope(0)
    turn = positions[:, None] * scale * base ** (-np.arange(0, dims, 2) / dims)
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def by_numpy(model: GgufModel, each: dict[int, Layer], h: np.ndarray, positions: np.ndarray) -> Iterator[Any]:
    """Plain numpy."""
    cos, sin = (a[:, None, :] for a in angles(model, positions))
    for layer, (matrix, bias, norm, k_weight, v_weight) in each.items():
        x = h if matrix is None else h @ matrix.T + bias
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + model.eps) * norm
        k = (x @ k_weight.T).reshape(
            len(h), model.kv_heads, -1, 2
        )  # llama's files hold rotary pairs side by side
        a, b = k[..., 0], k[..., 1]
        k = np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(len(h), -1)
        yield layer, k.astype(np.float16), (x @ v_weight.T).astype(np.float16)


def by_torch(model: GgufModel, each: dict[int, Any], h: torch.Tensor, positions: np.ndarray) -> Iterator[Any]:
    """torch, fp32."""
    cos, sin = (torch.from_numpy(a)[:, None, :] for a in angles(model, positions))
    for layer, (matrix, bias, norm, k_weight, v_weight) in each.items():
        x = h if matrix is None else torch.nn.functional.linear(h, matrix, bias)
        x = torch.nn.functional.rms_norm(x, (x.shape[1],), norm, model.eps)
        k = (x @ k_weight.T).view(len(h), model.kv_heads, -1, 2)
        a, b = k[..., 0], k[..., 1]
        k = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).view(len(h), -1)
        yield layer, k.half().numpy(), (x @ v_weight.T).half().numpy()


def main() -> None:
    """Times the ways in turn, three times, and compares what they give."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("maps")
    parser.add_argument("--rows", type=int, default=7152)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, maps = GgufModel(default_model()), RidgeMaps.load(given.maps)
    plan = make_plan(model.layers, maps)
    each = weights(model, plan)
    tensors = {
        i: [None if t is None else torch.from_numpy(np.array(t)) for t in layer] for i, layer in each.items()
    }
    # Real rows would change no time; their size matters to the comparison: about that of SmolLM2's at the split.
    h = np.random.default_rng(0).standard_normal((given.rows, model.width)).astype(np.float32) * 6
    positions = np.arange(16, 16 + given.rows, dtype=np.int32)
    form = CacheForm(1, 1)
    ggml = {t: LateRows(model, recipes(plan, model), form, 0, given.threads, t) for t in ("f32", "packed")}

    def by_ggml(kind: str) -> Iterator[Any]:
        made: dict[int, list[list[np.ndarray]]] = {i: [[], []] for i in each}
        for _, layer, k, v in ggml[kind].compute({plan.split: h}, positions):
            made[layer][0].append(k)
            made[layer][1].append(v)
        for layer, (k, v) in made.items():
            yield layer, *(np.concatenate(part).view(np.float16) for part in (k, v))

    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "numpy": lambda: by_numpy(model, each, h, positions),
        "torch": lambda: by_torch(model, tensors, torch.from_numpy(h), positions),
        "ggml, f32": lambda: by_ggml("f32"),
        "ggml, packed": lambda: by_ggml("packed"),
    }
    found: dict[str, Any] = {name: {"wall_s": [], "processor_s": []} for name in ways}
    reference: dict[int, Any] = {}
    for _ in range(3):
        for name, way in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            made = {layer: (k, v) for layer, k, v in way()}
            found[name]["wall_s"].append(time.perf_counter() - wall)
            found[name]["processor_s"].append(time.process_time() - processor)
            reference = reference or made
            gaps = [
                np.abs(a.astype(np.float32) - b).max()
                for i in made
                for a, b in zip(made[i], reference[i], strict=True)
            ]
            found[name]["largest_difference_from_numpy"] = float(max(gaps))
    for name, row in found.items():
        print(f"{name:18} {min(row['wall_s']):6.2f} s, {min(row['processor_s']):6.2f} processor s, "
              f"off by {row['largest_difference_from_numpy']:.3f}")  # fmt: skip
    about = {
        **environment(torch.device("cpu")),
        "llama_cpp_python": llama_cpp.__version__,
        "threads": given.threads,
    }
    write_json(
        Path(__file__).with_name("late.json"), {"rows": given.rows, "ways": found, "environment": about}
    )


if __name__ == "__main__":
    main()
