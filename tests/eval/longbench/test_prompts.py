"""Prompts are cut in the middle, and the question's rows are found."""

from dataclasses import replace

import pytest

from ridgefill.errors import PromptError
from ridgefill.eval.longbench.prompts import Prompter, middle
from ridgefill.eval.longbench.sample import Sample
from tests.tiny import tiny_tokenizer

SAMPLE = Sample(
    "t/1", "t", "t", "ab" * 100 + "Question: why? Answer:", ("x",), 10, "choice", question="why?", version=2
)


def decoded(tokenizer, prepared):
    return tokenizer.decode(prepared.ids[0])


def test_the_first_and_the_last_half_remain():
    ids = list(range(10))
    assert middle(ids, 4, 1) == [[0, 1], [8, 9]]
    assert middle(ids, 5, 1) == [[0, 1], [8, 9]]
    assert middle(ids, 4, 2) == [[0, 1, 8, 9]]
    assert middle(ids, 5, 2) == [[0, 1, 7, 8, 9]]  # as ids[-5 // 2:] does


def test_a_short_prompt_is_not_cut_and_its_question_is_found():
    tokenizer = tiny_tokenizer()
    prepared = Prompter(tokenizer, 4096).prepare(SAMPLE)
    assert decoded(tokenizer, prepared) == f"<|user|>\n{SAMPLE.prompt}<|end|>\n<|assistant|>\n"
    first, stop = prepared.question
    assert tokenizer.decode(prepared.ids[0, first:stop]) == "why?"
    assert not prepared.truncated


def test_the_last_place_of_the_question_counts_and_wide_letters_do_not_shift_it():
    tokenizer = tiny_tokenizer(chat=False)
    sample = replace(SAMPLE, prompt="why? 北京北京 Question: 为什么why? Answer:", question="为什么why?")
    prepared = Prompter(tokenizer, 4096).prepare(sample)
    first, stop = prepared.question
    assert tokenizer.decode(prepared.ids[0, first:stop]) == "为什么why?"
    again = Prompter(tokenizer, 4096).prepare(replace(sample, question="why?"))
    assert again.question[1] == stop


@pytest.mark.parametrize("version", [1, 2])
def test_a_long_prompt_keeps_both_ends_and_fills_the_context_with_its_chat_form(version):
    tokenizer = tiny_tokenizer()
    prepared = Prompter(tokenizer, 120).prepare(replace(SAMPLE, version=version))
    text = decoded(tokenizer, prepared)
    assert prepared.truncated and 109 <= prepared.ids.shape[1] <= 110  # 120 less the answer's 10
    assert text.startswith("<|user|>\nabab") and text.endswith("why? Answer:<|end|>\n<|assistant|>\n")
    first, stop = prepared.question
    assert tokenizer.decode(prepared.ids[0, first:stop]) == "why?"


def test_a_named_length_cuts_before_the_chat_form_as_the_official_code_does():
    tokenizer = tiny_tokenizer()
    prepared = Prompter(tokenizer, 4096, max_length=60).prepare(SAMPLE)
    form = len(tokenizer("<|user|>\n<|end|>\n<|assistant|>\n")["input_ids"])
    assert prepared.truncated and prepared.ids.shape[1] == 60 + form
    assert (
        Prompter(tokenizer, None).prepare(SAMPLE).truncated is False
    )  # a context that nobody names is endless


def test_a_question_that_was_cut_has_no_rows():
    prepared = Prompter(tiny_tokenizer(), 4096, max_length=20).prepare(SAMPLE)
    assert prepared.truncated and prepared.question is None


def test_chat_form_is_the_tasks_choice_unless_it_is_set():
    tokenizer = tiny_tokenizer()
    plain = replace(SAMPLE, chat=False)

    def formed(sample, chat):
        return "<|user|>" in decoded(tokenizer, Prompter(tokenizer, 4096, chat=chat).prepare(sample))

    assert formed(SAMPLE, None) and not formed(plain, None)
    assert formed(plain, True) and not formed(SAMPLE, False)
    assert Prompter(tiny_tokenizer(chat=False), 4096, chat=True).prepare(SAMPLE).ids.shape[1] == 222


def test_templates_that_think_are_told_not_to():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking is false %}<no thoughts>{% endif %}"
    assert decoded(tokenizer, Prompter(tokenizer, 4096).prepare(SAMPLE)).endswith("<no thoughts>")


def test_what_does_not_fit_is_named():
    with pytest.raises(PromptError, match="t/1 in 141 tokens with 10 more"):
        Prompter(tiny_tokenizer(), 120, max_length=110).prepare(SAMPLE)
    with pytest.raises(PromptError, match="t/1"):
        Prompter(tiny_tokenizer(), 20).prepare(SAMPLE)  # no room beside chat form and answer
