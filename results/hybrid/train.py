"""Trains a tiny Gated DeltaNet hybrid (transformers' qwen3_5_text) on this CPU until it recalls planted facts.

    python results/hybrid/train.py --out tests/data/hybrid

Everything random follows ``--seed`` and the step, so a stopped run goes on from its last checkpoint as if it had
not stopped. Texts: the public-domain speeches and plays of `ridgefill.embedded`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")

import numpy as np
import torch
import torch.nn.functional as F
from card import measured, readme
from data import ANSWER, FORM, FORMS, NOISE, REPEAT, TEXT, Maker, batch, key_words, number, recalled, spread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils import logging

from ridgefill import embedded

VOCABULARY = 1024
EVERY = 100  # steps between checkpoints


@dataclass(frozen=True)
class Stage:
    """Steps of one sequence length; ``answers`` is the weight of their loss.

    With a weight over 1, most facts are told in RULER's words, whose question names the key far from its answer.
    """

    steps: int
    tokens: int
    size: int
    answers: int = 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for config, weights and tokenizer")
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/hybrid"), help="checkpoint and encoded text"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--lr", type=float, default=0.02, help="Muon's, for matrices; AdamW's is a fifth of it"
    )
    parser.add_argument(
        "--decay", type=float, default=0.3, help="last share of steps in which the rate falls to 0"
    )
    parser.add_argument(
        "--stages",
        default="120x64x16,250x128x16,200x256x8,230x512x4,800x256x8x5,250x512x4x5,350x1280x2x5",
        help="steps x tokens x sequences [x weight of the answers], in order",
    )
    parser.add_argument("--stop", type=int, help="stop after this step (the run can go on later)")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of the last recall test")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    args.work.mkdir(parents=True, exist_ok=True)
    stages = [Stage(*map(int, s.split("x"))) for s in args.stages.split(",")]
    tokenizer = make_tokenizer(args.work)
    files = training_files()
    maker = Maker(tokenizer, encoded(tokenizer, args.work, files), key_words(files))
    model = new_model(args.seed)
    with own_delta_rule(model):
        step, seconds = train(model, maker, stages, args)
    if step == sum(s.steps for s in stages):
        save(model, tokenizer, args, measured(model, maker, args.prompts), step, seconds)


def training_files() -> list[Path]:
    """Public-domain text: speeches and plays."""
    texts = embedded.texts()
    return sorted(texts["speeches"].glob("*.txt")) + sorted(texts["plays"].glob("*.md"))


def make_tokenizer(work: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE, every digit a token of its own, trained on the texts and the forms of the facts."""
    place = work / "tokenizer.json"
    if not place.exists():
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        rng = random.Random(0)
        lines = [path.read_text(encoding="utf-8", errors="replace")[:40_000] for path in training_files()]
        forms = "".join(f.fact + f.question + f.answer for f in FORMS)
        lines += [forms.format(key="", value=number(rng, held_out=False, digits=7)) + NOISE] * 1500
        core.train_from_iterator(lines, trainer)
        core.save(str(place))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(place), pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=4096
    )


def encoded(tokenizer: Any, work: Path, files: list[Path]) -> np.ndarray:
    """All training text as one stream of token ids."""
    place = work / "text.npy"
    if not place.exists():
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        ids = [i for found in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in found]
        np.save(place, np.array(ids, dtype=np.uint16))
    return np.load(place)


def new_model(seed: int) -> Any:
    """Eight layers, three Gated DeltaNet to one full attention; random weights."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.2)
        for layer in model.model.layers:
            start_delta_net(layer.linear_attn) if hasattr(layer, "linear_attn") else start_attention(
                layer.self_attn
            )
    return model


def start_delta_net(mixer: Any) -> None:
    """Heads that forget at different rates, a convolution that mixes the last four tokens, and queries like keys."""
    mixer.A_log.uniform_(1, 16).log_()
    step = torch.exp(torch.rand(mixer.dt_bias.shape) * math.log(100) + math.log(1e-3))  # 0.001 to 0.1
    mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    mixer.conv1d.weight.uniform_(-0.5, 0.5)
    for weight in (mixer.in_proj_qkv.weight, mixer.conv1d.weight):
        weight[mixer.key_dim : 2 * mixer.key_dim] = weight[: mixer.key_dim]


def start_attention(mixer: Any) -> None:
    """Heads that copy what they attend to, so that only where to look is left to learn.

    With the convolution's start this shortens the plateau before the first recall from over 400 steps to 100.
    """
    rows, width = mixer.v_proj.weight.shape  # [H_kv * D, d]
    basis = torch.linalg.qr(torch.randn(width, rows))[0].T
    mixer.v_proj.weight.copy_(basis)
    heads = basis.reshape(-1, mixer.head_dim, width).repeat_interleave(mixer.num_key_value_groups, 0)
    mixer.o_proj.weight.copy_(heads.flatten(0, 1).T)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The library's chunked gated delta rule from an empty state, for training: a third less time on a CPU.

    Args:
        query, key: [B, n, H, dk]; value: [B, n, H, dv]; g (log decay), beta: [B, n, H].
    """
    sizes, n = query.shape, query.shape[1]
    pad, chunks = -n % chunk_size, -(-n // chunk_size)

    def parted(x: Tensor) -> Tensor:  # [B, n, H, d] -> [B*H*chunks, chunk, d]
        x = F.pad(x, (0, 0, 0, 0, 0, pad))
        return x.transpose(1, 2).reshape(-1, chunk_size, x.shape[-1])

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    def by_chunk(x: Tensor) -> tuple[Tensor, ...]:
        return x.reshape(-1, chunks, *x.shape[1:]).unbind(1)

    q, k, v, b = (
        parted(unit(query) * sizes[-1] ** -0.5),
        parted(unit(key)),
        parted(value),
        parted(beta[..., None]),
    )
    decay = parted(g[..., None]).cumsum(1)
    between = (decay - decay.transpose(1, 2)).clamp(max=0).exp().tril()
    system = (k @ k.transpose(1, 2)) * between * b
    right = torch.cat([v * b, k * (b * decay.exp())], -1)
    new, seen = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [value.shape[-1], sizes[-1]], -1
    )
    last = decay[:, -1:]
    within = by_chunk((q @ k.transpose(1, 2)) * between)
    rows = zip(
        by_chunk(new),
        by_chunk(seen),
        within,
        by_chunk(q * decay.exp()),
        by_chunk((k * (last - decay).exp()).transpose(1, 2)),
        by_chunk(last.exp()),
        strict=True,
    )
    state, out = None, []
    for u, old, inner, read, write, kept in rows:
        if state is None:
            out.append(inner @ u)
            state = write @ u
        else:
            u = torch.baddbmm(u, old, state, alpha=-1)
            out.append(torch.baddbmm(read @ state, inner, u))
            state = torch.baddbmm(state * kept, write, u)
    joined = torch.stack(out, 1).reshape(sizes[0], sizes[2], n + pad, -1)
    return joined[:, :, :n].transpose(1, 2), None


