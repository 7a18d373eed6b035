"""A second question over a cache filled for the first: what is asked, what the cache holds, and what is kept."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch

from ridgefill.compat import cache_kwarg
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.haystack import Haystack
from ridgefill.eval.results import Run
from ridgefill.eval.two_turn import TURNS, converse, measure_two_turn, second_question
from ridgefill.plan import make_plan
from ridgefill.prefill import prefill
from ridgefill.rows.base import Selector
from tests.reference import model_of
from tests.tiny import tiny_tokenizer

N, TAIL, NEW = 1000, 300, 5
HAYSTACK = Haystack(tokens=N, tail=TAIL, leading=16, needles="multikey")
SENTENCE = "One of the special magic {values} for {key} is: {value}."


def items_of(chat=True, count=2, **kind):
    return dataclasses.replace(HAYSTACK, **kind).items(tiny_tokenizer(chat), count)


def arm_of(fill, name=None, **settings):
    plan = make_plan(6, fill=fill, **{"split": 3, "tail": TAIL, "leading": 16, **settings})
    return Arm(name or fill, lambda n: plan, fill)


@pytest.fixture(scope="module")
def item():
    return items_of()[0]


@dataclass(frozen=True)
class GivenRows(Selector):
    """Rows that the test names."""

    first: int
    stop: int

    def select(self, prompt):
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        chosen[self.first : self.stop] = True
        return chosen


# the second question


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "kind", [{}, {"values": "words"}, {"wording": "paraphrased", "values": "uuids"}, {"question_first": True}]
)
def test_it_asks_for_another_needle_in_the_same_words(chat, kind):
    tokenizer = tiny_tokenizer(chat)
    for item in items_of(chat, tokens=1500, **kind):
        second = second_question(tokenizer, item)
        assert second.needle in item.needles and second.needle not in item.asked
        sentence = tokenizer.decode(item.ids[0, slice(*second.needle)])
        assert sentence.endswith(f"is: {second.answer}.") and second.answer not in item.answers
        first = tokenizer.decode(item.ids[0, slice(*item.question)])
        text = tokenizer.decode(second.ids[0])
        key = sentence.split(" for ")[1].split(" is: ")[0]
        start = item.text[item.text.rindex("The ") :]
        if kind.get("wording") == "paraphrased":
            assert key not in text and "goes with the " in text
            question, start = text.split("?")[0].split("\n")[-1] + "?", text[text.rindex("The ") :]
            assert question.split("with ")[1][:-1] == start.split("with ")[1].removesuffix(" is:")
            assert question.split("with ")[0] == first.split("with ")[0] and question != first
        else:
            asked = first.split(" for ")[1].split(" mentioned")[0]
            question, start = first.replace(asked, key), start.replace(asked, key)
        form = (
            f"<|end|>\n<|user|>\n{question}<|end|>\n<|assistant|>\n{start}"
            if chat
            else f"\n{question} {start}"
        )
        assert text == form


def test_every_item_asks_for_a_needle_and_then_the_next():
    for item in items_of(count=6):
        second = second_question(tiny_tokenizer(), item)
        following = [needle for needle in item.needles if needle > item.asked[0]]
        assert second.needle == (following or item.needles)[0]


@pytest.mark.parametrize("needles", ["single", "multivalue", "multiquery"])
def test_items_without_another_key_are_refused(needles):
    with pytest.raises(SettingError, match="multikey"):
        second_question(tiny_tokenizer(), items_of(count=1, needles=needles)[0])


def test_a_chat_form_that_drops_answers_is_refused(item):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(SettingError, match="chat form"):
        second_question(tokenizer, item)


# both turns


def greedy(model, ids, cache, new):
    """Tokens after ids [1, n], whose first rows the cache holds: one forward of the rest, then one for each token."""
    made = []
    feed = ids[:, cache.get_seq_length() :]
    for _ in range(new):
        logits = model(feed, use_cache=True, **cache_kwarg(cache)).logits
        feed = logits[:, -1:].argmax(-1)
        made.append(feed)
    return torch.cat([ids, *made], 1)


@pytest.mark.parametrize(("family", "chat"), [("llama", True), ("llama", False), ("qwen3_5_text", True)])
def test_the_exact_arm_is_plain_generation_of_the_conversation(family, chat):
    model, tokenizer, item = model_of(family), tiny_tokenizer(chat), items_of(chat, 1)[0]
    second = second_question(tokenizer, item)
    told = converse(model, tokenizer, arm_of("exact"), item, second, NEW)
    plain = {"max_new_tokens": NEW, "do_sample": False}
    first = model.generate(item.ids, attention_mask=torch.ones_like(item.ids), **plain)
    assert torch.equal(told.first.ids, first) and told.first.length == N
    ends = first[0, -1] == 258
    whole = torch.cat([first[:, :-1] if ends else first, second.ids], 1)
    assert torch.equal(told.second.ids[:, : whole.shape[1]], whole) and told.second.length == whole.shape[1]
    then = model.generate(whole, attention_mask=torch.ones_like(whole), **plain)
    assert torch.equal(told.second.ids, then)
    assert told.second.text == tokenizer.decode(then[0, whole.shape[1] :], skip_special_tokens=True).strip()
    assert told.covered is None


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "tail"),
    [
        ("llama", TAIL),
        ("llama", 20),
        ("gpt_oss", TAIL),
        ("qwen3_5_text", 20),
    ],  # 20: the second turn is longer
)
def test_the_second_turn_is_one_exact_forward_over_the_filled_cache(item, family, tail):
    model, tokenizer = model_of(family), tiny_tokenizer()
    second = second_question(tokenizer, item)
    assert second.ids.shape[1] > 20 + 16 + 1
    settings = {"fill": "identity", "split": 3, "tail": tail, "leading": 16, "rows": "random(0.1)"}
    told = converse(model, tokenizer, arm_of(**settings), item, second, NEW)
    cache = prefill(model, item.ids, **settings)
    first = greedy(model, item.ids, cache, told.first.ids.shape[1] - N)
    assert torch.equal(told.first.ids, first)
    whole = told.second.ids[:, : told.second.length]
    assert torch.equal(
        told.second.ids, greedy(model, whole, cache, told.second.ids.shape[1] - whole.shape[1])
    )
    exact = converse(model, tokenizer, arm_of("exact"), item, second, NEW)
    refilled = prefill(model, whole, **settings)  # as if the whole conversation were one prompt
    others = (exact.second.ids, greedy(model, whole, refilled, NEW))
    assert not all(torch.equal(told.second.ids, other) for other in others)


@torch.no_grad()
def test_rows_hidden_from_the_first_turn_stay_hidden_in_the_second(item):
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    second = second_question(tokenizer, item)
    told = converse(model, tokenizer, arm_of("none"), item, second, NEW)
    cache = prefill(model, item.ids, fill="none", split=3, tail=TAIL)
    first = greedy(model, item.ids, cache, told.first.ids.shape[1] - N)
    assert torch.equal(told.first.ids, first)
    whole = told.second.ids[:, : told.second.length]
    assert torch.equal(
        told.second.ids, greedy(model, whole, cache, told.second.ids.shape[1] - whole.shape[1])
    )


def test_an_end_of_text_is_not_part_of_the_conversation(item):
    model, tokenizer = copy.copy(model_of("llama")), tiny_tokenizer()
    second = second_question(tokenizer, item)
    spoken = converse(model, tokenizer, arm_of("exact"), item, second, NEW).first.ids
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = [258, int(spoken[0, N])]  # the answer's first token ends it
    told = converse(model, tokenizer, arm_of("exact"), item, second, NEW)
    assert torch.equal(told.first.ids, spoken[:, : N + 1])
    assert torch.equal(told.second.ids[:, : told.second.length], torch.cat([item.ids, second.ids], 1))


def test_covered_is_the_share_of_the_second_needle_that_was_chosen_for_the_first(item):
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    second = second_question(tokenizer, item)
    first, stop = second.needle
    for rows, covered in {
        (first - 9, stop - 12): 1 - 12 / (stop - first),
        (first, stop): 1,
        (20, 21): 0,
    }.items():
        arm = arm_of("identity", rows=GivenRows(*rows))
        assert converse(model, tokenizer, arm, item, second, 1).covered == pytest.approx(covered)
    assert converse(model, tokenizer, arm_of("identity"), item, second, 1).covered is None


def test_an_arm_that_shortens_the_prompt_is_asked_about_what_it_kept(item):
    model, tokenizer, asked = model_of("llama"), tiny_tokenizer(), []
    second = second_question(tokenizer, item)
    first, stop = second.needle

    class Keep:
        def keep(self, model, tokenizer, ids, question=None, tail=1):
            asked.append(question)
            return torch.cat([torch.arange(first, stop - 10), torch.arange(N - TAIL, N)])

    arm = dataclasses.replace(arm_of("exact", "kept"), compact=Keep())
    told = converse(model, tokenizer, arm, item, second, NEW)
    kept = torch.cat([item.ids[:, first : stop - 10], item.ids[:, N - TAIL :]], 1)
    plain = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(told.first.ids, model.generate(kept, attention_mask=torch.ones_like(kept), **plain))
    whole = told.second.ids[:, : told.second.length]
    assert torch.equal(told.second.ids, model.generate(whole, attention_mask=torch.ones_like(whole), **plain))
    assert told.covered == pytest.approx(1 - 10 / (stop - first)) and asked == [item.question]


# the run


def test_both_turns_are_kept_and_a_killed_run_goes_on(tmp_path):
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    items = [(f"multikey/{i}", item) for i, item in enumerate(items_of())]
    arms = [arm_of("exact"), arm_of("identity", "rows", rows=GivenRows(0, N))]
    run = Run.open(tmp_path, "two-turn", {}, {"arms": {}})
    ticks = []
    for _ in range(2):  # the second time there is nothing to do
        measure_two_turn(model, tokenizer, arms, items, run, new_tokens=2, tick=lambda: ticks.append(1))
    assert len(ticks) == 8 and len(run.lines) == 8
    lines = run.lines[:4]
    assert [(x["arm"], x["item"]) for x in lines] == [
        (arm, f"multikey/0/{turn}") for arm in ("exact", "rows") for turn in TURNS
    ]
    assert [x["turn"] for x in lines] == [1, 2, 1, 2] and [x["stratum"] for x in lines] == [*TURNS] * 2
    assert ["covered" in x for x in lines] == [False, False, False, True] and lines[3]["covered"] == 1
    item, second = items[0][1], second_question(tokenizer, items[0][1])
    assert [x["depth"] for x in lines[:2]] == [item.asked[0][0] / N, second.needle[0] / N]
    told = converse(model, tokenizer, arms[0], item, second, 2)
    assert [x["answer"] for x in lines[:2]] == [told.first.text, told.second.text]
    assert [x["length"] for x in lines[:2]] == [N, told.second.length]
    # killed between the turns
    torn = (tmp_path / "items.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "items.jsonl").write_text("".join(torn[:3]))
    again = Run.open(tmp_path, "two-turn", {}, {"arms": {}})
    measure_two_turn(model, tokenizer, arms, items, again, new_tokens=2)
    plain = [{k: v for k, v in line.items() if k != "seconds"} for line in run.lines]
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in again.lines] == plain


def test_a_turns_score_is_of_its_own_answer(tmp_path, item):
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    second = second_question(tokenizer, item)
    told = converse(model, tokenizer, arm_of("exact"), item, second, 4)
    said = told.first.text
    assert said and said not in told.second.text
    run = Run.open(tmp_path, "two-turn", {}, {"arms": {}})
    items = [("a", dataclasses.replace(item, answers=(said,)))]
    measure_two_turn(model, tokenizer, [arm_of("exact")], items, run, new_tokens=4)
    assert [x["metrics"]["score"] for x in run.lines] == [1.0, 0.0]


def test_conversations_beyond_the_context_are_refused(tmp_path, item):
    run = Run.open(tmp_path, "two-turn", {}, {"arms": {}})
    with pytest.raises(PromptError, match="context is 4096"):  # the first turn alone would fit
        measure_two_turn(
            model_of("llama"), tiny_tokenizer(), [arm_of("exact")], [("a", item)], run, new_tokens=4096 - N
        )
    with pytest.raises(SettingError, match="no item"):
        measure_two_turn(model_of("llama"), tiny_tokenizer(), [arm_of("exact")], [], run)
    assert run.lines == []
