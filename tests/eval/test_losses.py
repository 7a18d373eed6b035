"""Losses on the tokens that need the prefix: by hand, on the same tokens for every arm, and over a killed run."""

from __future__ import annotations

import json

import pytest
import torch

from ridgefill.errors import CorpusError, PromptError, SettingError
from ridgefill.eval import losses
from ridgefill.eval.arms import Arm
from ridgefill.eval.losses import Document, cut_nll, documents_of, measure_losses
from ridgefill.eval.results import Run
from ridgefill.fill import TrueInputs
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan

from ..reference import LEADING, TAIL, N, close, filled_rows, model_of, prompt, random_maps, reference_logits
from ..tiny import tiny_model, tiny_tokenizer

SCORED, CONTEXT, STRIDE = 8, 40, 10


def opened(tmp_path, name="run"):
    return Run.open(tmp_path / name, "loss", {}, {"arms": {}})


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


def every_arm(model):
    return arms_of(model, "ridge", "identity", "none", "pop", longer={"fill": "identity", "tail": 50})


def document(seed=0, n=N, copied=False):
    """A text; with ``copied``, its last tokens but two stand in its prefix too."""
    ids = prompt(n, seed=seed)
    if copied:
        ids[0, -12:-2] = ids[0, 5:15]
    return Document(f"s/{seed}", "s", ids)


def measured(model, documents, run, arms=None, **settings):
    settings = {"tail": TAIL, "scored": SCORED, "context": CONTEXT, "stride": STRIDE} | settings
    ticks = []
    arms = every_arm(model) if arms is None else arms
    measure_losses(model, tiny_tokenizer(), arms, documents, run, tick=lambda: ticks.append(1), **settings)
    assert len(ticks) == len(arms) * len(documents)
    return {(line["arm"], line["item"]): line for line in run.lines}


def log_p(logits, ids):
    """Nats of the tail's tokens but the first, from logits [n, V] of ids [n]."""
    rows = logits[-TAIL:-1].double().log_softmax(-1)
    return -rows[torch.arange(TAIL - 1), ids[-TAIL + 1 :]], rows


def test_every_arm_is_scored_on_the_same_tokens_as_computed_by_hand(tmp_path):
    model, doc = model_of("llama"), document(copied=True)
    found, ids = measured(model, [doc], opened(tmp_path)), doc.ids[0]
    exact_nll, exact_rows = log_p(model(doc.ids).logits[0], ids)
    # token by token, each with exactly the last CONTEXT tokens before its block
    cut = []
    for start in range(N - TAIL + 1, N, STRIDE):
        for t in range(start, min(start + STRIDE, N)):
            window = ids[start - CONTEXT : t]
            cut.append(-model(window[None]).logits[0, -1].double().log_softmax(-1)[ids[t]])
    key = torch.stack(cut) - exact_nll > 0.1
    copied = torch.zeros(TAIL - 1, dtype=torch.bool)
    copied[-12:-2] = True
    assert 0 < key.sum() < TAIL - 1
    again = measured(model, [doc], opened(tmp_path, "rise"), rise=0.1)
    wanted = {
        "ridge": ("ridge", 3, TAIL),
        "identity": ("identity", 3, TAIL),
        "none": ("none", 3, TAIL),
        "pop": ("identity", 4, TAIL),  # its own tail is one token, which is where the scoring begins
        "longer": ("identity", 3, 50),
    }
    for name, line in again.items():
        nll, rows = exact_nll, exact_rows
        if name[0] in wanted:
            fill, split, tail = wanted[name[0]]
            filled = filled_rows(N, N, tail=tail)
            nll, rows = log_p(reference_logits(model, ids, filled, split, fill, random_maps(model, 3)), ids)
        hand = {
            "nll": nll.mean(),
            "nll_first": nll[:SCORED].mean(),
            "nll_last": nll[-SCORED:].mean(),
            "novel_nll": nll[~copied].mean(),
            "novel_nll_first": nll[:SCORED][~copied[:SCORED]].mean(),
            "novel_nll_last": nll[-2:].mean(),
            "key_nll": nll[key].mean(),
            "kl": (exact_rows.exp() * (exact_rows - rows)).sum(-1).mean(),
            "top1": (exact_rows.argmax(-1) == rows.argmax(-1)).double().mean(),
        }
        assert line["metrics"] == pytest.approx({k: v.item() for k, v in hand.items()}, abs=2e-5)
        assert line["stratum"] == "s" and line["length"] == N and line["tokens"] == TAIL - 1
        assert line["novel"] == TAIL - 1 - 10 and line["key"] == key.sum()
    places = again["exact", "s/0"]["key_tokens"]
    assert places == [N - TAIL + 1 + i for i in key.nonzero()[:, 0].tolist()]
    assert again["exact", "s/0"]["metrics"]["kl"] == 0 and again["exact", "s/0"]["metrics"]["top1"] == 1
    assert again["none", "s/0"]["metrics"]["kl"] > 0.01
    # a random model has no token that the prefix helps by two nats: no key loss, and the rest as before
    for name, line in found.items():
        assert line["key"] == 0 and "key_nll" not in line["metrics"]
        rest = {k: v for k, v in again[name]["metrics"].items() if k != "key_nll"}
        assert line["metrics"] == pytest.approx(rest)


