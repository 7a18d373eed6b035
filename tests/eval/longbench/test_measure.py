"""A tiny random model is asked from end to end, killed and asked again."""

from dataclasses import replace

import pytest

from ridgefill.errors import CorpusError, PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.longbench import accuracy_by_group, measure_longbench, regroup
from ridgefill.eval.longbench.v1 import sample_of as v1_sample
from ridgefill.eval.longbench.v2 import sample_of as v2_sample
from ridgefill.eval.results import Run, read
from ridgefill.fill import Exact, Identity
from ridgefill.plan import FillPlan
from tests.eval.longbench.rows import v1_row, v2_row
from tests.tiny import tiny_model, tiny_tokenizer

EXACT = Arm("exact", lambda n: FillPlan(Exact(), 3))
SHORT = Arm("identity", lambda n: FillPlan(Identity(), 3, tail=600, leading=4))
LONG = Arm("long tail", lambda n: FillPlan(Identity(), 3, tail=4000, leading=4))


@pytest.fixture(scope="module")
def parts():
    return tiny_model(), tiny_tokenizer()


def short(sample, tokens=6):
    return replace(sample, max_new_tokens=tokens)


CODE = short(
    v1_sample(v1_row(dataset="lcc", context="x = 1\n" * 120, input="", answers=["y = 2"], _id="c"), "here")
)
CHOICE = short(v2_sample(v2_row(), "here"))


def begin(folder, arms=(EXACT, SHORT)):
    return Run.open(folder, "longbench", {}, {"arms": {arm.name: {} for arm in arms}})


def test_every_arm_answers_every_sample_and_says_what_was_filled(parts, tmp_path):
    ticks = []
    measure_longbench(*parts, [EXACT, SHORT], [CODE, CHOICE], begin(tmp_path), tick=lambda: ticks.append(1))
    _, lines, _ = read(tmp_path)
    got = {(line["arm"], line["item"]): line for line in lines}
    assert list(got) == [(arm, item) for item in ("lcc/c", "v2/b1") for arm in ("exact", "identity")]
    assert len(ticks) == 4
    code, choice = got["identity", "lcc/c"], got["identity", "v2/b1"]
    assert code["fills"] and not got["exact", "lcc/c"]["fills"]  # 780 bytes without chat form: a tail of 600
    assert not choice["fills"] and choice["answer"] == got["exact", "v2/b1"]["answer"]
    assert code["length"] == len(CODE.prompt) and code["stratum"] == "lcc" and not code["truncated"]
    assert choice["choice"] is None and choice["metrics"] == {"score": 0.0}
    assert choice["difficulty"] == "easy" and choice["length_group"] == "short" and choice["seconds"] > 0
    assert code["answer"] != got["exact", "lcc/c"]["answer"]  # a random model: the fill is felt


def test_a_killed_run_goes_on_where_it_was(parts, tmp_path):
    class Killed(Exception):
        pass

    ticks = []

    def kill():
        ticks.append(1)
        if len(ticks) == 3:
            raise Killed

    with pytest.raises(Killed):
        measure_longbench(*parts, [EXACT, SHORT], [CODE, CHOICE], begin(tmp_path), tick=kill)
    before = read(tmp_path)[1]
    assert len(before) == 3
    ticks.clear()
    measure_longbench(*parts, [EXACT, SHORT], [CODE, CHOICE], begin(tmp_path), tick=lambda: ticks.append(1))
    after = read(tmp_path)[1]
    assert after[:3] == before and len(after) == 4 and len(ticks) == 4


def test_reasoning_is_asked_for_first_and_stands_in_the_second_prompt(parts, tmp_path, monkeypatch):
    asked = []
    arm = Arm("identity", SHORT.make)

    class Listening(Arm):
        def generate(self, model, tokenizer, ids, **kwargs):
            asked.append((tokenizer.decode(ids[0]), kwargs["max_new_tokens"]))
            return super().generate(model, tokenizer, ids, **kwargs)

    sample = short(v2_sample(v2_row(context="The key is in the blue box. " * 30), "here", cot=True))
    listening = Listening(arm.name, arm.make)
    measure_longbench(*parts, [EXACT, listening], [sample], begin(tmp_path))
    line = read(tmp_path)[1][1]
    (first, budget), (second, last) = asked
    assert (budget, last) == (6, 128)
    assert "blue box" in first and "blue box" not in second
    assert f"step by step: {line['reasoning']}\n\nBased on the above" in second
    assert line["fills"] and line["length"] > 604


def test_a_line_break_ends_the_answer_where_the_official_code_ends_it(parts, tmp_path):
    model, tokenizer = parts
    stops = []

    class Listening(Arm):
        def generate(self, model, tokenizer, ids, **kwargs):
            stops.append((kwargs.get("eos_token_id"), kwargs.get("min_new_tokens")))
            return super().generate(model, tokenizer, ids, **kwargs)

    samples = [replace(CODE, newline_stops=True, item="lcc/d"), CODE]
    measure_longbench(model, tokenizer, [Listening("exact", EXACT.make)], samples, begin(tmp_path))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert stops == [([tokenizer.eos_token_id, *newline], 1), (None, None)]


def test_what_cannot_be_measured_is_named_before_any_answer(parts, tmp_path):
    run = begin(tmp_path)
    with pytest.raises(CorpusError, match=r"'long tail'.*longest is \d+ tokens.*needs 4005"):
        measure_longbench(*parts, [EXACT, SHORT, LONG], [CODE, CHOICE], run)
    with pytest.raises(CorpusError, match="no sample"):
        measure_longbench(*parts, [EXACT], [], run)
    with pytest.raises(CorpusError, match="v2/b1: 2 samples"):
        measure_longbench(*parts, [EXACT], [CHOICE, CODE, CHOICE], run)
    with pytest.raises(SettingError, match="cut to 1 tokens"):
        measure_longbench(*parts, [EXACT], [CHOICE], run, max_length=1)
    with pytest.raises(PromptError, match="lcc/c"):
        measure_longbench(*parts, [EXACT, SHORT], [replace(CODE, max_new_tokens=4000)], run, max_length=700)
    assert read(tmp_path)[1] == []


def test_scores_by_group():
    lines = [
        {"arm": arm, "item": f"v2/{i}", "stratum": length, "metrics": {"score": value}}
        | {"difficulty": difficulty, "length_group": length, "domain": "Code"}
        for arm, values in (("exact", (1.0, 0.0, 1.0)), ("ridge", (0.0, 0.0, 1.0)))
        for i, (value, difficulty, length) in enumerate(
            zip(values, ("easy", "easy", "hard"), ("short", "long", "long"), strict=True)
        )
    ]
    got = {(row["arm"], row["by"], row["group"]): (row["n"], row["mean"]) for row in accuracy_by_group(lines)}
    assert got["exact", "difficulty", "easy"] == (2, 0.5) and got["ridge", "difficulty", "easy"] == (2, 0.0)
    assert got["exact", "length_group", "long"] == (2, 0.5) and got["ridge", "domain", "Code"] == (3, 1 / 3)
    assert [line["stratum"] for line in regroup(lines, "difficulty")] == ["easy", "easy", "hard"] * 2
    assert lines[0]["stratum"] == "short"
    with pytest.raises(SettingError, match="v2/0"):
        regroup([{"item": "v2/0", "stratum": "x", "metrics": {}}], "domain")
