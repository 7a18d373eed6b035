from __future__ import annotations

import random
import time

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt
from ridgefill.rows.segments import check_spans, prompt_spans, split_rows
from tests.rows.prompts import text_prompt
from tests.tiny import tiny_tokenizer

CODE = "def f(x):\n    # One part. Another.\n    y = x[0] + g(x)\n    return {y: 1}\n"


def texts(pieces, *args, **kwargs):
    spans = split_rows(pieces, *args, **kwargs)
    assert [row for span in spans for row in span] == list(range(len(pieces)))
    return ["".join(pieces[span.start : span.stop]) for span in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is so. Is it? Yes!", ["It is so. ", "Is it? ", "Yes!"]),
        ("Dr. Smith of the U.S. paid 3.14. He left", ["Dr. Smith of the U.S. paid 3.14. ", "He left"]),
        ('"Stop!" he said... and left. "No." Why', ['"Stop!" he said... and left. ', '"No." ', "Why"]),
        ("1. First\n2. Second\n- third", ["1. First\n", "2. Second\n", "- third"]),
        ("One\n\nTwo\n \n  Three", ["One\n\n", "Two\n \n  ", "Three"]),
        ("这是一。\u300c好！\u300d他说。", ["这是一。", "\u300c好！\u300d", "他说。"]),
        ("यह है। दूसरा।", ["यह है। ", "दूसरा।"]),
        ("key: value\nother: more", ["key: value\n", "other: more"]),
    ],
)
def test_sentences(text, expected):
    assert texts(list(text), "sentences") == expected


def test_a_line_that_ends_with_the_page_does_not_end_its_sentence():
    text = "This sentence goes on until the page has an end\nand is then done. Another one."
    assert texts(list(text), "sentences")[0].endswith("then done. ")
    statement = "this_is_a_call_of_something(with_an_argument, 1)\nanother = 2"
    assert len(texts(list(statement), "sentences")) == 2


def test_a_row_belongs_where_its_first_visible_character_does():
    assert texts(["Aa", ".", " Bb", ".\n", "\n", "C"], "sentences") == ["Aa.", " Bb.\n\n", "C"]


def test_the_rest_of_a_character_stays_with_it():
    assert texts(["好", "", "。", "", "好", ""], "sentences") == ["好。", "好"]
    assert [len(s) for s in split_rows(["好", "", "。", "", "好", ""], "sentences")] == [4, 2]


def test_code_is_cut_in_lines_and_prose_beside_it_in_sentences():
    found = texts(list(CODE + "\nThis is prose. It has two sentences."), "auto")
    assert [t.strip() for t in found] == [
        "def f(x):",
        "# One part. Another.",
        "y = x[0] + g(x)",
        "return {y: 1}",
        "This is prose.",
        "It has two sentences.",
    ]
    assert "# One part." in [t.strip() for t in texts(list(CODE), "sentences")]
    assert texts(list("One. Two.\nThree."), "lines") == ["One. Two.\n", "Three."]


def test_long_spans_are_cut_after_a_clause_or_before_a_word():
    pieces = [" a"] * 7 + [","] + [" b"] * 4
    assert [len(s) for s in split_rows(pieces, "sentences", longest=10)] == [6, 6]  # the comma is too late
    assert [len(s) for s in split_rows([" a"] * 4 + [","] + [" b"] * 7, "sentences", longest=10)] == [5, 7]
    assert [len(s) for s in split_rows(["x"] * 7 + [" z"] + ["y"] * 8, "sentences", longest=10)] == [7, 9]
    assert [len(s) for s in split_rows(["x", "y", ""] * 5, "sentences", longest=8)] == [7, 8]
    assert [len(s) for s in split_rows([""] * 9, "sentences", longest=1)] == [1] * 9


def test_no_span_is_longer_and_every_row_is_in_one():
    rng = random.Random(0)
    alphabet = ["a", " b", ". ", ".", "\n", "\n\n", "", "(", ";", "。", " ", "{x}", "A"]
    for _ in range(300):
        pieces = [rng.choice(alphabet) for _ in range(rng.randrange(0, 80))]
        kind, longest = rng.choice(["auto", "lines", "sentences"]), rng.randrange(1, 20)
        control = [i for i in range(len(pieces)) if rng.random() < 0.05]
        spans = split_rows(pieces, kind, longest, control)
        assert [row for span in spans for row in span] == list(range(len(pieces)))
        assert all(0 < len(span) <= longest for span in spans)


def test_a_control_token_starts_a_span():
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("ab"), tokenizer.eos_token_id, tokenizer.bos_token_id, *tokenizer.encode("cd")]
    prompt = Prompt(torch.tensor(ids), len(ids), tokenizer=tokenizer)
    assert prompt_spans(prompt) == [range(0, 2), range(2, 6)]


def test_the_spelling_of_control_tokens_is_no_source_code():
    pieces = ["<|im_start|>", "user", "\n", "One.", " Two.", "<|im_end|>", "\n", "<|im_start|>", "user", "\n"]
    spans = [range(0, 3), range(3, 4), range(4, 5), range(5, 7), range(7, 10)]
    assert split_rows(pieces, control=(0, 5, 7)) == spans
    assert split_rows(pieces) != spans


def test_windows_need_no_text():
    assert prompt_spans(Prompt(torch.zeros(12), 10), 4) == [range(0, 4), range(4, 8), range(8, 10)]
    with pytest.raises(SettingError, match="tokenizer"):
        prompt_spans(Prompt(torch.zeros(12), 10), "sentences")


def test_only_the_prefix_is_cut():
    prompt = text_prompt("One. Tw", "o. Three.")
    assert prompt_spans(prompt) == [range(0, 5), range(5, 7)]


@pytest.mark.parametrize("kind", ["words", 0, -3, True, 2.5, None])
def test_unknown_spans_are_refused(kind):
    with pytest.raises(SettingError, match="auto, sentences, lines"):
        check_spans("whole spans", kind)


@pytest.mark.parametrize("text", ["." * 60_000, "\n" * 60_000, "a." * 30_000, " \n" * 30_000, "(" * 60_000])
def test_hostile_text_takes_no_time(text):
    start = time.perf_counter()
    split_rows(list(text))
    assert time.perf_counter() - start < 3
