from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import LexicalRows
from ridgefill.rows.content import content_rows, question_rows
from tests.rows.prompts import chosen_text, rows_prompt, sentencepiece_tokenizer, text_prompt
from tests.tiny import tiny_tokenizer

NOISE = "The grass is green. The sky is blue. "
FACT = "The magic number for Harbor is 12. "
ASK = "What is the magic number for harbor?"


def net(prefix, tail, **settings):
    prompt = text_prompt(prefix, tail)
    return chosen_text(
        prompt, LexicalRows(**{"cap": 1.0, "window": len(ASK), **settings}).select(prompt)
    ).strip()


def test_the_sentence_that_shares_a_run_of_four_words():
    assert net(NOISE * 3 + FACT + NOISE * 3, ASK) == FACT.strip()
    assert net(NOISE * 3 + FACT + NOISE * 3, ASK, run=5) == FACT.strip()
    assert net(NOISE * 3 + FACT + NOISE * 3, ASK, run=6) == ""


def test_case_and_punctuation_do_not_count():
    assert net(NOISE + "So: MAGIC, number - for \u201charbor\u201d. " + NOISE, ASK).startswith("So:")


def test_the_run_must_hold_a_rare_word():
    assert net(FACT * 2 + NOISE, ASK) == (FACT * 2).strip()
    assert net(FACT * 3 + NOISE, ASK) == ""
    assert net(FACT * 3 + NOISE, ASK, rare=3) == (FACT * 3).strip()


def test_the_run_lies_inside_one_sentence():
    assert net(NOISE + "A magic number. For harbor it is 12. " + NOISE, ASK) == ""


def test_only_the_last_tokens_ask():
    assert net(NOISE + FACT + NOISE, ASK + " Say it in words of your own.", window=20) == ""
    assert net(NOISE + FACT + NOISE, ASK + " Say it in words of your own.", window=80) == FACT.strip()


def test_template_words_are_no_content():
    template = "<|end|>\n<|assistant|>\n"
    assert net(NOISE + FACT + NOISE, ASK + template, window=len(ASK)) == FACT.strip()
    prompt = text_prompt("<|user|>\nHi", " end user" + template)
    content = content_rows(prompt)
    assert "".join(p for p, c in zip(prompt.pieces, content, strict=True) if c) == "Hi end user"
    assert question_rows(prompt, 4, False) == set(
        range(len("<|user|>\nHi end "), len("<|user|>\nHi end user"))
    )


def test_without_a_template_all_text_is_content():
    tokenizer = tiny_tokenizer(chat=False)
    prompt = text_prompt("<|user|>\nHi</s>", "x", tokenizer)
    assert [i for i, c in enumerate(content_rows(prompt)) if not c] == [11]  # </s> is a control token


def test_added_text_is_content_and_control_tokens_are_not():
    prompt = text_prompt("<turn>a\n\nb", "x", sentencepiece_tokenizer())
    apart = {p.strip(" "): c for p, c in zip(prompt.pieces, content_rows(prompt), strict=True)}
    assert apart["\n\n"] and apart["a"] and not apart["<turn>"]


def test_a_template_that_refuses_is_none():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert all(content_rows(text_prompt("Hi", "x", tokenizer)))


def test_first_rows_of_a_sentence_and_a_cap_in_all():
    assert net(NOISE + FACT + NOISE, ASK, sentence_rows=9) == FACT[:9].strip()
    prefix = NOISE + FACT + NOISE
    assert net(prefix, ASK, cap=5) == FACT[:5].strip()
    prompt = text_prompt(prefix * 2, ASK)
    assert int(LexicalRows(cap=0.1, window=len(ASK)).select(prompt).sum()) == round(0.1 * prompt.prefix)


def test_sentences_that_share_more_come_first():
    weak = "A magic number for harbor. "
    strong = "What is the magic number for harbor. "
    assert net(NOISE + weak + NOISE + strong, ASK, cap=len(strong) - 1) == strong.strip()


def test_the_question_can_be_hidden():
    prefix = NOISE + FACT + NOISE
    start = len(prefix)
    prompt = text_prompt(prefix, "Tell me now. " + ASK, question=(start + 13, start + 13 + len(ASK)))
    assert chosen_text(prompt, LexicalRows(cap=1.0).select(prompt)).strip() == FACT.strip()
    assert not LexicalRows(cap=1.0, hidden=True, window=12).select(prompt).any()


def test_rows_that_ask_are_not_found_by_themselves():
    prefix = NOISE + ASK
    prompt = text_prompt(prefix, "\n", question=(len(NOISE), len(prefix)))
    assert not LexicalRows(cap=1.0).select(prompt).any()


def test_leading_rows_take_no_place():
    prompt = text_prompt(FACT + NOISE, ASK, leading=4)
    chosen = LexicalRows(cap=5, window=len(ASK)).select(prompt)
    assert chosen.nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


def test_a_tokenizer_is_needed():
    with pytest.raises(SettingError, match="tokenizer"):
        LexicalRows().select(rows_prompt(5))


@pytest.mark.parametrize(
    "settings",
    [{"window": 0}, {"run": 0}, {"rare": 0}, {"sentence_rows": -1}, {"cap": 2.0}, {"hidden": "no"}],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match="lexical rows"):
        LexicalRows(**settings)


def test_an_empty_prefix():
    assert torch.equal(LexicalRows().select(text_prompt("", ASK)), torch.zeros(0, dtype=torch.bool))
