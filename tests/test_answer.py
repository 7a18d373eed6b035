from __future__ import annotations

import pytest
import torch

import ridgefill
from ridgefill.answer import answer, prompt_ids
from tests.tiny import tiny_model, tiny_tokenizer

TEXT = "one two three " * 30


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_a_prompt_in_the_models_chat_form():
    tokenizer = tiny_tokenizer()
    ids = prompt_ids(tokenizer, "why?")
    assert ids.shape[0] == 1
    assert tokenizer.decode(ids[0]) == "<|user|>\nwhy?<|end|>\n<|assistant|>\n"
    assert tokenizer.decode(prompt_ids(tokenizer, "why?", chat=False)[0]) == "why?"


def test_a_tokenizer_without_a_template_takes_the_text_as_it_is():
    tokenizer = tiny_tokenizer(chat=False)
    assert tokenizer.decode(prompt_ids(tokenizer, "why?")[0]) == "why?"


def test_the_template_puts_the_special_tokens_and_no_second_ones_come(monkeypatch):
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", "<s>{{ messages[0]['content'] }}")
    bos = tokenizer.bos_token_id
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert prompt_ids(tokenizer, "hi")[0].tolist().count(bos) == 1
    assert prompt_ids(tokenizer, "hi", chat=False)[0].tolist().count(bos) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_what_generate_gives(model, capsys, stream):
    tokenizer = tiny_tokenizer()
    ids = prompt_ids(tokenizer, TEXT)
    found = answer(model, tokenizer, ids, max_new_tokens=12, stream=stream)
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert found.tokens == len(wanted)
    text = tokenizer.decode(wanted, skip_special_tokens=True)
    assert found.text == text.strip()
    assert 0 < found.first_token_seconds <= found.seconds
    said = capsys.readouterr().out
    assert said.rstrip("\n") == text.rstrip("\n") if stream else said == ""


def test_the_first_token_is_timed_before_the_last(model):
    tokenizer = tiny_tokenizer()
    found = answer(model, tokenizer, prompt_ids(tokenizer, "hi"), max_new_tokens=40)
    assert found.tokens > 20
    assert found.first_token_seconds < 0.7 * found.seconds


def test_without_a_pad_token_the_end_token_pads(model):
    tokenizer = tiny_tokenizer()
    ids = prompt_ids(tokenizer, TEXT)
    wanted = answer(model, tokenizer, ids, max_new_tokens=4)
    tokenizer.pad_token = None
    assert answer(model, tokenizer, ids, max_new_tokens=4).text == wanted.text


def test_within_filling_the_answer_is_filled(model):
    tokenizer = tiny_tokenizer()
    ids = prompt_ids(tokenizer, TEXT)
    with ridgefill.filling(model, fill="identity", split=2, tail=32, min_tokens=1) as filling:
        found = answer(model, tokenizer, ids, max_new_tokens=8)
        assert filling.stats.filled == ids.shape[1] - 32 - 16
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert found.text == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    assert torch.is_grad_enabled()
