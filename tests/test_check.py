from __future__ import annotations

import json
import math

import pytest
import torch

import ridgefill
from ridgefill import check as checking
from ridgefill.bench import break_even
from ridgefill.check import Check, Verdict, check, compare_with_stock
from ridgefill.errors import CorpusError, MapsMismatchError, SettingError
from ridgefill.eval.documents import digest
from ridgefill.eval.loss import TailLoss
from ridgefill.eval.needle import Needle
from ridgefill.fill import Identity
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.plan import FillPlan
from ridgefill.rows.token_table import TokenTable
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

SMALL = {"tail": 64, "leading": 16, "tokens": 300, "documents": 2, "needles": 0}
PLAN = FillPlan(Identity(), split=3, tail=64, leading=16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path):
    made = tmp_path / "texts"
    made.mkdir()
    for i in range(4):
        (made / f"{i}.txt").write_text(f"document {i}: " + f"as {i} was said before, " * 40)
    return made


def eye_maps(model, split=3, provenance=None, scale=1.0):
    """Maps that predict the split state itself: the ridge fill then is the identity fill."""
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    maps = {i: AffineMap(scale * torch.eye(width), torch.zeros(width)) for i in range(split + 1, layers)}
    return RidgeMaps(split, maps, ModelIdentity.of(model, tiny_tokenizer()), provenance)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_correct(family, texts):
    model, stages = tiny_model(family), []
    maps = eye_maps(model)
    found = check(model, tiny_tokenizer(), maps, [texts], **SMALL, tick=stages.append)
    assert len(found.verdicts) == 3 and all(v.holds for v in found.verdicts) and found.correct
    assert "all layers, 236 rows" in found.verdicts[0].detail
    assert len(found.losses) == 2 and set(found.losses[0]) == {"exact", "identity", "ridge"}
    assert found.delta("ridge") == pytest.approx(found.delta("identity"), abs=1e-6)
    assert found.delta("ridge") != 0
    assert found.tried_tokens == 208 and found.min_tokens in (None, 144, 208)
    assert stages == [
        "bit-for-bit comparison",
        "loss, document 1 of 2",
        "loss, document 2 of 2",
        "break-even length",
    ]
    assert found.needles == []
    made = json.loads(json.dumps(found.to_json(model), allow_nan=False))
    assert made["correct"] is True and made["safe"] == found.safe
    assert made["delta_nll"]["ridge"]["all"] == found.delta("ridge")
    assert len(made["documents"]) == 2 and made["plan"] == {
        "fill": "ridge",
        "split": 3,
        "tail": 64,
        "leading": 16,
    }


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_the_comparison_goes_beyond_the_windows(family):
    ids = torch.randint(256, (1, 900))
    model = tiny_model(family, sliding_window=400)
    verdicts = compare_with_stock(Decoder(model), 2, ids)
    assert all(v.holds for v in verdicts)
    assert f"{400 + 256 - checking.PROBE_TAIL} rows" in verdicts[0].detail


class ShiftedKeys(Decoder):
    """Writes every key one row too far on, in the last layer alone."""

    def rotate(self, i, keys, rows):
        if i == self.n_layers - 1:
            return super().rotate(i, keys, rows).roll(1, dims=2)
        return super().rotate(i, keys, rows)


class OtherLayer(Decoder):
    """Runs one layer on slightly other inputs than the stock model."""

    def run_layer(self, i, h, rows, cache=None):
        return super().run_layer(i, h * (1 + 1e-6) if i == 1 else h, rows, cache)


def test_wrongly_rotated_keys_are_found():
    verdicts = compare_with_stock(ShiftedKeys(tiny_model()), 3, torch.randint(256, (1, 300)))
    assert [v.holds for v in verdicts[:2]] == [True, False]
    assert verdicts[1].detail == "unequal in layers [5]"


def test_a_layer_that_computes_otherwise_is_found():
    verdicts = compare_with_stock(OtherLayer(tiny_model()), 3, torch.randint(256, (1, 300)))
    assert [v.holds for v in verdicts[:2]] == [False, False]
    assert "unequal in layers [1, 2" in verdicts[0].detail


def test_wrong_tokens_alone_are_found(monkeypatch):
    answers = iter([torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 3])])
    monkeypatch.setattr(checking, "_greedy", lambda *_: next(answers))
    verdicts = compare_with_stock(Decoder(tiny_model()), 3, torch.randint(256, (1, 300)))
    assert [v.holds for v in verdicts] == [True, True, False]


