"""Reads, prompt by prompt, all attention that could rank the rows of a prompt; `rank.py` compares what is made of it.

    python results/rows/collect.py [rounds]

For each prompt: an exact forward pass up to layer 15. In the first rounds also the layers above, and for each split
the last 256 rows through the real late layers over the ridge-filled cache (the probe). Attention of the rows from 64
before the question to the end is recomputed from their queries and the cached keys, layer by layer, and kept as means
or peaks over groups of those rows: [layers, heads, m] each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import new_cache
from ridgefill.embedded import default_model
from ridgefill.eval.haystack import Haystack, Item, answered, prose
from ridgefill.load import load_model
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder

ROOT = Path(__file__).parent.parent.parent
MAPS = ROOT / ".cache" / "results-maps"
OUT = ROOT / ".cache" / "rank"
SPLITS = (7, 15)
PROBE, EARLIER, LAST = 256, 64, 64
FLOOR = 2.0**-24
COUNT = {  # prompts of each kind
    "prose-single": 32,
    "prose-multikey": 32,
    "prose-single-paraphrased": 32,
    "noise-single": 16,
    "noise-multikey": 16,
}
STRIDE = 11  # prompts are visited out of order, so that a stopped run has seen all depths
FULL_ROUNDS = 4  # one prompt of each kind a round


def kind(cell: str) -> Haystack:
    """The haystack that a cell's name stands for."""
    hay, needles, *rest = cell.split("-")
    return Haystack(hay=hay, needles=needles, wording=rest[0] if rest else "ruler")


def items_of(cell: str, tokenizer: Any) -> list[Item]:
    """The prompts of a cell; made once."""
    place = OUT / f"{cell}-items.pt"
    if not place.exists():
        fitted = RidgeMaps.load(MAPS / f"split-{SPLITS[0]:02d}").provenance["fitted_documents"]
        torch.save(kind(cell).items(tokenizer, COUNT[cell], prose(fitted)), place)
    return torch.load(place, weights_only=False)


