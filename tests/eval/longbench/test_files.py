"""Rows of the official form become samples; any other is refused by name."""

import json
import zipfile

import pytest
from huggingface_hub import constants

from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.longbench import TASKS, read_longbench, read_longbench_v2
from ridgefill.eval.longbench.tasks import CODE, FEW_SHOT
from tests.eval.longbench.rows import v1_row, v2_row, write_lines


def test_a_question_of_v1(tmp_path):
    (sample,) = read_longbench(write_lines(tmp_path / "mine.jsonl", [v1_row(length=4000)]))
    assert (sample.item, sample.task, sample.stratum, sample.version) == ("qasper/a1", "qasper", "qasper", 1)
    assert sample.answers == ("in the blue box", "the box") and sample.scorer == "qa_f1"
    assert sample.max_new_tokens == 128 and sample.question == "Where is the key?" and sample.chat
    assert "Article: The key is in the blue box.\n\n Answer the question" in sample.prompt
    assert sample.prompt.endswith("Question: Where is the key?\n\nAnswer:")
    assert sample.facts == {"length_group": "4-8k"}


def test_every_task_is_read_and_only_few_shot_and_code_go_without_chat_form(tmp_path):
    answers = {"retrieval": ["Paragraph 3"], "retrieval_zh": ["段落3"]}
    rows = [
        v1_row(dataset=name, answers=answers.get(task.scorer, ["x"]), all_classes=["x", "y"])
        for name, task in TASKS.items()
    ]
    samples = read_longbench(write_lines(tmp_path / "all.jsonl", rows))
    assert len(samples) == 21
    assert {s.task for s in samples if not s.chat} == set(FEW_SHOT + CODE)
    assert {s.task for s in samples if s.first_line} == set(FEW_SHOT)
    assert [s.task for s in samples if s.newline_stops] == ["samsum"]
    assert {s.task for s in samples if s.classes} == {"trec", "lsht"}
    unasked = {"gov_report", "multi_news", "vcsum", "passage_count", *CODE}
    assert {s.task for s in samples if s.question is None} == unasked
    assert all("The key is in the blue box." in s.prompt and "{" not in s.prompt for s in samples)


def test_braces_in_the_text_stay(tmp_path):
    row = v1_row(dataset="lcc", input="", context="f{input}{x}\n", answers=["x"])
    (sample,) = read_longbench(write_lines(tmp_path / "lcc.jsonl", [row]))
    assert sample.prompt == "Please complete the code given below. \nf{input}{x}\nNext line of code:\n"


def test_folders_archives_tasks_and_limits(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "qasper.jsonl", [v1_row(_id=str(i)) for i in range(4)])
    write_lines(folder / "qasper_e.jsonl", [v1_row(_id="9")])
    write_lines(folder / "lcc.jsonl", [v1_row(dataset="lcc")])
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"data/{file.name}")
    for source in (folder, tmp_path / "data.zip"):

        def items(source=source, **given):
            return [sample.item for sample in read_longbench(source, **given)]

        assert items(limit=2) == ["lcc/a1", "qasper/0", "qasper/1"]
        assert items(tasks=["qasper"], limit=1) == ["qasper/0"]
        assert items(tasks=["qasper_e"]) == ["qasper_e/9"]
    assert [s.item for s in read_longbench(folder / "qasper_e.jsonl")] == ["qasper_e/9"]


