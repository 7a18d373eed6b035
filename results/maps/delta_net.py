"""What maps that give a Gated DeltaNet layer its keys, values and gates would save, by count (docs/decisions/0014).

    python results/maps/delta_net.py

Now such a layer is given its input: the map, then the projections of q, k, v and both gates. A filled row needs no
query, but for the few rows that the tail's convolution still sees; these maps would give k, v, beta and the decay.
"""

from __future__ import annotations

from dataclasses import replace

from ridgefill.bench.cost import ModelShape, Setting, macs_ceiling

# Qwen3.5-27B as published; the paper's Qwen3.8-27B has the same layers.
HIDDEN, LAYERS, KEY_HEADS, VALUE_HEADS, HEAD, KERNEL = 5120, 64, 16, 48, 128, 4
CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_conv_kernel_dim": KERNEL,
    "full_attention_interval": 4,
}
LENGTHS = ((8192, 1024), (32768, 4096), (131072, 4096))


def main() -> None:
    """Prints both tables."""
    shape = ModelShape.from_config(CONFIG)
    keys, values, gates = KEY_HEADS * HEAD, VALUE_HEADS * HEAD, 2 * VALUE_HEADS
    given = keys + values + gates
    queries = HIDDEN * keys + KERNEL * keys  # projected and convolved for nothing in nearly all filled rows
    projected = HIDDEN * (2 * keys + values + gates)
    saved = shape.map + projected + KERNEL * keys - HIDDEN * given
    filled = next(layer.filled for layer in shape.costs if not layer.value) + shape.map
    print(f"A filled row of a Gated DeltaNet layer: {filled:,} multiply-accumulates, map included;")
    print(f"without queries {filled - queries:,}; given keys, values and gates {filled - saved:,}.")
    print(f"A map: {shape.map:,} weights giving inputs, {HIDDEN * given:,} giving these.")
    print(
        "\n| depth | tokens | tail | ceiling now | without queries | given k, v and gates |"
        "\n|---|---|---|---|---|---|"
    )
    for depth in (0.25, 0.5):
        for tokens, tail in LENGTHS:
            setting = Setting(
                split=depth, tail=tail, leading=16, blocks=5, rank=HIDDEN, gives="writes", map_at_split=False
            )
            found = [
                macs_ceiling(_cheaper(shape, less, depth), tokens, setting) for less in (0, queries, saved)
            ]
            print(f"| {depth} | {tokens:,} | {tail:,} | " + " | ".join(f"{one:.3f}" for one in found) + " |")


def _cheaper(shape: ModelShape, less: int, depth: float) -> ModelShape:
    """The shape with ``less`` work in a filled row of its recurrent layers above the split, which has no map."""
    split = int(depth * shape.layers)
    costs = tuple(
        replace(layer, filled=layer.filled - less) if i > split and not layer.value else layer
        for i, layer in enumerate(shape.costs)
    )
    return replace(shape, costs=costs)


if __name__ == "__main__":
    main()