def test_an_incorrect_fill_is_not_safe_and_nothing_is_remembered(texts, cache, monkeypatch):
    monkeypatch.setattr(checking, "Decoder", ShiftedKeys)
    model = tiny_model()
    found = check(model, tiny_tokenizer(), eye_maps(model), [texts], **SMALL)
    assert found.correct is False and found.losses == []
    (words,) = found.words()
    assert words.startswith("NOT SAFE: a cache filled from true layer inputs")
    made = json.loads(json.dumps(found.to_json(model)))
    assert (made["correct"], made["safe"], made["delta_nll"]) == (False, False, None)
    assert not (cache / "break-even").exists()


def by_hand(ridge, identity=0.5, documents=1, **fields):
    """A correct Check whose arms lose that much more than exact."""

    def arm(delta):
        return TailLoss(first=2 + 2 * delta, last=2 + delta / 2, all=2 + delta)

    losses = [{"exact": arm(0.0), "identity": arm(identity), "ridge": arm(ridge)}] * documents
    return Check(PLAN, [Verdict("same", True, "")], losses, **{"tried_tokens": 1000, **fields})


@pytest.mark.parametrize(
    ("ridge", "identity", "starts", "safe"),
    [
        (0.01, 0.5, "SAFE TO USE", True),
        (-0.01, -0.08, "SAFE TO USE", True),
        (0.049, 0.01, "SAFE TO USE", True),  # identity is better, and both cost next to nothing
        (0.052, 0.5, "USABLE WITH CARE", True),
        (0.249, 0.25, "USABLE WITH CARE", True),
        (0.251, 0.5, "NOT RECOMMENDED", False),
        (0.1, 0.06, "NOT RECOMMENDED", False),  # maps that the identity fill beats
        (math.nan, 0.5, "NOT RECOMMENDED", False),
    ],
)
def test_the_conclusion_comes_first(ridge, identity, starts, safe):
    found = by_hand(ridge, identity)
    assert found.safe is safe
    words = found.words()
    assert words[0].startswith(f"{starts}: ")
    assert f"{ridge:+.3f}" in words[0] and f"{identity:+.3f}" in words[0]
    assert f"{2 * ridge:+.3f}" in words[1] and f"{ridge / 2:+.3f}" in words[1]


@pytest.mark.parametrize(
    ("found", "starts", "says"),
    [
        ([(True, True)] * 3, "SAFE TO USE", "that the exact model found, the fill found 3."),
        ([(True, True), (True, False)], "USABLE WITH CARE", "the fill found 1. What stands only"),
        ([(False, False)] * 2, "SAFE TO USE", "not measured: the exact model itself found none of 2"),
        ([], "SAFE TO USE", "found none of 0"),
    ],
)  # fmt: skip
def test_a_lost_fact_is_said_and_weakens_the_conclusion(found, starts, says):
    needles = [Needle(0.5, exact, filled) for exact, filled in found]
    made = by_hand(0.01, needles=needles)
    assert made.words()[0].startswith(starts) and made.safe
    assert says in made.words()[2]


def test_losses_that_are_no_numbers_can_still_be_written():
    made = json.dumps(by_hand(math.nan).to_json(tiny_model()), allow_nan=False)
    assert json.loads(made)["delta_nll"]["ridge"]["all"] is None


def test_documents_weigh_equally():
    found = by_hand(0.1)
    found.losses += by_hand(0.3, documents=3).losses
    assert found.delta("ridge") == pytest.approx((0.1 + 3 * 0.3) / 4)
    assert found.delta("ridge", "first") == pytest.approx(2 * found.delta("ridge"))


def test_one_failed_comparison_is_named():
    found = by_hand(0.01)
    found.verdicts.append(Verdict("tokens are the same", False, ""))
    assert not found.correct and not found.safe
    assert found.words()[0].startswith("NOT SAFE: tokens are the same.")


