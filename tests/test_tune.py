"""The search for the fastest setting that holds: what is tried, what is dropped, what is not measured twice."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import ridgefill
from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.arms import EXACT
from ridgefill.eval.haystack import Haystack
from ridgefill.eval.losses import Document
from ridgefill.eval.results import Run
from ridgefill.fit import corpus
from ridgefill.settings_file import SettingFile
from ridgefill.tune import Figure, Limits, Trial, search, tune
from ridgefill.tune.measure import Bench, Budget, Pace, facts, spread, third
from ridgefill.tune.result import RETRIEVAL
from ridgefill.tune.texts import divide
from tests.tiny import tiny_model, tiny_tokenizer

SEED = 1  # of the model: with these weights every fill from layer 2 costs loss on novel tokens
SIZE = {"tokens": 300, "tails": (40, 80), "rows": (None, "random(0.10)"), "documents": 6, "fit_tokens": 4000}
SPLITS = (2, 5)  # of 6 layers; from the last one nothing is predicted, so its fill is exact
LIMIT = 0.036  # between the intervals' lower ends of two fills and of two others, on a third of the items


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "texts"  # its name is part of what is drawn
    folder.mkdir()
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "the", "of", "and", "42", "x = y\n", "déjà"]
    for i in range(24):
        (folder / f"{i}.txt").write_text(
            " ".join(rng.choice(words) + str(rng.randint(0, 99)) for _ in range(250)), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def world(texts, tmp_path_factory):
    """One whole search, and what it needs."""
    output = tmp_path_factory.mktemp("world") / "out"
    w = SimpleNamespace(model=tiny_model(seed=SEED), tokenizer=tiny_tokenizer(), output=output, stages=[])
    w.call = lambda output, **settings: tune(
        w.model,
        w.tokenizer,
        [texts],
        output,
        **({"splits": SPLITS, "max_novel_nll": LIMIT} | SIZE | settings),
    )
    w.found = w.call(output, tick=w.stages.append)
    return w


@pytest.fixture
def copy(world, tmp_path):
    return shutil.copytree(world.output, tmp_path / "copy")


def lines(output, kind="loss"):
    return [json.loads(line) for line in (output / kind / "items.jsonl").read_text().splitlines()]


def shown(table):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


# --- the answer


def test_the_fastest_that_holds_is_the_answer(world):
    found = world.found
    counted = [t.macs_over_exact for t in found.trials]
    assert len(counted) == 8 and counted == sorted(counted) and counted[-1] < 1
    assert [t.state for t in found.trials[4:]] == ["holds", "not needed", "not needed", "not needed"]
    assert all(t.state in ("dropped", "fails") for t in found.trials[:4])
    assert all(t.name.startswith("split 2, tail ") for t in found.trials[:4])
    assert found.winner is found.trials[4] and found.winner.name == "split 5, tail 40"
    assert found.winner.confident and abs(found.winner.figures["novel_nll"].mean) < 1e-5
    assert found.timing["tokens"] == 300 and len(found.timing["exact_s"]) == search.REPEATS
    assert not found.not_tried
    assert world.stages[:3] == [
        "fitting maps for layers 2, 5",
        "exact, loss of 6 documents",
        "setting 1 of 8: split 2, tail 40",
    ]


def test_figures_are_those_of_the_items(world):
    by = {}
    for line in lines(world.output):
        by.setdefault(line["arm"], {})[line["item"]] = line["metrics"]
    exact = {item: m["novel_nll"] for item, m in by["exact"].items()}
    assert len(exact) == 6
    assert {t.state for t in world.found.trials[:4]} == {"dropped", "fails"}
    for trial in world.found.trials[:5]:
        figure = trial.figures["novel_nll"]
        rises = [metrics["novel_nll"] - exact[item] for item, metrics in by[trial.name].items()]
        assert len(rises) == figure.n == (3 if trial.state == "dropped" else len(exact))
        assert figure.mean == pytest.approx(sum(rises) / len(rises), abs=1e-12)
        assert figure.low <= figure.mean <= figure.high
        assert (figure.mean <= LIMIT) == (trial.state == "holds")
        assert (figure.n == 3 and figure.low > LIMIT) == (trial.state == "dropped")


def test_no_document_that_was_fitted_on_judges(world):
    fit, held = (
        corpus.read_sources([world.output / "texts" / part / "00.jsonl"]) for part in ("fit", "held")
    )
    fit, held = ({d.load() for d in sources[0].documents} for sources in (fit, held))
    assert fit and held and not fit & held and len(fit | held) <= 24
    maps = ridgefill.RidgeMaps.load(world.output / "maps" / "split-02")
    assert [s["name"] for s in maps.provenance["sources"]] == ["00.jsonl"]
    for line in lines(world.output):
        assert line["stratum"] != "00.jsonl" and line["item"].startswith(f"{line['stratum']}/")


def test_the_setting_file_is_what_filling_takes(world):
    found = SettingFile.read(world.found.setting)
    assert (found.maps, found.split, found.tail, found.leading) == ("./maps/split-05", 5, 40, 16)
    assert (
        found.evidence["figures"]["novel_nll"]["n"] == world.found.winner.figures["novel_nll"].n
        and found.evidence["confident"] is True
    )
    assert found.evidence["tried"] == 5 and found.evidence["not_tried"] == []
    maps = found.load_maps(world.output)
    with ridgefill.filling(world.model, maps, **found.arguments(), min_tokens=100) as active:
        world.model(torch.randint(256, (1, 200)), logits_to_keep=1)
    assert active.stats.filled == 200 - 40 - 16


def test_words_and_table_say_why(world):
    words, table = world.found.words(), shown(world.found.table())
    assert words[0].startswith(
        "The fastest setting that holds, by counted compute: split 5, tail 40. It holds with"
    )
    assert "times as fast" in " ".join(words)
    assert "split 2, tail 80, rows random" in table and "a faster one holds" in table
    for trial in world.found.trials[:4]:
        assert trial.why.endswith("novel-token loss") and trial.state in table
    made = json.loads((world.output / "tune.json").read_text())
    assert made["result"] == json.loads(json.dumps(world.found.to_json(), allow_nan=False))
    assert made["result"]["winner"] == "split 5, tail 40"


def test_none_holds(world, copy):
    (copy / "ridgefill-setting.json").unlink()
    before = (copy / "loss" / "items.jsonl").read_bytes()
    found = world.call(copy, splits=(2,))
    assert (copy / "loss" / "items.jsonl").read_bytes() == before
    assert found.winner is None and found.setting is None and not (copy / "ridgefill-setting.json").exists()
    misses = {t.name: t.figures["novel_nll"].mean - LIMIT for t in found.trials}
    assert found.nearest.name == min(misses, key=misses.get)
    assert found.nearest.missed_by == pytest.approx(min(misses.values()))
    words = found.words()
    assert words[0] == "None of the 4 settings tried holds; no setting file was written."
    assert words[1].startswith(f"The nearest is {found.nearest.name}") and "too far" in words[2]


# --- going on


def test_what_is_measured_is_not_measured_again(world, copy):
    files = [copy / "loss" / "items.jsonl", *(copy / "maps").rglob("*.safetensors")]
    before = {path: path.read_bytes() for path in files}
    stages = []
    found = world.call(copy, tick=stages.append)
    assert {path: path.read_bytes() for path in files} == before
    assert not any(stage.startswith("fitting") for stage in stages)
    assert [t.to_json() for t in found.trials] == [t.to_json() for t in world.found.trials]


def test_a_killed_search_goes_on_to_the_same_answer(world, copy):
    items = copy / "loss" / "items.jsonl"
    whole = items.read_text().splitlines(keepends=True)
    items.write_text("".join(whole[:8]) + whole[8][:20])
    found = world.call(copy)
    assert len(lines(copy)) == len(whole)
    assert [t.state for t in found.trials] == [t.state for t in world.found.trials]


def test_another_limit_measures_only_what_it_adds(world, copy):
    before = lines(copy)
    found = world.call(copy, max_novel_nll=5.0)
    assert found.winner.name == "split 2, tail 40" and found.winner.confident
    added = lines(copy)[len(before) :]
    known = {line["item"] for line in before if line["arm"] == "split 2, tail 40"}
    assert {line["arm"] for line in added} <= {"split 2, tail 40"}
    assert len(known) == 3 and len(added) == found.winner.figures["novel_nll"].n - 3 > 0


def test_another_search_in_the_folder_is_refused(world, copy):
    with pytest.raises(SettingError, match="tokens was 300, now 280"):
        world.call(copy, tokens=280)
    (copy / "tune.json").write_text("{")
    with pytest.raises(SettingError, match=r"its tune\.json cannot be read"):
        world.call(copy)


# --- time


def test_no_time_tries_nothing_and_says_so(world, tmp_path):
    found = world.call(tmp_path / "out", seconds=1e-6)
    assert [t.state for t in found.trials] == ["not tried"] * 8 and found.winner is None
    assert [t.macs_over_exact for t in found.trials] == [t.macs_over_exact for t in world.found.trials]
    assert not any((tmp_path / "out" / name).exists() for name in ("maps", "loss", "ridgefill-setting.json"))
    words = found.words()
    assert words[0] == "No setting was tried, so none was found and no setting file was written."
    assert words[1].startswith("Time did not allow 8 of 8 settings: split 2, tail 40;")
    assert words[2] == "No maps were fitted for layers 2, 5: the time was up."


def test_what_would_not_fit_is_not_begun(world, copy, monkeypatch):
    (copy / "loss" / "items.jsonl").write_text(
        "".join(line for line in (copy / "loss" / "items.jsonl").open() if '"arm": "split 5' not in line)
    )
    monkeypatch.setattr(Pace, "item", lambda self, kind: 1e4)
    before = lines(copy)
    found = world.call(copy)
    assert lines(copy) == before and found.winner is None
    assert [t.state for t in found.trials[4:]] == ["not tried"] * 4
    assert found.trials[4].why.startswith("measuring 3 items takes about 30000 s, and ")
    words = found.words()
    assert words[0].startswith("None of the 4 settings tried holds")
    assert "Time did not allow 4 of 8 settings" in " ".join(words)
    assert "is an earlier call's answer" in words[-1]


def test_a_slower_answer_says_that_faster_ones_were_not_tried(world, copy, monkeypatch):
    shutil.rmtree(copy / "maps" / "split-02")
    monkeypatch.setattr(Pace, "prefill", lambda self: 1e4)  # the fit takes too long, and the timing too
    found = world.call(copy)
    assert [t.why for t in found.trials[:4]] == ["its maps are not fitted"] * 4
    assert found.winner.name == "split 5, tail 40" and found.timing is None
    words = " ".join(found.words())
    assert "That is among the settings tried: 4 of less compute were not." in words
    assert "Its speed was not measured" in words and "The answer's speed was not measured" in words


# --- maps that are given, retrieval


def test_given_maps_are_tried_at_their_own_split_and_nothing_is_fitted(world, texts, tmp_path):
    maps = world.output / "maps" / "split-05"
    found = world.call(tmp_path / "out", maps=[maps], splits=None, tails=(40,), rows=(None, "tail(1.0)"))
    full = ridgefill.RidgeMaps.load(maps).content_hash
    assert [t.name for t in found.trials] == [
        f"split 5, tail 40, maps {full[:8]}",
        f"split 5, tail 40, rows tail(1.0), maps {full[:8]}",
    ]
    assert found.trials[0].state == "holds"
    setting = SettingFile.read(found.setting)
    assert setting.maps == str(maps.resolve()) and setting.maps_hash == full
    assert not (tmp_path / "out" / "maps").exists() and not (tmp_path / "out" / "texts").exists()
    assert {line["stratum"] for line in lines(tmp_path / "out")} == {texts.name}


def test_a_setting_that_computes_no_less_than_exact_is_not_measured(world, copy):
    found = world.call(copy, splits=(5,), tails=(40,), rows=("tail(1.0)",))
    assert found.trials[0].state == "dropped" and found.trials[0].why == "it computes no less than exact"
    assert found.trials[0].figures == {} and found.winner is None


@pytest.fixture
def said(world, monkeypatch):
    """Facts whose answers are what the exact model says, so that it finds them all; the last but one's is not."""

    def of(tokenizer, count, texts, *, tokens, tail, leading, seed):
        made = Haystack(tokens=tokens, tail=tail, leading=leading, seed=seed).items(tokenizer, count)
        items = []
        for i, item in enumerate(made):
            n = item.ids.shape[1]
            out = world.model.generate(item.ids, max_new_tokens=8, do_sample=False)
            answer = tokenizer.decode(out[0, n:], skip_special_tokens=True).strip()
            items.append(
                (f"said/{i}", "said", replace(item, answers=(answer if i != count - 2 else "never",)))
            )
        return items, ""

    monkeypatch.setattr(search, "facts", of)


