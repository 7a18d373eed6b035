"""The tail's loss: the exact arm's is the stock model's, and a fill with the true map loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import cross_entropy

from ridgefill import prefill
from ridgefill.compat import cache_kwarg
from ridgefill.errors import PromptError
from ridgefill.eval import loss
from ridgefill.eval.arms import Arm
from ridgefill.eval.loss import (
    QUESTION,
    TailLoss,
    arm_outputs,
    compare,
    logits_of,
    score,
    scored_outputs,
    tail_nll,
)
from ridgefill.fill import Exact, Identity, NoFill, Ridge, TrueInputs
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan

from ..reference import (
    CASES,
    LEADING,
    TAIL,
    WIDTH,
    N,
    close,
    filled_rows,
    hooks_of,
    model_of,
    prompt,
    random_maps,
    reference_logits,
)
from ..tiny import tiny_model

each_case = pytest.mark.parametrize("case", CASES)


def nats(logits, ids, tail=TAIL):
    """Of the tail's tokens but the first, from logits [n, V] of ids [n]."""
    return cross_entropy(logits[-tail:-1].float(), ids[-tail + 1 :], reduction="none")


@each_case
@pytest.mark.parametrize("arm", [Exact(), TrueInputs()], ids=["exact", "true"])
@torch.no_grad()
def test_exact_is_the_stock_cross_entropy(case, arm):
    model, ids = model_of(case), prompt()
    found = tail_nll(Decoder(model), FillPlan(arm, 3, TAIL, LEADING), ids)
    assert found.shape == (TAIL - 1,) and found.dtype == torch.float32
    torch.testing.assert_close(found, nats(model(ids).logits[0], ids[0]), rtol=1e-5, atol=1e-5)


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
def test_fills_are_those_of_the_slow_reference(case, fill):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, 3)
    arm = {"ridge": Ridge(maps), "identity": Identity(), "none": NoFill()}[fill]
    found = tail_nll(Decoder(model), FillPlan(arm, 3, TAIL, LEADING), ids)
    expected = reference_logits(model, ids[0], filled_rows(N, N), 3, fill, maps)
    torch.testing.assert_close(found, nats(expected, ids[0]), rtol=1e-5, atol=1e-5)
    assert hooks_of(model) == 0


@torch.no_grad()
def test_a_ridge_fill_with_the_true_affine_map_loses_nothing():
    """Late layers that add a constant to every row: their inputs are affine in the split state, by A = I."""
    model, ids = tiny_model("llama", mlp_bias=True), prompt()
    added = torch.zeros(WIDTH)
    maps = {}
    for i, layer in enumerate(model.model.layers):
        if i >= 3:
            maps[i] = AffineMap(torch.eye(WIDTH), added.clone())
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.mul_(40)
            added += layer.mlp.down_proj.bias
    # the last layer reads the prefix, so that a wrong fill shows
    model.model.layers[5].self_attn.o_proj.weight.copy_(torch.eye(WIDTH) * 3)
    arms = {"exact": Exact(), "ridge": Ridge(RidgeMaps(3, maps)), "identity": Identity()}
    plans = {name: FillPlan(arm, 3, TAIL, leading=0) for name, arm in arms.items()}
    [found] = compare(Decoder(model), plans, [ids])
    for name, size in (("ridge", 0.0), ("identity", 1e-3)):
        delta = found[name].minus(found["exact"])
        if size:
            assert abs(delta.all) > size
        else:
            assert max(abs(delta.first), abs(delta.last), abs(delta.all)) < 2e-6


def test_logits_in_parts_are_the_whole(monkeypatch):
    decoder, plan, ids = Decoder(model_of("gemma2")), FillPlan(Identity(), 3, TAIL, LEADING), prompt()
    whole = tail_nll(decoder, plan, ids)
    monkeypatch.setattr(loss, "_LOGIT_ROWS", 5)
    torch.testing.assert_close(tail_nll(decoder, plan, ids), whole, rtol=1e-5, atol=1e-5)


