"""Sets: lengths, files, and that one is made once."""

import json

import pytest

from ridgefill.errors import CorpusError, PromptError
from ridgefill.eval.ruler import suite
from ridgefill.eval.ruler.jsonl import read_jsonl
from ridgefill.eval.ruler.suite import form_tokens, make_suite
from ridgefill.eval.ruler.tasks import TASKS
from ridgefill.models.identity import tokenizer_sha256
from tests.eval.ruler.test_qa import hotpot, squad
from tests.tiny import tiny_tokenizer

# the tiny tokenizer has one token a byte; what one more word, line, document or list item adds at most
STEP = {"niah": 130, "vt": 91, "cwe": 40, "fwe": 60, "qa": 60}


@pytest.fixture
def named(tmp_path):
    essay = tmp_path / "essay.txt"
    essay.write_text("The winter road stands under stone. A slow river\nruns there. " * 30)
    return {"essays": essay, "squad": squad(tmp_path), "hotpotqa": hotpot(tmp_path)}


@pytest.mark.parametrize("chat", [True, False])
def test_every_task_is_as_long_as_asked_for_and_no_longer(tmp_path, named, chat):
    tokenizer = tiny_tokenizer(chat)
    found = make_suite(tokenizer, tmp_path / "sets", lengths=[3000], count=2, **named)
    assert [s.item for s in found.samples] == [f"{name}/3000/{i}" for name in TASKS for i in (0, 1)]
    form = form_tokens(tokenizer)
    assert form == (len("<|user|>\n<|end|>\n<|assistant|>\n") if chat else 0)
    for sample in found.samples:
        task = TASKS[sample.task]
        own = len((sample.input + sample.answer_prefix).encode()) + task.budget
        assert sample.length == own <= 3000 - form < own + STEP[task.family]
    assert found.settings["tasks"] == list(TASKS) and found.settings["seed"] == 42
    assert set(found.settings) >= {"words", "essays", "squad", "hotpotqa", "lengths", "count"}


def test_a_set_is_made_once_and_grows_at_its_end(tmp_path, monkeypatch):
    ticks = []
    ask = dict(lengths=[1500], names=["niah_single_1", "fwe"])

    def make(**more):
        return make_suite(tiny_tokenizer(), tmp_path, **{**ask, **more}, tick=lambda: ticks.append(1)).samples

    three = make(count=3)
    files = list(tmp_path.rglob("validation.jsonl"))
    assert len(files) == 2 and {f.parent.name for f in files} == {"niah_single_1", "fwe"}
    assert {f.parts[-4] for f in files} == {tokenizer_sha256(tiny_tokenizer())[:12]}
    with monkeypatch.context() as patch:
        patch.setattr(suite.tasks, "draft", None)  # nothing is made
        assert make(count=3) == three
        assert make(count=2) == three[:2] + three[3:5]
    assert len(ticks) == 16
    four = make(count=4)
    assert four[:3] + four[4:7] == three
    assert make(count=4, seed=1)[0] != three[0]
    assert len({s.outputs for s in four}) == 8  # every sample is another
    assert len({s.outputs for s in make(count=4, seed=1)} | {s.outputs for s in four}) == 16


def test_sets_have_the_official_layout(tmp_path):
    made = make_suite(tiny_tokenizer(), tmp_path, lengths=[1500], count=2, names=["niah_single_1"])
    (file,) = tmp_path.rglob("validation.jsonl")
    line = json.loads(file.read_text().splitlines()[1])
    assert line["index"] == 1 and line["length_w_model_temp"] == line["length"] + form_tokens(
        tiny_tokenizer()
    )
    assert line["input"][line["token_position_answer"] :].startswith(line["outputs"][0])  # one token a byte
    assert read_jsonl(file.parent.parent) == list(made.samples)
    made_with = json.loads((file.parent / "set.json").read_text())
    assert made_with["words"] == made.settings["words"]
    assert made_with["tokenizer"] == tokenizer_sha256(tiny_tokenizer())


def test_another_essay_is_another_set(tmp_path, named):
    make = lambda essay: make_suite(  # noqa: E731
        tiny_tokenizer(), tmp_path / "sets", lengths=[1500], count=1, names=["niah_single_2"], essays=essay
    ).samples[0]
    other = tmp_path / "other.txt"
    other.write_text("Snow fell. Nobody came. " * 80)
    assert "winter road" in make(named["essays"]).input and "Nobody" in make(other).input
    assert len(list((tmp_path / "sets").rglob("validation.jsonl"))) == 2


def test_the_embedded_essay_leaves_out_what_maps_were_fitted_on(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "prose", lambda fitted: [f"Prose without {sorted(fitted)}. " * 200])
    found = make_suite(
        tiny_tokenizer(),
        tmp_path,
        lengths=[1500],
        count=1,
        names=["niah_single_2"],
        essays="embedded",
        fitted=["d1"],
    )
    assert "Prose without ['d1']." in found.samples[0].input


def test_what_cannot_be_made_is_refused_by_name(tmp_path):
    with pytest.raises(CorpusError, match="no such file"):
        make_suite(tiny_tokenizer(), tmp_path, lengths=[1500], essays=tmp_path / "none.txt")
    with pytest.raises(PromptError, match="vt of 600 tokens"):
        make_suite(tiny_tokenizer(), tmp_path, lengths=[600], names=["vt"])
    assert not list(tmp_path.rglob("*.jsonl"))
