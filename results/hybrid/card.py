"""What the trained hybrid can do, and the page that says so."""

from __future__ import annotations

from typing import Any

import torch
from data import FORM, Maker, recalled, spread

from ridgefill import embedded

CASES = (  # filler, form, tokens, digits
    *(("text", "plain", tokens, 4) for tokens in (512, 1024, 1280, 2048)),
    ("noise", "plain", 1280, 4),
    *((filler, "short", 1280, 4) for filler in ("text", "noise")),
    ("text", "plain", 1280, 7),
    *(("text", "ruler", 1280, digits) for digits in (4, 7)),
)


def fifths(found: list[bool]) -> list[str]:
    """Right of asked, by fifths of depth."""
    n = len(found)
    parts = [found[n * i // 5 : n * (i + 1) // 5] for i in range(5)]
    return [f"{sum(part)}/{len(part)}" for part in parts]


@torch.no_grad()
def measured(model: Any, maker: Maker, count: int) -> dict[str, Any]:
    """Loss on text never trained on, and recall of held-out facts at every depth, with and without some layers."""
    model.eval()
    held = [path.read_text(encoding="utf-8") for path in embedded.held_out()]
    windows = [torch.tensor([maker.encode(text)[:1280]]) for text in held]
    result: dict[str, Any] = {
        "held_out_text_nats": [round(model(ids, labels=ids).loss.item(), 4) for ids in windows],
        "recall": {},
    }
    for filler, form, tokens, digits in CASES:
        n = count if tokens == 1280 else count // 2
        found = recalled(model, spread(maker, 2, n, tokens, form=FORM[form], filler=filler, digits=digits))
        name = f"{filler}, {form}, {digits} digits, {tokens} tokens"
        result["recall"][name] = {"found": sum(found), "asked": n, "by_depth_fifth": fifths(found)}
        print(name, result["recall"][name], flush=True)
    prompts = spread(maker, 3, count // 4, 1280)
    result["recall_without_layer"] = {
        f"{i} {kind}": round(sum(without(model, i, prompts)) / len(prompts), 3)
        for i, kind in enumerate(model.config.layer_types)
    }
    return result


def without(model: Any, layer: int, prompts: list[Any]) -> list[bool]:
    """Recall with one layer's mixer (attention or Gated DeltaNet) giving nothing."""
    block = model.model.layers[layer]
    mixer = block.self_attn if hasattr(block, "self_attn") else block.linear_attn

    def nothing(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    hook = mixer.register_forward_hook(nothing)
    try:
        return recalled(model, prompts)
    finally:
        hook.remove()


def readme(found: dict[str, Any]) -> str:
    """How the model was made and what it can do, as Markdown."""
    nats = found["held_out_text_nats"]
    lines = [
        "# A tiny Gated DeltaNet hybrid with real weights",
        "",
        "Trained from scratch so that fills, corrections and selectors can be measured on a hybrid, offline.",
        "Not a language model to use: it only continues the style of its texts and finds planted facts.",
        "",
        f"Architecture `qwen3_5_text`, {found['parameters']:,} parameters (embeddings tied), fp16: 8 layers, every",
        "fourth full attention, the others Gated DeltaNet; byte-level BPE of 1,024 tokens, every digit a token.",
        "Text: the public-domain speeches and plays of `ridgefill.embedded` (its held-out documents left out), and",
        "planted facts (`results/hybrid/data.py`). One word in five and one number in ten were never trained on; all",
        "recall below is about those. Weights and tokenizer may be used as the rest of the repository.",
        "",
        f"    {found['command']}",
        "",
        f"{found['date']}, Python {found['python']}, torch {found['torch']}, transformers {found['transformers']}; "
        f"seed {found['seed']}, {found['steps']:,} steps in {found['cpu_seconds']:,} CPU seconds. Stages (steps x",
        f"tokens x sequences x weight of the answers): {found['stages']}.",
        "All that is random follows the seed; another CPU or version may round otherwise.",
        "",
        f"Loss on held-out text, 1,280 tokens a document: {', '.join(f'{n:.2f}' for n in nats)} nats.",
        "",
        "Recall, greedy, every digit right; of four facts in the prompt one is asked for, at even depths:",
        "",
        "| filler, words of the fact (`data.FORMS`), number, prompt | found | by fifths of depth |",
        "|---|---|---|",
    ]
    for name, r in found["recall"].items():
        lines.append(f"| {name} | {r['found']} of {r['asked']} | {', '.join(r['by_depth_fifth'])} |")
    lines += [
        "",
        "The same with one layer's mixer giving nothing (text, plain, 4 digits, 1,280 tokens):",
        "",
        "| layer | found |",
        "|---|---|",
        *(f"| {layer} | {share:.0%} |" for layer, share in found["recall_without_layer"].items()),
        "",
    ]
    return "\n".join(lines)