def test_retrieval_is_judged_by_what_exact_finds(world, said, tmp_path):
    size = {"tokens": 700, "tails": (200,), "rows": (None,), "needles": 5, "max_novel_nll": None}
    maps = [world.output / "maps" / f"split-{split:02d}" for split in SPLITS]
    found = world.call(tmp_path / "out", maps=maps, splits=None, min_retrieval=0.9, **size)
    first, second = found.trials
    assert first.state in ("dropped", "fails") and second.state == "holds"
    figure = second.figures[RETRIEVAL]
    assert (figure.mean, figure.n, figure.high) == (1.0, 4, 1.0)
    assert figure.low == pytest.approx(0.025 ** (1 / 4))  # Clopper and Pearson, all of 4
    assert not second.confident and "on these texts" in found.words()[0]
    of_exact = [line for line in lines(tmp_path / "out", "ruler") if line["arm"] == "exact"]
    assert [line["metrics"]["score"] for line in of_exact] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert "said/3" not in {
        line["item"] for line in lines(tmp_path / "out", "ruler") if line["arm"] != "exact"
    }
    assert "4 n" in shown(found.table()) or "n 4" in shown(found.table())


def test_facts_that_exact_does_not_find_are_no_measure(world, copy):
    with pytest.raises(CorpusError, match="finds none of 3 facts"):
        tune(
            world.model,
            world.tokenizer,
            [copy / "texts" / "held"],
            copy / "again",
            maps=[copy / "maps" / "split-05"],
            min_retrieval=0.9,
            tokens=700,
            tails=(200,),
            rows=(None,),
            needles=3,
        )


