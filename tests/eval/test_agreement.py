"""Exact's continuation is the stock model's, and every arm that reads it is the slow reference."""

from __future__ import annotations

import json

import pytest
import torch

from ridgefill.compat import cache_kwarg
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval import agreement
from ridgefill.eval.agreement import measure_agreement
from ridgefill.eval.arms import Arm
from ridgefill.eval.losses import Document
from ridgefill.eval.results import Run
from ridgefill.fill import TrueInputs
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan

from ..reference import (
    LEADING,
    TAIL,
    N,
    close,
    filled_rows,
    generate,
    model_of,
    prompt,
    random_maps,
    reference_logits,
)
from ..tiny import tiny_model

STEPS = 12
FILLS = ("ridge", "identity", "none", "pop")


def opened(tmp_path, name="run"):
    return Run.open(tmp_path / name, "agreement", {}, {"arms": {}})


def plan_of(model, fill, **settings):
    """A plan of the random maps' split; POP's is its own."""
    maps = None if fill == "pop" else random_maps(model, 3)
    given = {} if fill == "pop" else {"tail": TAIL}
    return make_plan(6, maps, fill=fill, leading=LEADING, **(given | settings))


def arms_of(model, *names, **others):
    """Exact, then the fills named, and others by their settings."""
    plans = {name: plan_of(model, name) for name in ("exact", *names)}
    plans |= {name: plan_of(model, **settings) for name, settings in others.items()}
    return [Arm(name, lambda n, plan=plan: plan) for name, plan in plans.items()]