def main() -> None:
    """Collects, round by round, what is not there yet."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else max(COUNT.values())
    OUT.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(default_model())
    maps = {split: RidgeMaps.load(MAPS / f"split-{split:02d}") for split in SPLITS}
    cells = {cell: items_of(cell, tokenizer) for cell in COUNT}
    for step in range(rounds):
        for cell, items in cells.items():
            index = step * STRIDE % len(items)
            place = OUT / f"{cell}-{index:02d}.json"
            if step >= len(items) or place.exists():
                continue
            start = time.monotonic()
            found, arrays = read(Decoder(model), maps if step < FULL_ROUNDS else {}, items[index])
            torch.save(arrays, place.with_suffix(".pt"))
            facts = {"exact": found, "seconds": round(time.monotonic() - start, 2)}
            place.write_text(json.dumps(facts), encoding="utf-8")
            print(cell, index, facts, flush=True)


@torch.no_grad()
def read(decoder: Decoder, maps: dict[int, RidgeMaps], item: Item) -> tuple[bool | None, dict[str, Tensor]]:
    """Whether the exact model answers, and log2 of attention by name, [groups, layers, heads, m] fp16 each.

    Without maps only the lower layers run, and the answer is None.
    """
    n_layers = decoder.n_layers if maps else max(SPLITS) + 1
    n, m = item.ids.shape[1], item.ids.shape[1] - 512
    ids = torch.cat([item.ids, item.answer_ids[:, :-1]], 1)
    positions = torch.arange(ids.shape[1])[None]
    first = item.question[0] - EARLIER
    cache = new_cache(decoder.model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions, None, cache)
    inputs, heads = [], []
    with queries(decoder, slice(first, n)) as q:
        for i in range(n_layers):
            inputs.append(h[:, :n])
            h = decoder.run_layer(i, h, rows, cache)
            heads.append(groups(q[i], cache.layers[i].keys[0, :, :n], item, first, m))
    arrays = {"exact": torch.stack(heads, 1)}
    found = answered(decoder.final(h[:, -item.answer_ids.shape[1] :]), item) if maps else None
    for split, fitted in maps.items():
        arrays[f"probe-{split:02d}"] = probe(decoder, fitted, inputs, cache, item, first, m)
    return found, {name: a.clamp_min(FLOOR).log2().half() for name, a in arrays.items()}


def probe(
    decoder: Decoder, maps: RidgeMaps, inputs: list[Tensor], exact: Any, item: Item, first: int, m: int
) -> Tensor:
    """The last rows through the real late layers; all earlier ones are filled, but for the exact leading ones."""
    n, split = item.ids.shape[1], maps.split
    stop, cache = n - PROBE, new_cache(decoder.model)
    positions = torch.arange(n)[None]
    rows = decoder.rows(inputs[0], positions)
    cut = decoder.rows(inputs[0][:, :stop], positions[:, :stop])
    for i in range(decoder.n_layers):
        if i < split:
            keys, values = exact.layers[i].keys[:, :, :stop], exact.layers[i].values[:, :, :stop]
        else:
            x = maps.predict(i, inputs[split][:, :stop]).clone()
            x[:, :16] = inputs[i][:, :16]  # leading rows attend only to one another: exact as they stand
            keys, values = decoder.project(i, x)
            keys = decoder.rotate(i, keys, cut)
        cache.update(keys, values, i)
    h = inputs[split][:, stop:]
    rows = decoder.rows(h, positions[:, stop:], None, cache)
    heads = []
    with queries(decoder, slice(first - stop, None)) as q:
        for i in range(split, decoder.n_layers):
            h = decoder.run_layer(i, h, rows, cache)
            heads.append(groups(q[i], cache.layers[i].keys[0], item, first, m))
    return torch.stack(heads, 1)


GROUPS = ("last64", "question", "after", "earlier", "peak", "last", "share", "earlier share", "earlier peak")


def groups(q: Tensor, keys: Tensor, item: Item, first: int, m: int) -> Tensor:
    """Attention [heads, rows, n] of rows first .. n-1, as means or peaks over groups of rows: [groups, heads, m].

    "share" counts a row's attention to the filled region as one, so that attention sinks do not hide it.

    Args:
        q: [heads, rows, D] rotated queries.
        keys: [kv heads, n, D].
    """
    n = keys.shape[1]
    keys = keys.repeat_interleave(q.shape[0] // keys.shape[0], 0)
    logits = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    later = torch.arange(n)[None] > torch.arange(first, n)[:, None]
    a = logits.masked_fill(later, -torch.inf).softmax(-1)[..., :m]
    share = a / a[..., 16:].sum(-1, keepdim=True).clamp_min(1e-9)
    start, end = item.question[0] - first, item.question[1] - first
    parts = [
        a[:, -LAST:].mean(1),
        a[:, start:end].mean(1),
        a[:, end:].mean(1),
        a[:, :start].mean(1),
        a[:, start:].amax(1),
        a[:, -1],
        share[:, start:].mean(1),
        share[:, :start].mean(1),
        a[:, :start].amax(1),
    ]
    return torch.stack(parts)


@contextmanager
def queries(decoder: Decoder, rows: slice) -> Iterator[dict[int, Tensor]]:
    """Collects the rotated queries [heads, rows, D] of the layers that run within the block."""
    found: dict[int, Tensor] = {}

    def hook(i: int) -> Any:
        def read_query(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            h = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[:, rows]
            cos, sin = (part[0, rows] for part in kwargs["position_embeddings"])
            q = module.q_proj(h)[0].unflatten(-1, (-1, module.head_dim)).transpose(0, 1)
            half = q.shape[-1] // 2
            found[i] = q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin

        return read_query

    handles = [
        layer.self_attn.register_forward_pre_hook(hook(i), with_kwargs=True)
        for i, layer in enumerate(decoder.layers)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main()
