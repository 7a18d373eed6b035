"""RULER through lm-eval: what is kept, which samples are filled, and that a killed run goes on."""

import json

import pytest
import yaml

pytest.importorskip("lm_eval")

from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.results import Run
from ridgefill.eval.ruler import run as ruler_run
from ridgefill.eval.ruler.jsonl import Sample
from ridgefill.eval.ruler.run import measure_ruler, write_tasks
from ridgefill.eval.ruler.scorers import score
from ridgefill.plan import make_plan
from tests.tiny import tiny_model, tiny_tokenizer

TAIL, LEADING = 100, 16
FORM = len("<|user|>\n")
PAD = "x" * 250


def arm(name):
    plan = make_plan(6, None, fill=name, split=3, tail=TAIL, leading=LEADING)
    return Arm(name, lambda n: plan, name)


def document(task, index, before, after, outputs=("gold",)):
    """A qa sample whose one gold paragraph lies behind ``before`` characters; one token a character."""
    text = "-" * before + "Document 1:\nthe gold" + "-" * after + "\n\nQuestion: who?"
    return Sample(task, index, 512, 400, text, " Answer:", outputs, ((before, before + 20),))


def measure(samples, run, *, model=None, tokenizer=None, arms=None, **more):
    """With answers of two tokens, unless the harness is told otherwise."""
    more = {"harness": {"gen_kwargs": {"max_gen_toks": 2}}, "tail": TAIL, "leading": LEADING, **more}
    measure_ruler(
        model or tiny_model(), tokenizer or tiny_tokenizer(), arms or [arm("exact")], samples, run, **more
    )


def open_run(folder):
    return Run.open(folder, "ruler", {}, {"arms": {}})