def measured(model, run, arms=None, seeds=(0,), steps=STEPS, n=N):
    documents = [Document(f"s/{seed}", "s", prompt(n, seed=seed)) for seed in seeds]
    arms = arms_of(model, *FILLS) if arms is None else arms
    ticks = []
    measure_agreement(model, None, arms, documents, run, continuation=steps, tick=lambda: ticks.append(1))
    assert len(ticks) == len(arms) * len(seeds)
    return {(line["arm"], line["item"]): line for line in run.lines}


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "gemma2"])
def test_arms_are_compared_over_the_stock_models_greedy_continuation(case, tmp_path):
    model, ids = model_of(case), prompt()
    found = measured(model, opened(tmp_path))
    text, _ = generate(model, ids, STEPS)
    assert found["exact", "s/0"]["continuation"] == text[0, N:].tolist()
    exact = model(text[:, :-1]).logits[0, -STEPS:].double().log_softmax(-1)
    assert torch.equal(exact.argmax(-1), text[0, N:])
    splits = {"ridge": ("ridge", 3, TAIL), "identity": ("identity", 3, TAIL), "none": ("none", 3, TAIL)}
    splits["pop"] = ("identity", 4, 1)
    for name, (fill, split, tail) in splits.items():
        filled = filled_rows(N, N + STEPS - 1, tail=tail)
        logits = reference_logits(model, text[0, :-1], filled, split, fill, random_maps(model, 3))
        own = logits[-STEPS:].double().log_softmax(-1)
        kl = (exact.exp() * (exact - own)).sum(-1)
        hand = {
            "top1": (own.argmax(-1) == exact.argmax(-1)).double().mean().item(),
            "kl": kl.mean().item(),
            "kl_median": (kl.sort().values[STEPS // 2 - 1 : STEPS // 2 + 1].mean()).item(),
        }
        line = found[name, "s/0"]
        assert line["metrics"] == pytest.approx(hand, rel=1e-3, abs=1e-5)
        assert (line["length"], line["tokens"], line["stratum"]) == (N, STEPS, "s")
        assert "continuation" not in line
    assert found["exact", "s/0"]["metrics"] == {"top1": 1.0, "kl": 0.0, "kl_median": 0.0}
    assert found["none", "s/0"]["metrics"]["kl"] > 1e-3


@pytest.mark.parametrize("fill, corrections", [("ridge", ""), ("none", ""), ("ridge", "value_rescale(8)")])
@torch.no_grad()
def test_one_pass_over_the_continuation_is_one_token_at_a_time(fill, corrections):
    model, ids, tokens = model_of("gemma2"), prompt(), prompt(STEPS, seed=9)
    decoder, arm = Decoder(model), arms_of(model, mine={"fill": fill, "corrections": corrections})[1]
    once = decoder.final(agreement._arm_outputs(decoder, arm, ids, tokens, None))[0]
    plan = arm.plan(N)
    cache = agreement._prompt_cache(decoder, plan, ids, None)
    steps = [model(ids[:, -plan.left_to_model :], use_cache=True, **cache_kwarg(cache)).logits[0, -1]]
    for i in range(STEPS - 1):
        steps.append(model(tokens[:, i : i + 1], use_cache=True, **cache_kwarg(cache)).logits[0, -1])
    close(once, torch.stack(steps))


def test_writing_from_true_inputs_agrees(tmp_path):
    model = model_of("qwen3")
    arms = [*arms_of(model), Arm("true", lambda n: FillPlan(TrueInputs(), 3, TAIL, LEADING))]
    found = measured(model, opened(tmp_path), arms)["true", "s/0"]["metrics"]
    assert found["kl"] < 1e-6 and found["top1"] == 1


def test_an_end_of_text_does_not_end_the_continuation(tmp_path):
    model = tiny_model()
    text, _ = generate(model, prompt(), 4)
    model.generation_config.eos_token_id = int(text[0, N + 1])
    line = measured(model, opened(tmp_path))["exact", "s/0"]
    assert len(line["continuation"]) == line["tokens"] == STEPS


def test_an_arm_that_shortens_the_prompt_continues_what_is_left(tmp_path):
    model, ids = model_of("llama"), prompt()

    class Half:
        def keep(self, model, tokenizer, ids, question=None, tail=1):
            return torch.arange(ids.shape[1] // 2, ids.shape[1])

    arms = [*arms_of(model), Arm("half", lambda n: FillPlan(TrueInputs(), 3, 999), compact=Half())]
    found = measured(model, opened(tmp_path), arms)
    text, _ = generate(model, ids, STEPS)
    p, q = (model(text[:, first:-1]).logits[0, -STEPS:].log_softmax(-1) for first in (0, N // 2))
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    assert found["half", "s/0"]["metrics"]["kl"] == pytest.approx(kl, rel=1e-3) and kl > 1e-3


def test_a_killed_run_keeps_its_continuation_and_adds_nothing_twice(tmp_path, monkeypatch):
    model = model_of("llama")
    whole = measured(model, opened(tmp_path, "whole"), seeds=(1, 2))
    measured(model, opened(tmp_path), arms_of(model, "ridge"), seeds=(1, 2))
    monkeypatch.setattr(agreement, "greedy", None)
    for _ in range(2):
        assert measured(model, opened(tmp_path), seeds=(1, 2)) == whole
    lines = (tmp_path / "run" / "items.jsonl").read_text().splitlines()
    assert len(lines) == len(whole) == 10
    assert {(a := json.loads(line))["arm"] + a["item"] for line in lines} == {a + i for a, i in whole}


@pytest.mark.parametrize(
    ("fills", "n", "steps", "said"),
    [
        (["identity"], TAIL + LEADING, STEPS, r"40 tokens \(arm 'identity', s/0\).* needs 41 tokens"),
        ([], 1, STEPS, "needs 2 tokens"),
        ([], 55, 10, "s/0.* 65 tokens: the model's context is 64"),
        ([], 50, 0, "it has no step"),
    ],
)
def test_bad_input_is_named_before_anything_runs(fills, n, steps, said, tmp_path):
    model = tiny_model(max_position_embeddings=64)
    run = opened(tmp_path)
    with pytest.raises((PromptError, SettingError), match=said):
        measured(model, run, arms_of(model, *fills), steps=steps, n=n)
    assert run.lines == []
