"""The official scorers, on cases made by hand."""

import pytest

from ridgefill.eval.ruler.scorers import postprocess, process_results, score


@pytest.mark.parametrize(
    ("task", "answer", "references", "expected"),
    [
        ("qa_1", "It was Marie Curie.", ["marie curie", "Curie, Marie", "Mme Curie"], 1.0),  # not 1/3
        ("qa_2", "nobody", ["marie curie"], 0.0),
        ("niah_multivalue", "1111111 and 3333333", ["1111111", "2222222", "3333333", "4444444"], 0.5),
        ("niah_single_1", " 1234567.", ["1234567"], 1.0),
        ("niah_single_1", "123 4567", ["1234567"], 0.0),
        ("vt", "ABCDE FGHIJ", ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], 0.4),
        ("cwe", "1. Brisk 2. otter", ["brisk", "OTTER"], 1.0),
        ("fwe", "", ["abcdef"], 0.0),
        ("cwe", "ab\tcd", ["ab\tcd"], 0.0),  # a control character is scored as a newline
        ("cwe", "ab\x07cd", ["ab\ncd"], 1.0),
    ],
)
def test_scores(task, answer, references, expected):
    assert score(task, answer, references) == expected
    assert process_results({"task": task, "outputs": references}, [answer]) == {"score": expected}


def test_answers_are_stripped_and_control_characters_become_newlines():
    assert postprocess("  \x00a\x1fb\r\n ") == "a\nb"