@contextmanager
def own_delta_rule(model: Any) -> Iterator[None]:
    """Trains with `delta_rule`; stops unless it gives the logits of the library's."""
    ids = torch.randint(3, VOCABULARY, (2, 150))
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
        found = model(ids, use_cache=False).logits
    if not torch.allclose(found, expected, atol=1e-3):
        sys.exit(f"the delta rule differs from the library's by {(found - expected).abs().max()}")
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = theirs


def losses(model: Any, ids: Tensor, roles: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """By role: mean nats and share predicted right. Facts and questions cannot be predicted and are left out."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    right = logits.detach().argmax(-1).flatten() == ids[:, 1:].flatten()
    kinds = roles[:, 1:].flatten()
    return {
        role: (nats[kinds == role].mean(), right[kinds == role].float().mean())
        for role in (TEXT, ANSWER, REPEAT)
        if (kinds == role).any()
    }


def optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=lr / 5, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Any, maker: Maker, stages: list[Stage], args: Any) -> tuple[int, float]:
    """Runs the stages from the last checkpoint on; returns the last step and the CPU seconds of all runs."""
    optims = optimizers(model, args.lr)
    place, first, spent = args.work / "checkpoint.pt", 0, 0.0
    if place.exists():
        kept = torch.load(place, weights_only=True)
        model.load_state_dict(kept["model"])
        for optim, state in zip(optims, kept["optims"], strict=True):
            optim.load_state_dict(state)
        first, spent = kept["step"], kept["seconds"]
    plan = [stage for stage in stages for _ in range(stage.steps)]
    started, seen = time.process_time() - spent, {TEXT: 0.0, ANSWER: 0.0, REPEAT: 0.0}
    model.train()
    for step in range(first, min(len(plan), args.stop or len(plan))):
        left = (len(plan) - step) / max(1.0, args.decay * len(plan))
        for optim, lr in zip(optims, (args.lr, args.lr / 5), strict=True):
            optim.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 40, left)
        stage = plan[step]
        ids, roles = batch(maker, args.seed, step, stage.size, stage.tokens, hard=stage.answers > 1)
        found = losses(model, ids, roles)
        sum(loss * (stage.answers if role == ANSWER else 1) for role, (loss, _) in found.items()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        for role, (loss, right) in found.items():
            value = loss.item() if role == TEXT else right.item()
            seen[role] = value if not seen[role] else 0.95 * seen[role] + 0.05 * value
        done, seconds = step + 1, time.process_time() - started
        if done % 20 == 0:
            print(
                f"step {done}/{len(plan)} tokens {plan[step].tokens} text {seen[TEXT]:.3f} nats, answers "
                f"{seen[ANSWER]:.3f} right, repeats {seen[REPEAT]:.3f} right, {seconds:.0f} s",
                flush=True,
            )
        if done % EVERY == 0 or done == len(plan):
            state = {"model": model.state_dict(), "optims": [o.state_dict() for o in optims]}
            torch.save({**state, "step": done, "seconds": seconds}, place.with_suffix(".new"))
            place.with_suffix(".new").replace(place)
            first, spent = done, seconds
        if done % (2 * EVERY) == 0:
            print(f"step {done}: {quick(model, maker, plan[step].tokens)}", flush=True)
    return first, spent


def quick(model: Any, maker: Maker, tokens: int) -> str:
    """Recall of a few held-out facts, by form, in prompts of this length."""
    model.eval()
    facts = 4 if tokens > 200 else 2
    found = {
        name: sum(recalled(model, spread(maker, 1, 12, max(tokens, 160), form=form, facts=facts))) / 12
        for name, form in FORM.items()
    }
    model.train()
    return ", ".join(f"{name} {share:.2f}" for name, share in found.items())


def save(model: Any, tokenizer: Any, args: Any, result: dict[str, Any], step: int, seconds: float) -> None:
    """Weights in fp16, config, tokenizer and what was measured."""
    import transformers

    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    about = {
        "command": "python results/hybrid/train.py " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stages": args.stages,
        "seed": args.seed,
        "steps": step,
        "cpu_seconds": round(seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (args.out / "README.md").write_text(readme({**about, **result}), encoding="utf-8")
    (args.out / "training.json").write_text(
        json.dumps({**about, **result}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps({**about, **result}, indent=1))


if __name__ == "__main__":
    main()