def test_both_ends_of_the_tail_are_scored():
    nll = torch.arange(10.0)
    assert TailLoss.of(nll, scored=3) == TailLoss(first=1.0, last=8.0, all=4.5)
    assert TailLoss.of(nll, scored=50) == TailLoss(4.5, 4.5, 4.5)
    assert TailLoss(3.0, 2.0, 1.0).minus(TailLoss(1.0, 0.5, 0.25)) == TailLoss(2.0, 1.5, 0.75)


def test_compare_gives_each_document_its_row():
    decoder, documents = Decoder(model_of("llama")), [prompt(seed=s) for s in (1, 2)]
    plans = {name: FillPlan(arm, 3, TAIL, 0) for name, arm in (("exact", Exact()), ("identity", Identity()))}
    found = compare(decoder, plans, documents)
    assert [set(row) for row in found] == [{"exact", "identity"}] * 2
    for row, ids in zip(found, documents, strict=True):
        for name, plan in plans.items():
            assert row[name].all == pytest.approx(tail_nll(decoder, plan, ids).mean().item())
    assert found[0]["exact"] != found[1]["exact"] and found[0]["exact"] != found[0]["identity"]


@pytest.mark.parametrize(
    ("n", "tail", "leading"), [(TAIL + LEADING, TAIL, LEADING), (N, 1, 0), (0, TAIL, 0), (N, N, 0)]
)
def test_too_short_a_document_is_refused(n, tail, leading):
    with pytest.raises(PromptError, match=f"document of {n} tokens"):
        tail_nll(Decoder(model_of("llama")), FillPlan(Identity(), 3, tail, leading), prompt(n))


def test_the_shortest_document():
    plan = FillPlan(Identity(), 3, 2, LEADING)
    assert tail_nll(Decoder(model_of("llama")), plan, prompt(plan.shortest)).shape == (1,)


def test_a_document_longer_than_the_context_is_refused():
    model = tiny_model("llama", max_position_embeddings=64)
    with pytest.raises(PromptError, match="context is 64"):
        tail_nll(Decoder(model), FillPlan(Identity(), 3, TAIL, 0), prompt(65))


def keep_every_third(model, tokenizer, ids, question=None, tail=1):
    n = ids.shape[1]
    return torch.cat([torch.arange(0, n - tail, 3), torch.arange(n - tail, n)])


@dataclass(frozen=True)
class Third:
    """Keeps every third row before the tail, and remembers what it was asked."""

    asked: list = field(default_factory=list)

    def keep(self, model, tokenizer, ids, question=None, tail=1):
        self.asked.append((question, tail, ids.shape[1]))
        return keep_every_third(model, tokenizer, ids, question, tail)


def scored(decoder, plan, ids):
    """Logits, block after block, of the rows that predict the last TAIL - 1 tokens."""
    return logits_of(decoder, scored_outputs(decoder, plan, ids, TAIL))


@pytest.mark.parametrize("tail", [1, 8, TAIL, 40])
def test_arms_of_any_tail_are_scored_on_the_same_tokens(tail):
    """A shorter tail is lengthened, of a longer one the end is scored: in both the fill ends where the arm says."""
    model, ids = model_of("llama"), prompt()
    plan = FillPlan(Identity(), 3, tail, LEADING)
    logits = torch.cat(list(scored(Decoder(model), plan, ids)))
    filled = filled_rows(N, N, tail=max(tail, TAIL))
    expected = reference_logits(model, ids[0], filled, 3, "identity", None)
    assert logits.shape == (TAIL - 1, 320)
    close(logits, expected[-TAIL:-1])


def test_a_tail_of_one_is_a_prompt_whose_continuation_is_fed_token_by_token():
    """POP's own setting: prefill with a tail of one, then every scored token as if it had been generated."""
    model, ids = model_of("llama"), prompt()
    decoder, plan = Decoder(model), FillPlan(Identity(), 4, 1, LEADING)
    start = N - TAIL + 1
    cache = prefill(model, ids[:, :start], tail=1, fill="identity", split=4, leading=LEADING)
    steps = []
    for i in range(start - 1, N - 1):
        steps.append(model(ids[:, i : i + 1], use_cache=True, **cache_kwarg(cache)).logits[0])
    close(torch.cat(list(scored(decoder, plan, ids))), torch.cat(steps))


