"""lm-eval with an arm's prefill: exact equals HFLM, fills fill, rows are where they are said to be."""

import sys

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from ridgefill.errors import PromptError, SettingError
from ridgefill.eval import harness
from ridgefill.eval.arms import Arm
from ridgefill.eval.harness import Context, arm_lm, run_tasks
from ridgefill.plan import make_plan
from tests.tiny import tiny_model, tiny_tokenizer

TAIL = 60
SETTINGS = {"until": [], "do_sample": False, "max_gen_toks": 12}


def arm(name, compact=None):
    plan = make_plan(6, None, fill=name, split=3, tail=TAIL, leading=16)
    return Arm(name, lambda n: plan, name, compact)


def requests(texts, **settings):
    return [
        Instance("generate_until", {"item": f"t/{i}"}, (text, SETTINGS | settings), i, metadata=("t", i, 1))
        for i, text in enumerate(texts)
    ]


TEXTS = ["abc " * 50, "The river runs. " * 12, "0123456789" * 17]


class LastRows:
    """An arm's rival that keeps the last rows."""

    def keep(self, model, tokenizer, ids, question=None, tail=1):
        return torch.arange(ids.shape[1] - 70, ids.shape[1])


@pytest.mark.parametrize("until", [[], ["a"], ["\x93", "zz"]])
def test_the_exact_arm_gives_what_hflm_gives(until):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    expected = plain.generate_until(requests(TEXTS, until=until), disable_tqdm=True)
    assert arm_lm(model, tokenizer, arm("exact")).generate_until(requests(TEXTS, until=until)) == expected
    assert len(set(expected)) == 3


def test_a_fill_arm_fills_every_prompt_and_gives_what_it_gives_alone(monkeypatch):
    model, tokenizer, stats = tiny_model(), tiny_tokenizer(), []
    real = Arm.on

    def on(self, *args):
        filling = real(self, *args)
        stats.append(filling)
        return filling

    monkeypatch.setattr(Arm, "on", on)
    answers = arm_lm(model, tokenizer, arm("identity")).generate_until(requests(TEXTS))
    assert [f.stats.reason for f in stats] == [None] * 3
    assert [f.stats.filled for f in stats] == [len(t) - TAIL - 16 for t in TEXTS]
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = arm("identity").generate(model, tokenizer, ids, max_new_tokens=12)
        assert answer == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answers != arm_lm(model, tokenizer, arm("exact")).generate_until(requests(TEXTS))


def test_an_arm_that_shortens_prompts_keeps_budget_and_stop_sequences():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    short = arm("exact", LastRows())
    (answer,) = arm_lm(model, tokenizer, short).generate_until(requests(TEXTS[:1]))
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][:, -70:]
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    new = out[0, 70:]
    assert answer == tokenizer.decode(new, skip_special_tokens=True)
    stop = tokenizer.decode(new[4:5])
    counted = []
    (cut,) = arm_lm(
        model, tokenizer, short, heard=lambda doc, context, answer, seconds: counted.append(seconds)
    ).generate_until(requests(TEXTS[:1], until=[stop]))
    assert cut == answer.split(stop)[0] and len(counted) == 1


def test_stop_sequences_end_the_generation_of_a_shortened_prompt(monkeypatch):
    model, tokenizer, lengths = tiny_model(), tiny_tokenizer(), []
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][:, -70:]
    new = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 70:].tolist()
    stop = "pV"  # two tokens
    ends = next(i for i in range(2, 40) if tokenizer.decode(new[i - 2 : i]) == stop)
    real = Arm.generate

    def generate(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        lengths.append(out.shape[1] - len(TEXTS[0]))
        return out

    monkeypatch.setattr(Arm, "generate", generate)
    lm = arm_lm(model, tokenizer, arm("exact", LastRows()))
    lm.generate_until(requests(TEXTS[:1], until=[stop], max_gen_toks=40))
    assert lengths == [ends] and 2 < ends < 40


def test_question_rows_reach_the_arm_and_answers_are_heard_as_they_come(monkeypatch):
    seen, heard, real = [], [], Arm.generate

    def generate(self, *args, question=None, **kwargs):
        seen.append((question, len(heard)))
        return real(self, *args, question=question, **kwargs)

    monkeypatch.setattr(Arm, "generate", generate)
    lm = arm_lm(
        tiny_model(),
        tiny_tokenizer(),
        arm("identity"),
        question=lambda doc, context: context.rows(4, 9) if doc["item"] == "t/1" else None,
        heard=lambda doc, context, answer, seconds: heard.append(
            (doc["item"], context.text, answer, seconds)
        ),
    )
    answers = lm.generate_until(requests(TEXTS[:2]))
    assert seen == [(None, 0), ((4, 9), 1)]
    assert [h[:3] for h in heard] == [(f"t/{i}", TEXTS[i], answers[i]) for i in range(2)]
    assert all(h[3] > 0 for h in heard)


def test_a_rehearsal_generates_nothing(monkeypatch):
    monkeypatch.setattr(Arm, "generate", None)
    heard = []
    lm = arm_lm(
        tiny_model(), tiny_tokenizer(), arm("exact"), rehearse=True, heard=lambda *given: heard.append(given)
    )
    assert lm.generate_until(requests(TEXTS)) == ["", "", ""] and len(heard) == 3


def test_rows_are_those_of_the_characters():
    context = Context("héllo wörld", torch.zeros(1, 6), [(0, 0), (0, 1), (1, 5), (5, 8), (8, 11), (11, 11)])
    assert context.rows(0, 1) == (1, 2)
    assert context.rows(4, 6) == (2, 4)
    assert context.rows(6, 11) == (3, 5)
    assert context.rows_within("  wörld \n", [(2, 3), (4, 7)]) == [(3, 4), (4, 5)]
    with pytest.raises(PromptError, match="no token"):
        context.rows(11, 14)
    with pytest.raises(PromptError, match="chat template changes it"):
        context.rows_within("earth", [(0, 1)])


def test_a_prompt_is_never_truncated():
    lm = arm_lm(tiny_model(max_position_embeddings=211), tiny_tokenizer(), arm("exact"))
    with pytest.raises(PromptError, match=r"t/0, of 200 tokens and 12"):
        lm.generate_until(requests(["a" * 200]))
    assert len(lm.generate_until(requests(["a" * 199]))) == 1


def test_a_tokenizer_without_padding_is_left_as_it_was():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    (answer,) = arm_lm(tiny_model(), tokenizer, arm("identity")).generate_until(requests(TEXTS[:1]))
    assert tokenizer.pad_token is None and answer


def test_refusals_are_named(tmp_path, monkeypatch):
    class Slow:
        is_fast = False

    with pytest.raises(SettingError, match="offsets"):
        arm_lm(tiny_model(), Slow(), arm("exact"))
    lm = arm_lm(tiny_model(), tiny_tokenizer(), arm("exact"))
    with pytest.raises(SettingError, match="no_such_task"):
        run_tasks(lm, tmp_path, ["no_such_task"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    harness._arm_lm_class.cache_clear()
    with pytest.raises(SettingError, match="not installed"):
        arm_lm(tiny_model(), tiny_tokenizer(), arm("exact"))
    harness._arm_lm_class.cache_clear()
