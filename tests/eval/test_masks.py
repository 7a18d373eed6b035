"""Masks on text whose answers are obvious, and against the definition word for word."""

from __future__ import annotations

import time

import pytest
import torch

from ridgefill.eval.masks import key, novel

from ..tiny import tiny_tokenizer


def mask(ids, run=8):
    """The novel tokens as 1, the copied ones as 0."""
    return "".join("01"[flag] for flag in novel(torch.tensor(ids, dtype=torch.long), run).tolist())


def by_definition(ids, run):
    """Word for word: token t is not novel if any run around it equals one that starts earlier."""
    starts = range(len(ids) - run + 1)
    repeated = [i for i in starts if any(ids[j : j + run] == ids[i : i + run] for j in range(i))]
    return "".join("0" if any(i <= t < i + run for i in repeated) else "1" for t in range(len(ids)))


def test_without_repetition_every_token_is_novel():
    assert mask(list(range(40))) == "1" * 40


@pytest.mark.parametrize(("length", "copied"), [(7, 0), (8, 8), (9, 9), (20, 20)])
def test_only_the_second_of_two_runs_of_eight_or_more_is_copied(length, copied):
    passage = list(range(100, 100 + length))
    ids = [1, 2, 3, *passage, 4, 5, *passage, 6]
    assert mask(ids) == "1" * (3 + length + 2) + "01"[copied == 0] * length + "1"


def test_every_occurrence_after_the_first_is_copied():
    passage = list(range(100, 110))
    ids = [*passage, 1, *passage, 2, *passage, 3]
    assert mask(ids) == "1" * 11 + "0" * 10 + "1" + "0" * 10 + "1"


def test_runs_that_overlap_their_own_repetition_count():
    """Of "a a a ...", the run that starts at the second token repeats the first; nine tokens make one."""
    assert mask([5] * 8) == "1" * 8
    assert mask([5] * 9) == "1" + "0" * 8
    assert mask([5] * 20) == "1" + "0" * 19
    assert mask([1, 2] * 5) == "11" + "0" * 8


def test_a_changed_token_breaks_the_run_around_it():
    first = list(range(100, 120))
    second = [*first[:9], 7, *first[10:]]
    assert mask([*first, *second]) == "1" * 20 + "0" * 9 + "1" + "0" * 10
    second = [*first[:7], 7, *first[8:]]  # seven tokens before it are too few
    assert mask([*first, *second]) == "1" * 20 + "1" * 8 + "0" * 12


def test_other_lengths_and_short_prompts():
    assert mask([1, 2, 9, 1, 2, 3], run=2) == "111001"
    assert mask([1, 2, 1], run=1) == "110"
    assert mask([1, 1, 1]) == "111" and mask([]) == ""


@pytest.mark.parametrize("seed", range(4))
def test_the_definition_word_for_word(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (150,), generator=g).tolist()
    for run in (3, 5, 8):
        assert mask(ids, run) == by_definition(ids, run)


def test_tokens_larger_than_a_byte_are_told_apart():
    assert mask([*range(8), *range(256, 264), *range(65536, 65544), *(-i for i in range(1, 9))]) == "1" * 32


def test_a_sentence_said_twice():
    tokenizer = tiny_tokenizer()  # a token a byte
    sentence, between = "The grass is green.", " And: "
    ids = torch.tensor(tokenizer(sentence + between + sentence, add_special_tokens=False)["input_ids"])
    found = novel(ids)
    assert found.dtype == torch.bool and found.shape == ids.shape
    assert tokenizer.decode(ids[~found]) == sentence
    assert tokenizer.decode(ids[found]) == sentence + between


def test_a_long_prompt_takes_no_time():
    ids = torch.randint(0, 50000, (131072,), generator=torch.Generator().manual_seed(0))
    ids[100000:] = ids[: 131072 - 100000]
    began = time.perf_counter()
    found = novel(ids)
    assert time.perf_counter() - began < 5
    assert found[:100000].all() and not found[100000:].any()


def test_key_tokens_rise_by_more_than_two_nats():
    full = torch.tensor([1.0, 1.0, 1.0, 5.0, 0.0])
    cut = torch.tensor([3.0, 3.5, 1.0, 1.0, 2.25])
    assert key(full, cut).tolist() == [False, True, False, False, True]
    assert key(full, cut, rise=2.25).tolist() == [False, True, False, False, False]
