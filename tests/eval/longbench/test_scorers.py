"""Answers whose scores are obvious; the official ones, where the packages are installed."""

from dataclasses import replace

import pytest

from ridgefill.errors import SettingError
from ridgefill.eval.longbench import scorers
from ridgefill.eval.longbench.sample import Sample
from ridgefill.eval.longbench.scorers import check_scorers, code_similarity, extract_choice, score


def sample(scorer, *answers, **fields):
    return Sample("t/1", "t", "t", "", answers, 8, scorer, **fields)


@pytest.fixture
def official():
    for package in ("rouge", "jieba", "fuzzywuzzy"):
        pytest.importorskip(package)
    pytest.importorskip("lm_eval")


CASES = [
    ("qa_f1", ("in the blue box", "elsewhere"), "In a blue box.", 1.0),
    ("qa_f1", ("blue box",), "blue", 2 / 3),
    ("qa_f1", ("blue box",), "green", 0.0),
    ("qa_f1_zh", ("北京",), "北京。", 1.0),
    ("qa_f1_zh", ("北京",), "上海", 0.0),
    ("rouge", ("the cat sat on the mat",), "the cat sat on the mat", 1.0),
    ("rouge", ("one two three four",), "one two", 2 / 3),
    ("rouge", ("one two",), "", 0.0),
    ("rouge_zh", ("我们 在 北京",), "我们 在 北京", 1.0),
    ("retrieval", ("Paragraph 3",), "Paragraph 3", 1.0),
    ("retrieval", ("Paragraph 3",), "Paragraph 3 or 4", 0.5),
    ("retrieval", ("Paragraph 3",), "Paragraph 13", 0.0),
    ("retrieval_zh", ("段落7",), "段落7", 1.0),
    ("count", ("12",), "12", 1.0),
    ("count", ("12",), "There are 12, or 13", 0.5),
    ("count", ("12",), "many", 0.0),
]


@pytest.mark.parametrize(("scorer", "truths", "answer", "wanted"), CASES)
def test_obvious_answers(official, scorer, truths, answer, wanted):
    assert score(sample(scorer, *truths), answer) == pytest.approx(wanted, abs=1e-6)


def test_classes_share_the_point_and_a_part_of_the_true_one_is_no_other_class(official):
    classes = ("Number", "Number of people", "Place")
    asked = sample("classification", "Number of people", classes=classes)
    assert score(asked, "Number of people") == 1.0
    assert score(asked, "Number of people or Place") == 0.5
    assert score(asked, "Place") == 0.0


def test_only_the_first_line_counts_where_the_official_code_says_so(official):
    asked = sample("qa_f1", "blue", first_line=True)
    assert score(asked, "\n\nblue\nPassage: green green green") == 1.0
    assert score(replace(asked, first_line=False), "\n\nblue\nPassage: green green green") < 0.5


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("return x", 1.0),
        ("\n```python\n# a comment\n// another\nreturn x\nreturn y", 1.0),
        ("return y", 0.88),  # 7 of 8 letters, twice over 16, in whole hundredths
        ("# only a comment", 0.0),
        ("  \nreturn x", 0.2),  # an empty line is a line: one of its two blanks is found in eight letters
    ],
)
def test_code_is_compared_by_its_first_line_that_is_no_comment(answer, wanted):
    assert code_similarity(answer, "return x") == wanted
    assert score(sample("code_sim", "return x", "something else"), answer) >= wanted


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("The correct answer is (B)", "B"),
        ("**The correct answer is B**", "B"),
        ("The correct answer is **(C)** because", "C"),
        ("The correct answer is A. No: The correct answer is (D).", "D"),  # with brackets comes first
        ("The correct answer is (E)", None),
        ("the correct answer is (B)", None),
        ("B", None),
        ("", None),
    ],
)
def test_the_letter_is_read_as_the_official_code_reads_it(answer, choice):
    assert extract_choice(answer) == choice
    assert score(sample("choice", "B"), answer) == float(choice == "B")


def test_missing_packages_are_named_before_a_run(monkeypatch):
    monkeypatch.setattr(scorers, "_METRICS", "no_such_package.metrics")
    check_scorers([sample("choice", "B"), sample("code_sim", "x")])
    with pytest.raises(SettingError, match=r"lm-eval\[longbench\]"):
        check_scorers([sample("choice", "B"), sample("qa_f1", "x")])