def test_facts_lie_in_rows_that_every_candidate_fills():
    rng = random.Random(0)
    prose = [" ".join("The river is wide and the road is long." for _ in range(500)) for _ in range(3)]
    made, remark = facts(tiny_tokenizer(), 4, prose, tokens=700, tail=200, leading=16, seed=rng.randint(0, 9))
    assert remark == "" and [stratum for _, stratum, _ in made].count("prose") == 2
    assert [item.depth for *_, item in made] == sorted(item.depth for *_, item in made)
    for name, stratum, item in made:
        ((first, stop),) = item.needles
        assert 16 <= first < stop <= 500 and item.ids.shape[1] == 700 and name.startswith(f"{stratum}/")
    made, remark = facts(tiny_tokenizer(), 3, ["no sentence"], tokens=700, tail=200, leading=16, seed=0)
    assert [stratum for _, stratum, _ in made] == ["noise"] * 3 and "noise alone" in remark


# --- refusals


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_novel_nll": None}, "no limit was given"),
        ({"max_novel_nll": -0.1}, "what a token may lose"),
        ({"max_novel_nll": float("nan")}, "what a token may lose"),
        ({"min_retrieval": 0}, "a share of what exact retrieves"),
        ({"min_retrieval": 1.5}, "a share of what exact retrieves"),
        ({"tails": (40, 284, 500)}, "tails of 284, 500 tokens: of 300 tokens with 16 leading rows"),
        ({"tails": ()}, "no tail was named"),
        ({"tokens": 5000}, "the model's context is 4096"),
        ({"documents": 0}, "0 documents"),
        ({"seconds": -1}, "a length of time"),
        ({"splits": ()}, "no split and no maps"),
        ({"splits": (6,)}, "the model has 6 layers"),
        ({"rows": ("nonsense",)}, "no rows called 'nonsense'"),
        ({"rows": ("random(0.10)", "random(0.1)")}, "is named twice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(world, tmp_path, settings, said):
    with pytest.raises(SettingError) as error:
        world.call(tmp_path / "out", **{"seconds": 0} | settings)
    assert said in str(error.value)


# --- parts


@pytest.mark.parametrize(
    ("figure", "holds", "confident", "excluded"),
    [
        (Figure(0.1, 0.05, 0.2, 8, limit=0.2), True, True, False),
        (Figure(0.1, 0.05, 0.21, 8, limit=0.2), True, False, False),
        (Figure(0.1, 0.05, 0.2, 8, limit=0.07), False, False, False),
        (Figure(0.1, 0.05, 0.2, 8, limit=0.04), False, False, True),
        (Figure(0.1, None, None, 1, limit=0.04), False, False, False),
        (Figure(0.9, 0.8, 0.95, 8, limit=0.8, more_is_better=True), True, True, False),
        (Figure(0.9, 0.8, 0.95, 8, limit=0.9, more_is_better=True), True, False, False),
        (Figure(0.9, 0.8, 0.95, 8, limit=0.95, more_is_better=True), False, False, False),
        (Figure(0.9, 0.8, 0.95, 8, limit=0.96, more_is_better=True), False, False, True),
    ],
)
def test_what_a_figure_says_of_its_limit(figure, holds, confident, excluded):
    assert (figure.holds, figure.confident, figure.excluded) == (holds, confident, excluded)


def test_the_nearest_misses_all_its_limits_by_the_least():
    def trial(name, nats, share):
        figures = {
            "key_nll": Figure(nats, None, None, 3, 0.1),
            RETRIEVAL: Figure(share, None, None, 3, 0.9, True),
        }
        return Trial(name, 0.5, "fails", figures, "both")

    trials = (trial("a", 0.2, 0.5), trial("b", 0.3, 0.95), trial("c", 0.25, 0.8))
    found = search.TuneResult(Limits(0.1, None, 0.9), trials, None, None, None, 300, 1.0)
    assert found.nearest.name == "b" and found.nearest.missed_by == pytest.approx(0.2)


def test_a_third_is_spread_over_all():
    assert [third(n) for n in (1, 3, 8, 9, 24, 25)] == [1, 3, 3, 3, 8, 9]
    assert spread(list(range(24))) == [0, 3, 7, 10, 13, 16, 20, 23]
    assert spread([5]) == [5]


def test_one_document_is_cut_in_two_and_too_little_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text(" ".join(f"word{i}" for i in range(100)))
    made = divide(corpus.read_sources([tmp_path / "one.txt"]), tmp_path / "out", fit_tokens=9, held_tokens=9)
    fit, held = (json.loads(path.read_text())["text"] for path in (made.fit[0], made.held[0]))
    assert fit + held == (tmp_path / "one.txt").read_text() and abs(len(fit) - len(held)) < 12
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(CorpusError, match="too little text for two"):
        divide(corpus.read_sources([tmp_path / "short.txt"]), tmp_path / "none", fit_tokens=9, held_tokens=9)


@pytest.fixture
def bench(world, tmp_path):
    """A bench over three documents, with exact's figures written by hand: a has key tokens, b none, c neither."""
    run = Run.open(tmp_path / "loss", "loss", {}, {"arms": {}})
    for item, metrics in {"a": {"key_nll": 1.0, "novel_nll": 2.0}, "b": {"novel_nll": 3.0}, "c": {}}.items():
        run.add("exact", item, "s", metrics)
    documents = [Document(item, "s", torch.ones(1, 9, dtype=torch.long)) for item in "abc"]

    def of(*limits):
        return Bench(world.model, world.tokenizer, Limits(*limits), Budget(60), Pace(None, None, 9),
                     EXACT, loss=run, documents=documents)  # fmt: skip

    return of


@pytest.mark.parametrize(
    ("limits", "kept"), [((1.0, None, None), "a"), ((None, 1.0, None), "ab"), ((1.0, 1.0, None), "ab")]
)
def test_only_documents_that_can_tell_are_run(bench, limits, kept):
    made = bench(*limits)
    made.measure_exact(lambda stage: None)
    assert "".join(d.item for d in made.documents) == kept


def test_a_limit_on_tokens_that_no_document_has_is_refused(bench):
    made = bench(1.0, None, None)
    made.documents = made.documents[1:]
    with pytest.raises(CorpusError, match="none of the 2 documents has any"):
        made.measure_exact(lambda stage: None)


def test_a_setting_that_the_model_refuses_is_said_and_the_search_goes_on(world, texts, tmp_path):
    model = tiny_model("qwen3_5_text", seed=SEED)  # no full attention below layer 2
    size = SIZE | {"tails": (40,), "rows": (None, "attention(0.10)"), "documents": 3, "tokens": 200}
    found = tune(model, world.tokenizer, [texts], tmp_path / "o", splits=(2,), max_novel_nll=0.0, **size)
    (refused,) = [t for t in found.trials if "attention" in t.name]
    assert refused.state == "refused" and "attention" in refused.why and refused.figures == {}
    (plain,) = [t for t in found.trials if t is not refused]
    assert plain.state in ("fails", "holds")