@pytest.mark.parametrize("cot", [False, True])
def test_a_question_of_v2_with_and_without_reasoning(tmp_path, cot):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([v2_row(), v2_row(_id="b2")]))
    sample, other = read_longbench_v2(path, cot=cot)
    ask = (
        "What is the correct answer to this question: Where is the key?\nChoices:\n"
        "(A) In the box.\n(B) At home.\n(C) Nowhere.\n(D) Lost."
    )
    assert (sample.item, other.item, sample.stratum, sample.answers) == ("v2/b1", "v2/b2", "short", ("A",))
    assert sample.question == ask and ask in sample.prompt
    assert "<text>\nThe key is in the blue box.\n</text>" in sample.prompt
    assert sample.facts["difficulty"] == "easy" and sample.facts["domain"] == "Single-Document QA"
    if cot:
        assert sample.prompt.endswith("Let’s think step by step:") and sample.max_new_tokens == 1024
        assert "step by step: $COT$\n\nBased on the above" in sample.followup and ask in sample.followup
        assert "blue" not in sample.followup
    else:
        assert sample.prompt.endswith('"The correct answer is (insert answer here)".')
        assert sample.max_new_tokens == 128 and sample.followup is None


def without(row, field):
    return {name: value for name, value in row.items() if name != field}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (without(v1_row(), "answers"), "line 2: it has no field 'answers'"),
        (without(v1_row(), "_id"), "line 2: it has no field '_id'"),
        (v1_row(answers=[]), "'answers' is empty"),
        (v1_row(answers=None), "'answers' is null"),
        (v1_row(context=3), "'context' is a int"),
        (v1_row(length="long"), "'length' is a str"),
        (v1_row(dataset="nq"), "has no task 'nq'"),
        (v1_row(dataset="trec"), "'all_classes' is null"),
        (v1_row(dataset="passage_retrieval_en", answers=["3"]), "names no paragraph"),
        ([1], "it is not an object"),
    ],
)
def test_a_row_of_v1_that_is_not_official_is_named(tmp_path, row, why):
    with pytest.raises(CorpusError, match=r"mine\.jsonl") as refused:
        read_longbench(write_lines(tmp_path / "mine.jsonl", [v1_row(), row]))
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (without(v2_row(), "choice_C"), "it has no field 'choice_C'"),
        (v2_row(answer="AB"), "its answer is 'AB'"),
        (v2_row(answer="E"), "its answer is 'E'"),
        (v1_row(), "it has no field"),
    ],
)
def test_a_row_of_v2_that_is_not_official_is_named(tmp_path, row, why):
    with pytest.raises(CorpusError) as refused:
        read_longbench_v2(write_lines(tmp_path / "mine.jsonl", [row]))
    assert "mine.jsonl line 1" in str(refused.value) and why in str(refused.value)


def test_files_that_hold_nothing_are_named(tmp_path):
    empty, torn, listless = (tmp_path / name for name in ("empty.jsonl", "torn.jsonl", "one.json"))
    empty.write_text("\n")
    torn.write_text('{"input": ')
    listless.write_text("{}")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, why in (
        (empty, "no sample"),
        (torn, "line 1: it is not JSON"),
        (listless, "not a list"),
        (binary, "it cannot be read"),
        (tmp_path / "gone.jsonl", "no such file"),
    ):
        for read in (read_longbench, read_longbench_v2):
            with pytest.raises(CorpusError) as refused:
                read(path)
            assert why in str(refused.value) and path.name in str(refused.value)
    path = write_lines(tmp_path / "mine.jsonl", [v1_row()])
    with pytest.raises(CorpusError, match="no sample of lcc"):
        read_longbench(path, tasks=["qasper", "lcc"])
    with pytest.raises(SettingError, match="'nq'"):
        read_longbench(path, tasks=["nq"])
    with pytest.raises(SettingError, match="0 samples"):
        read_longbench(path, limit=0)


def test_the_hubs_copy_is_read_from_the_cache_and_its_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CorpusError, match=r"THUDM/LongBench: .*the hub did not give data\.zip"):
        read_longbench()
    with pytest.raises(CorpusError, match=r"THUDM/LongBench-v2: .*the hub did not give data\.json"):
        read_longbench_v2()
    cached = tmp_path / "datasets--THUDM--LongBench-v2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("a" * 40) / "data.json").write_text(json.dumps([v2_row()]))
    assert [sample.item for sample in read_longbench_v2()] == ["v2/b1"]