# The prompt ends with two newlines, "Question: who?", and " Answer:": 24 tokens.
PLACES = {
    (16, 200): True,
    (15, 200): False,  # its first row is a leading one
    (60, 76): True,
    (60, 75): False,  # its last row is in the tail
}


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch):
    """lm-eval asks pip for all packages, a second a call; nothing of it is used."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def test_filled_is_told_by_rows_of_the_final_prompt(tmp_path):
    run = open_run(tmp_path)
    samples = [document("qa_1", i, *place) for i, place in enumerate(PLACES)]
    measure(samples, run, chat=False)
    assert [line["filled"] for line in run.lines] == list(PLACES.values())
    for line, (before, after) in zip(run.lines, PLACES, strict=True):
        assert line["tokens"] == before + 20 + after + 24
        assert line["depth"] == before / line["tokens"]


def test_the_chat_form_moves_rows(tmp_path):
    run = open_run(tmp_path)
    shifted = LEADING - FORM
    samples = [document("qa_1", 0, shifted, 200), document("qa_1", 1, shifted - 1, 200)]
    measure(samples, run)
    assert [line["filled"] for line in run.lines] == [True, False]
    assert run.lines[0]["depth"] == LEADING / run.lines[0]["tokens"]


def test_every_arm_runs_every_sample_and_a_killed_run_goes_on(tmp_path, monkeypatch):
    samples = [document("qa_1", i, 30 + i, 200) for i in range(2)]
    samples.append(Sample("fwe", 0, 512, 400, f"{PAD}\nQuestion: which?", " Answer:", ("a", "b", "c")))
    arms, ticks = [arm("exact"), arm("identity")], []

    class Killed(Exception):
        pass

    whole = open_run(tmp_path / "whole")
    go = lambda run: measure(samples, run, arms=arms, tick=lambda: ticks.append(1))  # noqa: E731
    go(whole)
    assert len(ticks) == 6
    names = [(a, s.item) for a in ("exact", "identity") for s in samples]
    assert [(line["arm"], line["item"]) for line in whole.lines] == names
    for line in whole.lines:
        sample = next(s for s in samples if s.item == line["item"])
        assert line["stratum"] == sample.task and line["length"] == 512 and line["seconds"] > 0
        assert line["metrics"] == {"score": score(sample.task, line["answer"], sample.outputs)}
        assert (line["filled"] is None) == (line["depth"] is None) == (sample.task == "fwe")

    kept = Run.add
    for stop in (1, 4):
        run = open_run(tmp_path / f"killed{stop}")

        def add(self, *args, limit=stop, **facts):
            if len(self.lines) == limit:
                raise Killed
            kept(self, *args, **facts)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "add", add)
            with pytest.raises(Killed):
                go(run)
        again = open_run(tmp_path / f"killed{stop}")
        assert len(again.lines) == stop
        go(again)
        assert len((tmp_path / f"killed{stop}" / "items.jsonl").read_text().splitlines()) == 6
        without = lambda line: {k: v for k, v in line.items() if k != "seconds"}  # noqa: E731
        assert [without(line) for line in again.lines] == [without(line) for line in whole.lines]


def test_nothing_filled_is_refused_before_anything_runs(tmp_path):
    run = open_run(tmp_path)
    with pytest.raises(PromptError, match=r"of 1 samples, the longest of 294 tokens, none .* shorter tail"):
        measure_ruler(
            tiny_model(),
            tiny_tokenizer(False),
            [arm("exact")],
            [document("qa_1", 0, 200, 50)],
            run,
            tail=TAIL,
        )
    assert run.lines == []


def test_a_sample_longer_than_the_context_is_refused_before_anything_runs(tmp_path):
    run = open_run(tmp_path)
    model = tiny_model(max_position_embeddings=300)
    samples = [document("qa_1", 0, 30, 190), document("qa_1", 1, 30, 195)]  # 264 and 269 tokens, 32 to answer
    with pytest.raises(PromptError, match=r"qa_1/512/1, of 269 tokens and 32 .* context is 300"):
        measure(samples, run, model=model, tokenizer=tiny_tokenizer(False), harness={})
    assert run.lines == []
    measure(samples[:1], run, model=model, tokenizer=tiny_tokenizer(False), harness={})
    assert len(run.lines) == 1


@pytest.mark.parametrize(
    ("samples", "more", "why"),
    [
        ([], {}, "no sample"),
        ([document("qa_1", 0, 30, 200)] * 2, {}, "one name"),
        ([document("qa_1", 0, 30, 200)], {"chat": True}, "no chat template"),
        ([document("qa_1", 0, 30, 200)], {"harness": {"no_such_setting": 1}}, "no_such_setting"),
    ],
)
def test_bad_settings_are_named(tmp_path, samples, more, why):
    with pytest.raises(SettingError, match=why):
        measure_ruler(
            tiny_model(),
            tiny_tokenizer(False),
            [arm("exact")],
            samples,
            open_run(tmp_path),
            tail=TAIL,
            **more,
        )


@pytest.mark.parametrize(
    ("chat", "prefix", "start", "end"),
    [
        (False, False, "----", "who?"),
        (False, True, "----", "who? Answer:"),
        (True, False, "<|user|>\n----", "who?<|end|>\n<|assistant|>\n"),
        (True, True, "<|user|>\n----", "who?<|end|>\n<|assistant|>\n Answer:"),
    ],
)
def test_the_prompt_has_the_form_asked_for(tmp_path, monkeypatch, chat, prefix, start, end):
    seen = []
    real = ruler_run.place
    monkeypatch.setattr(
        ruler_run, "place", lambda s, context, *rest: (seen.append(context), real(s, context, *rest))[1]
    )
    measure([document("qa_1", 0, 30, 200)], open_run(tmp_path), chat=chat, prefix=prefix)
    assert seen[0].text.startswith(start) and seen[0].text.endswith(end)


def test_users_own_settings_of_the_harness_reach_the_model(tmp_path, monkeypatch):
    lengths, real = [], Arm.generate

    def generate(self, model, tokenizer, ids, **kwargs):
        lengths.append((kwargs["max_new_tokens"], tokenizer.decode(ids[0])))
        return real(self, model, tokenizer, ids, **kwargs)

    monkeypatch.setattr(Arm, "generate", generate)
    settings = {"gen_kwargs": {"max_gen_toks": 3}, "system_instruction": "Be brief."}
    measure([document("qa_1", 0, 30, 200)], open_run(tmp_path), harness=settings)
    ((tokens, prompt),) = lengths
    assert tokens == 3 and prompt.startswith("<|system|>\nBe brief.<|end|>\n<|user|>\n---")


def test_the_question_reaches_the_arm(tmp_path, monkeypatch):
    asked, real = [], Arm.generate

    def generate(self, model, tokenizer, ids, *, question, **kwargs):
        asked.append(tokenizer.decode(ids[0, question[0] : question[1]]))
        return real(self, model, tokenizer, ids, question=question, **kwargs)

    monkeypatch.setattr(Arm, "generate", generate)
    measure([document("qa_1", 0, 30, 200)], open_run(tmp_path))
    assert asked == ["Question: who?"]


def test_kept_scores_are_lm_evals_own(tmp_path, monkeypatch):
    logged, real = {}, ruler_run.run_tasks

    def run_tasks(*args, **kwargs):
        found = real(*args, **kwargs)
        logged.update({e["doc"]["item"]: e["score"] for entries in found.values() for e in entries})
        return found

    monkeypatch.setattr(ruler_run, "run_tasks", run_tasks)
    run = open_run(tmp_path)
    # single characters: some of them stand in any answer
    samples = [
        document("qa_1", i, 30, 200, tuple(outputs)) for i, outputs in enumerate(["abcdef", "0123", "Zz"])
    ]
    samples.append(
        Sample("fwe", 0, 512, 400, f"{PAD}\nQuestion: which?", " Answer:", tuple("aeioustrn \x93"))
    )
    measure(samples, run, harness={})
    assert {line["item"]: line["metrics"]["score"] for line in run.lines} == logged and len(logged) == 4


def test_the_tasks_are_lm_evals_own_form(tmp_path):
    samples = [document("qa_1", 0, 30, 200), Sample("vt", 0, 512, 400, "a\nb", " c: ", ("D",))]
    assert write_tasks(tmp_path, samples) == ["ridgefill_ruler_qa_1", "ridgefill_ruler_vt"]
    text = (tmp_path / "ridgefill_ruler_vt.yaml").read_text()
    config = yaml.safe_load(text.replace("!function ", ""))
    assert config["generation_kwargs"] == {"until": [], "do_sample": False, "max_gen_toks": 30}
    assert config["gen_prefix"] == "answer_prefix" and "!function ridgefill" in text
    doc = json.loads((tmp_path / "vt.jsonl").read_text())
    assert doc["item"] == "vt/512/0" and doc["outputs"] == ["D"]
    write_tasks(tmp_path, samples, prefix=False)
    assert "gen_prefix" not in (tmp_path / "ridgefill_ruler_vt.yaml").read_text()