def test_every_arm_gets_what_the_rows_read(texts):
    """The identity arm has no maps, and chooses its rows by the maps' token table all the same."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    maps = eye_maps(model)
    maps.tokens = TokenTable.of(tokenizer, torch.ones(model.config.vocab_size, dtype=torch.long))
    found = check(model, tokenizer, maps, [texts], **SMALL, rows="protected(0.5)", timing=False)
    assert found.delta("ridge") == pytest.approx(found.delta("identity"), abs=1e-6)
    plain = check(model, tokenizer, maps, [texts], **SMALL, timing=False)
    assert found.delta("ridge") != plain.delta("ridge")


def test_words_on_the_break_even_length():
    assert "pays from about 1,500 tokens" in by_hand(0.01, min_tokens=1500).words()[-1]
    assert "did not pay up to 1,000 tokens" in by_hand(0.01).words()[-1]
    assert "not measured" in by_hand(0.01, tried_tokens=0).words()[-1]


@pytest.mark.parametrize(("measured", "used"), [(144, 144), (None, 208 + 1)])
def test_the_break_even_length_is_remembered_and_used(texts, monkeypatch, measured, used):
    """Where filling never paid, prompts of all lengths tried run exactly."""
    monkeypatch.setattr(break_even, "measure_break_even", lambda *_, **__: measured)
    model = tiny_model()
    maps = eye_maps(model)
    found = check(model, tiny_tokenizer(), maps, [texts], **SMALL)
    assert (found.min_tokens, found.tried_tokens) == (measured, 208)
    assert ridgefill.filling(model, maps, tail=64).min_tokens == used
    assert ridgefill.filling(model, maps, tail=65).min_tokens == 65 + 16 + 256


def test_documents_too_short_to_time_are_said_to_be(texts, cache):
    model = tiny_model()
    found = check(model, tiny_tokenizer(), eye_maps(model), [texts], **{**SMALL, "tokens": 143})
    assert (found.min_tokens, found.tried_tokens) == (None, 0)
    assert not (cache / "break-even").exists()


def test_fitted_documents_are_left_out(texts):
    model = tiny_model()
    fitted = [digest((texts / f"{i}.txt").read_text()) for i in range(3)]
    settings = {**SMALL, "documents": 9}
    maps = eye_maps(model, provenance={"fitted_documents": fitted})
    assert len(check(model, tiny_tokenizer(), maps, [texts], **settings).losses) == 1
    assert len(check(model, tiny_tokenizer(), eye_maps(model), [texts], **settings).losses) == 4
    fitted.append(digest((texts / "3.txt").read_text()))
    with pytest.raises(CorpusError, match="not fitted on"):
        check(
            model,
            tiny_tokenizer(),
            eye_maps(model, provenance={"fitted_documents": fitted}),
            [texts],
            **SMALL,
        )


def test_the_last_layer_as_split_needs_no_map(texts):
    model = tiny_model()
    found = check(model, tiny_tokenizer(), eye_maps(model, split=5), [texts], **SMALL)
    assert found.correct and found.delta("ridge") == 0 == found.delta("identity")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tail": 0}, "a tail of 0"),
        ({"leading": -1}, "leading"),
        ({"tokens": 80}, "they need 81"),
        ({"tokens": 0}, "they need 81"),
        ({"tokens": -5}, "they need 81"),
        ({"tail": 2, "leading": 0, "tokens": 64}, "they need 65"),
        ({"tail": 4096, "tokens": None}, "documents of 4096 tokens"),
    ],
)
def test_settings_out_of_range(texts, settings, named):
    model = tiny_model()
    with pytest.raises(SettingError, match=named):
        check(model, tiny_tokenizer(), eye_maps(model), [texts], **{**SMALL, **settings})


def test_maps_of_another_model_are_refused(texts):
    with pytest.raises(MapsMismatchError):
        check(tiny_model(), tiny_tokenizer(), eye_maps(tiny_model(seed=1)), [texts], **SMALL)
    with pytest.raises(MapsMismatchError):
        check(tiny_model(), tiny_tokenizer(), eye_maps(tiny_model("qwen2")), [texts], **SMALL)


def test_facts_are_planted_in_long_enough_documents(texts):
    model, stages = tiny_model(), []
    settings = {**SMALL, "tokens": 700, "documents": 1, "needles": 2}
    found = check(model, tiny_tokenizer(), eye_maps(model), [texts], **settings, tick=stages.append)
    assert len(found.needles) == 2
    assert stages[2:4] == ["planted fact 1 of 2", "planted fact 2 of 2"]


def test_timing_can_be_left_out(texts, cache):
    model, stages = tiny_model(), []
    found = check(
        model, tiny_tokenizer(), eye_maps(model), [texts], **SMALL, timing=False, tick=stages.append
    )
    assert "break-even length" not in stages and found.tried_tokens == 0
    assert not (cache / "break-even").exists()
    assert "left out" in found.words()[-1]
