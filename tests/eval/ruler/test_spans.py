"""Where question and evidence stand, in texts made by hand."""

import pytest

from ridgefill.eval.ruler.jsonl import Sample
from ridgefill.eval.ruler.spans import evidence_spans, question_span


def sample(task, text, outputs, gold=None):
    return Sample(task, 0, 100, 90, text, " so", tuple(outputs), gold)


def texts(found, spans):
    return [found.input[a:b] for a, b in spans]


def needle(key, value):
    return f"One of the special magic numbers for {key} is: {value}."


def ask(keys):
    return f"What are all the special magic numbers for {keys} mentioned in the provided text?"


def test_needles_asked_for_are_found_and_no_others():
    hay = (
        f"Intro\nHay. {needle('a-b', 11)} {needle('c-d', 33)} Hay. {needle('a-b', 22)} {needle('e-f', 11)}\n"
    )
    found = sample("niah_multivalue", hay + ask("a-b"), ["22", "11"])
    assert texts(found, evidence_spans(found)) == [needle("a-b", 11), needle("a-b", 22)]
    assert texts(found, [question_span(found)]) == [ask("a-b")]
    both = sample("niah_multiquery", hay + ask("c-d, and e-f"), ["33", "11"])
    assert texts(both, evidence_spans(both)) == [needle("c-d", 33), needle("e-f", 11)]
    four = sample("niah_multiquery", hay + ask("a-b, c-d, x-y, and e-f"), ["33", "11"])
    assert len(evidence_spans(four)) == 2


def test_texts_of_another_form_are_unknown():
    assert evidence_spans(sample("niah_single_1", "Hay\nWhat is it?", ["11"])) is None
    assert evidence_spans(sample("niah_single_1", "Hay\n" + ask("a-b"), ["11"])) is None
    assert evidence_spans(sample("vt", "VAR AAAAA = 12345\nQ", ["AAAAA", "BBBBB"])) is None
    assert question_span(sample("vt", "one line", ["A"])) is None


def test_every_assignment_of_the_chain_counts():
    text = "VAR XYZ = 11111\nNo.\nVAR AAAAA = 12345\nNo.\n"
    text += "VAR CCCCC = VAR BBBBB \nVAR BBBBB = VAR AAAAA \nQuestion: 1?"
    found = sample("vt", text, ["AAAAA", "BBBBB", "CCCCC"])
    assert texts(found, evidence_spans(found)) == [
        "VAR AAAAA = 12345",
        "VAR CCCCC = VAR BBBBB",
        "VAR BBBBB = VAR AAAAA",
    ]
    assert texts(found, [question_span(found)]) == ["Question: 1?"]


def test_documents_are_those_the_set_names_or_those_that_hold_an_answer():
    text = (
        "Do.\n\nDocument 1:\nfoo\n\nDocument 2:\nThe Mayor\n\nDocument 3:\nx mayor\n\nDo.\n\nQuestion: who?"
    )
    found = sample("qa_1", text, ["mayor", "the boss"])
    held = texts(found, evidence_spans(found))
    assert [part.split("\n")[0] for part in held] == ["Document 2:", "Document 3:"]
    assert held[0] == "Document 2:\nThe Mayor\n\n"
    assert evidence_spans(sample("qa_1", text, ["mayor"], ((5, 9),))) == ((5, 9),)
    assert evidence_spans(sample("qa_2", text, ["yes"])) is None


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_lists_have_no_place_of_their_own(task):
    assert evidence_spans(sample(task, "1. a 2. a\nQuestion: which?", ["a"])) is None