def test_exact_ignores_tail_and_leading_rows():
    model, ids = model_of("qwen3"), prompt(TAIL + 1)
    plan = FillPlan(Exact(), 3, tail=999, leading=99)
    close(torch.cat(list(scored(Decoder(model), plan, ids))), model(ids).logits[0, -TAIL:-1])


def test_logits_come_in_blocks(monkeypatch):
    monkeypatch.setattr(loss, "_LOGIT_ROWS", 10)
    plan = FillPlan(Identity(), 3, TAIL, LEADING)
    blocks = scored(Decoder(model_of("llama")), plan, prompt())
    assert [len(block) for block in blocks] == [10, 10, 3]


def test_an_arm_that_shortens_the_prompt_runs_the_rest_exactly():
    model, ids, third = model_of("llama"), prompt(), Third()
    arm = Arm("third", lambda n: FillPlan(Exact(), 3, TAIL), compact=third)
    found = arm_outputs(Decoder(model), arm, ids, TAIL)
    short = ids[:, keep_every_third(None, None, ids, tail=TAIL)]
    assert third.asked == [((N - TAIL - QUESTION, N - TAIL), TAIL, N)]
    close(Decoder(model).final(found)[0], model(short).logits[0, -TAIL:-1])


def test_selectors_read_the_rows_before_the_scored_stretch():
    """Also of an arm with a longer tail, where these rows are exact ones."""
    asked = []

    @dataclass(frozen=True)
    class Watch:
        attends: bool = False
        probes: bool = False

        def select(self, prompt):
            asked.append((prompt.prefix, prompt.question, len(prompt.ids)))
            return torch.zeros(prompt.prefix, dtype=torch.bool)

    for tail in (TAIL, 40):
        plan = FillPlan(Identity(), 3, tail, LEADING, rows=Watch())
        scored_outputs(Decoder(model_of("llama")), plan, prompt(), TAIL)
    question = (N - TAIL - QUESTION, N - TAIL)
    assert asked == [(N - TAIL, question, N), (N - 40, question, N)]


def test_scores_are_those_computed_by_hand(monkeypatch):
    monkeypatch.setattr(loss, "_LOGIT_ROWS", 10)  # more than one block
    decoder, ids = Decoder(model_of("llama")), prompt()
    exact, own = (
        scored_outputs(decoder, FillPlan(fill, 3, TAIL, LEADING), ids, TAIL) for fill in (Exact(), NoFill())
    )
    found = score(decoder, own, exact, ids)
    p, q = (decoder.final(h)[0].double().softmax(-1) for h in (exact, own))
    wanted = ids[0, -TAIL + 1 :]
    close(found.nll, -q[torch.arange(TAIL - 1), wanted].log().float())
    close(found.kl, (p * (p / q).log()).sum(-1).float())
    assert found.kl.min() > 1e-3  # the other direction, KL(arm || exact), is another number
    assert not torch.allclose(found.kl, (q * (q / p).log()).sum(-1).float(), rtol=1e-2)
    assert torch.equal(found.same, p.argmax(-1) == q.argmax(-1)) and 0 < found.same.sum() < TAIL - 1
    alone = score(decoder, exact, exact, ids)
    assert alone.kl.max() == 0 and alone.same.all()


def test_wide_models_with_an_indexer_are_scored():
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers has no qwen4_exp")
    from ..models.test_qwen4 import model_of as qwen4

    model, ids = qwen4(), prompt()
    found = tail_nll(Decoder(model), FillPlan(Exact(), 3, TAIL), ids)
    torch.testing.assert_close(found, nats(model(ids).logits[0], ids[0]), rtol=1e-4, atol=1e-4)
