"""Samples in files: ours and the official scripts'."""

import json

import pytest

from ridgefill.errors import CorpusError, MapsMismatchError
from ridgefill.eval.ruler.jsonl import Sample, read_jsonl, write_set

LINE = {"index": 917, "input": "What?", "outputs": ["a", "b"], "length": 2000, "answer_prefix": " It is"}


def official(folder, task="vt", *lines):
    (folder / task).mkdir(parents=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines or (LINE,))
    (folder / task / "validation.jsonl").write_text(text)
    return folder


def test_samples_are_read_as_they_were_written(tmp_path):
    samples = [
        Sample("qa_1", 0, 4096, 4000, "Döcument\n", " Answer:", ("x",), ((0, 3),)),
        Sample("qa_1", 1, 4096, 4050, "b", " Answer:", ("y", "z")),
    ]
    write_set(tmp_path / "qa_1", [s.to_json(extra=1) for s in samples], {"wanted": 4096, "tokenizer": "t1"})
    assert read_jsonl(tmp_path) == samples
    assert [s.item for s in samples] == ["qa_1/4096/0", "qa_1/4096/1"]
    first = json.loads((tmp_path / "qa_1" / "validation.jsonl").read_text().splitlines()[0])
    assert {"index", "input", "outputs", "length", "answer_prefix"} <= first.keys()


def test_official_sets_are_read_and_numbered_by_their_lines(tmp_path):
    official(tmp_path, "vt", LINE, {**LINE, "length": 2049, "length_w_model_temp": 2049})
    official(tmp_path, "niah_single_1")
    samples = read_jsonl(tmp_path)
    assert [s.item for s in samples] == ["niah_single_1/2048/0", "vt/3072/0", "vt/3072/1"]
    assert samples[1].outputs == ("a", "b") and samples[1].gold is None
    assert [s.item for s in read_jsonl(tmp_path, ["vt"], wanted=4096)] == ["vt/4096/0", "vt/4096/1"]


def test_a_folder_named_by_its_length_tells_it(tmp_path):
    assert read_jsonl(official(tmp_path / "2000" / "data"))[0].wanted == 2000
    assert read_jsonl(official(tmp_path / "2500"))[0].wanted == 2500


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *(({k: v for k, v in LINE.items() if k != name}, f"no field '{name}'") for name in LINE),
        ({**LINE, "length": "long"}, "'length' is 'long', not a int"),
        ({**LINE, "outputs": []}, "'outputs' is not a list of answers"),
        ({**LINE, "outputs": [3]}, "'outputs' is not a list of answers"),
        ("{", "not JSON"),
        ("3", "not an object"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, why):
    official(tmp_path, "vt", LINE, line)
    with pytest.raises(CorpusError, match=why) as refusal:
        read_jsonl(tmp_path)
    assert "vt/validation.jsonl line 2" in str(refusal.value)


def test_missing_sets_are_named(tmp_path):
    with pytest.raises(CorpusError, match="no <task>"):
        read_jsonl(tmp_path)
    with pytest.raises(CorpusError, match="No such file"):
        read_jsonl(official(tmp_path), ["qa_1"])
    (tmp_path / "vt" / "validation.jsonl").write_text("")
    with pytest.raises(CorpusError, match="empty"):
        read_jsonl(tmp_path)


def test_a_set_of_another_tokenizer_is_refused(tmp_path):
    write_set(tmp_path / "vt", [LINE], {"wanted": 2048, "tokenizer": "theirs"})
    assert read_jsonl(tmp_path, tokenizer="theirs")[0].wanted == 2048
    with pytest.raises(MapsMismatchError, match="another tokenizer"):
        read_jsonl(tmp_path, tokenizer="mine")