@pytest.mark.parametrize("case", ["qwen3_next", "gemma2"])
def test_writing_from_true_inputs_loses_nothing(case, tmp_path):
    model = model_of(case)
    arms = [*arms_of(model), Arm("true", lambda n: FillPlan(TrueInputs(), 3, TAIL, LEADING))]
    found = measured(model, [document()], opened(tmp_path), arms)
    true, exact = (found[name, "s/0"]["metrics"] for name in ("true", "exact"))
    assert true["kl"] < 1e-6 and true["top1"] == 1
    assert true == pytest.approx(exact, abs=1e-5)


def test_what_a_document_lacks_is_left_out(tmp_path):
    model = model_of("llama")
    doc = document()
    doc.ids[0, -TAIL:] = doc.ids[0, :TAIL]  # nothing in the tail is novel
    metrics = {"nll", "nll_first", "nll_last", "kl", "top1"}
    context = N - TAIL + 1  # just what comes before the first scored token: nothing to cut
    found = measured(model, [doc], opened(tmp_path), context=context)
    for line in found.values():
        assert set(line["metrics"]) == metrics and line["novel"] == 0
        assert "key" not in line and "key_tokens" not in line
    found = measured(model, [doc], opened(tmp_path, "one"), context=context - 1)
    assert all("key" in line for line in found.values())


def test_first_and_last_overlap_in_a_short_tail(tmp_path):
    found = measured(model_of("llama"), [document()], opened(tmp_path), scored=512)
    for line in found.values():
        m = line["metrics"]
        assert m["nll_first"] == m["nll_last"] == m["nll"] and m["novel_nll_first"] == m["novel_nll"]


def test_a_killed_run_goes_on_and_adds_nothing_twice(tmp_path, monkeypatch):
    model, docs = model_of("llama"), [document(1), document(2)]
    whole = measured(model, docs, opened(tmp_path, "whole"), rise=0.1)
    run = opened(tmp_path)
    add, calls = Run.add, []

    def dies(self, *args, **kwargs):
        if len(calls) == 8:
            raise KeyboardInterrupt
        calls.append(1)
        add(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "add", dies)
        measured(model, docs, run, rise=0.1)
    items = tmp_path / "run" / "items.jsonl"
    assert len(items.read_text().splitlines()) == 8
    # the exact arm of both documents is there, and with it the key tokens: nothing is cut again
    monkeypatch.setattr(losses, "cut_nll", None)
    for _ in range(2):
        assert measured(model, docs, opened(tmp_path), rise=0.1) == whole
    lines = [json.loads(line) for line in items.read_text().splitlines()]
    assert lines == list(whole.values())


def test_the_cut_context_begins_with_the_beginning_of_the_text():
    """Models that were trained with a first token of their own are lost without it."""
    model, ids = model_of("qwen3"), prompt()
    ids[0, 0] = 257
    plain = cut_nll(Decoder(model), ids, 5, 30, stride=2)
    kept = cut_nll(Decoder(model), ids, 5, 30, stride=2, bos=257)
    for i, t in enumerate(range(N - 5, N)):
        start = t - i % 2
        for found, first in ((plain, ids[:, :0]), (kept, ids[:, :1])):
            window = torch.cat([first, ids[:, start - 30 : t]], 1)
            close(found[i], -model(window).logits[0, -1].log_softmax(-1)[ids[0, t]])
    assert not torch.allclose(plain, kept, atol=1e-3)
    close(cut_nll(Decoder(model), ids, 5, 30, stride=2, bos=9), plain)  # it does not begin so


def test_arm_after_arm_with_exact_kept_is_all_at_once(tmp_path, monkeypatch):
    model, docs = model_of("llama"), [document(1), document(2)]
    whole = measured(model, docs, opened(tmp_path, "whole"))
    run, kept = opened(tmp_path), {}
    measured(model, docs, run, every_arm(model)[:1], kept=kept)
    monkeypatch.setattr(losses, "scored_outputs", None)
    for arm in every_arm(model)[1:]:
        measured(model, docs, run, [arm], kept=kept)
    assert {(line["arm"], line["item"]): line for line in run.lines} == whole


@pytest.mark.parametrize(
    ("arms", "n", "settings", "said"),
    [
        (
            {"mine": {"fill": "identity", "tail": 80}},
            200,
            {},
            r"60 tokens \(arm 'mine', s/1\).* needs 97 tokens",
        ),
        ({}, TAIL, {}, r"24 tokens \(s/0\)"),
        ({}, 65, {}, "s/0.*context is 64"),
        ({}, 60, {"tail": 1}, "give tail=2"),
        ({}, 60, {"stride": 0}, "give stride=1"),
        ({}, 60, {"scored": 0}, "give scored=1"),
    ],
)
def test_bad_input_is_named_before_anything_runs(arms, n, settings, said, tmp_path):
    longest = 64 if "context" in said else 4096
    model = tiny_model("llama", max_position_embeddings=longest)
    run = opened(tmp_path)
    with pytest.raises((PromptError, SettingError), match=said):
        measured(
            model, [Document("s/1", "s", prompt(60)), document(n=n)], run, arms_of(model, **arms), **settings
        )
    assert run.lines == []


def test_documents_of_one_name_are_refused(tmp_path):
    with pytest.raises(SettingError, match="two are named 's/0'"):
        measured(model_of("llama"), [document(), document()], opened(tmp_path))
    with pytest.raises(PromptError, match=r"shape \(2, 5\)"):
        Document("a", "b", torch.zeros(2, 5, dtype=torch.long))


def test_documents_are_drawn_from_every_stratum_and_named_by_what_they_hold(tmp_path):
    for name, letters in (("prose", "abc"), ("code", "xy")):
        (tmp_path / name).mkdir()
        for letter in letters:
            (tmp_path / name / f"{letter}.txt").write_text(letter * 100)
    texts = {name: [tmp_path / name] for name in ("prose", "code")}
    found = documents_of(tiny_tokenizer(), texts, 50, 2)
    assert [d.stratum for d in found] == ["prose", "prose", "code", "code"]
    assert all(d.ids.shape == (1, 50) for d in found)
    names = [d.item for d in found]
    assert [name.rsplit("/", 1)[0] for name in names] == ["prose/0", "prose/1", "code/0", "code/1"]
    assert len({name.rsplit("/", 1)[1] for name in names}) == 4
    assert all(len(name.rsplit("/", 1)[1]) == 12 for name in names)
    assert [d.item for d in documents_of(tiny_tokenizer(), texts, 50, 2)] == names
    with pytest.raises(CorpusError, match="999 tokens"):
        documents_of(tiny_tokenizer(), texts, 999, 2)
