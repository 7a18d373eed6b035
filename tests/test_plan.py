"""What users name becomes a plan, or a refusal that names the setting."""

from __future__ import annotations

import pytest
import torch

from ridgefill.correct import KeyRescale, TerminalState, ValueRescale
from ridgefill.correct.parse import parse_corrections
from ridgefill.errors import SettingError
from ridgefill.fill import Exact, Identity, NoFill, Ridge, TrueInputs
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.plan import DEFAULT_LEADING, DEFAULT_TAIL, FillPlan, layer_of, make_plan
from ridgefill.rows import AttentionRows, LexicalRows, ProbeRows, RandomRows, SpecialRows


def maps(split: int = 3) -> RidgeMaps:
    return RidgeMaps(split, {4: AffineMap(torch.eye(4), torch.zeros(4))})


def test_defaults_are_the_maps_split_and_sixteen_leading_rows():
    given = maps()
    assert make_plan(6, given) == FillPlan(Ridge(given), 3, DEFAULT_TAIL, DEFAULT_LEADING)
    assert (DEFAULT_TAIL, DEFAULT_LEADING) == (2048, 16)


@pytest.mark.parametrize(
    ("fill", "arm"), [("identity", Identity), ("none", NoFill), ("exact", Exact), ("true", TrueInputs)]
)
def test_arms_by_name(fill, arm):
    assert make_plan(6, fill=fill, split=2, tail=5, leading=0) == FillPlan(arm(), 2, 5, 0)
    assert make_plan(6, maps(), fill=fill).split == 3
    assert arm().name == fill


def test_an_arm_itself():
    assert make_plan(6, fill=Identity(), split=0.5).fill == Identity()


@pytest.mark.parametrize(("layers", "split"), [(6, 4), (32, 22), (36, 24), (28, 19), (30, 20)])
def test_pop_is_published(layers, split):  # 22 of 32 and 24 of 36 are the paper's
    for named in ({"fill": "pop"}, {"preset": "pop"}):
        assert make_plan(layers, **named) == FillPlan(Identity(), split, tail=1, leading=0)
    assert make_plan(layers, preset="pop", tail=99) == FillPlan(Identity(), split, tail=99, leading=0)
    assert split == layers - layers // 3


# presets


def test_presets_are_the_papers_deployments():
    found = {name: make_plan(64, fill=Identity(), preset=name) for name in ("reference", "27b", "flash-next")}
    assert (found["reference"].split, found["reference"].tail) == (24, 4096)
    assert (found["27b"].split, found["27b"].tail) == (16, 4096)
    assert (found["flash-next"].split, found["flash-next"].tail) == (32, 2048)
    assert found["27b"].corrections == (ValueRescale(512),)
    assert found["27b"].rows == ProbeRows("27b", within=LexicalRows()) | SpecialRows()
    assert make_plan(32, fill=Identity(), preset="reference+rows").rows == AttentionRows(0.10)
    assert make_plan(32, fill=Identity(), preset="reference").rows is None
    with pytest.raises(SettingError, match="mean state differences"):
        make_plan(48, fill=Identity(), preset="quality")
    with pytest.raises(SettingError, match=r"'28b'.*reference\+rows"):
        make_plan(48, preset="28b")


def test_what_is_named_takes_precedence_then_the_preset_then_the_maps():
    made_for = maps()
    made_for.preset = {"tail": 100, "rows": "random(0.5)", "corrections": "key_rescale(7)"}
    plain = make_plan(6, made_for)
    assert (plain.tail, plain.rows, plain.corrections) == (100, RandomRows(0.5), (KeyRescale(7),))
    named = make_plan(6, made_for, tail=9, rows="none", corrections="")
    assert (named.tail, named.rows, named.corrections) == (9, None, ())
    other = make_plan(6, made_for, preset="reference+rows", leading=3)
    assert (other.tail, other.rows, other.leading) == (4096, AttentionRows(0.1), 3)
    made_for.preset = {"preset": "27b", "tail": 33}
    assert make_plan(6, made_for).tail == 33 and make_plan(6, made_for).rows == found_rows("27b")


def found_rows(name):
    return make_plan(6, fill=Identity(), preset=name).rows


def test_a_plan_in_words_makes_the_same_plan():
    plan = make_plan(6, maps(), rows="attention(0.2) | special", corrections="value_rescale(9) | key_rescale")
    words = plan.to_json()
    assert words["rows"] == "attention(0.2) | special"
    again = make_plan(6, maps(), rows=words["rows"], corrections=words["corrections"])
    assert (again.rows, again.corrections) == (plan.rows, plan.corrections)


def test_corrections_in_words():
    assert parse_corrections("") == ()
    assert parse_corrections("value_rescale | key_rescale(64, 0.5) | terminal_state(0.25)") == (
        ValueRescale(),
        KeyRescale(64, 0.5),
        TerminalState(0.25),
    )
    for bad in ("scale", "value_rescale(x)", "value_rescale(1.5)", "terminal_state(1, 2)", "key_rescale(0)"):
        with pytest.raises(SettingError, match="rescale"):
            parse_corrections(bad)


def test_the_probe_over_no_fill_is_refused():
    with pytest.raises(SettingError, match="probe with the no-fill arm"):
        make_plan(6, fill="none", split=3, rows="probe(0.1)")


@pytest.mark.parametrize(
    ("split", "layers", "layer"),
    [(0.5, 6, 3), (0.7, 90, 63), (0.3, 10, 3), (0.29, 100, 29), (5, 6, 5), (1, 6, 1)],
)
def test_split_as_layer_or_depth(split, layers, layer):
    assert layer_of(split, layers) == layer


@pytest.mark.parametrize("split", [0, 6, -1, 2.5, 0.1, 0.0, float("nan"), float("inf")])
def test_split_outside_the_layers(split):
    with pytest.raises(SettingError, match=r"split at .*6 layers.*1 to 5"):
        layer_of(split, 6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fill": "ridge"}, "needs maps"),
        ({"fill": "identity"}, "no split was given"),
        ({"fill": "magic", "split": 3}, "none of that name.*ridge, identity, none"),
        ({"fill": "exact", "split": 3, "tail": 0}, "last prompt token must run"),
        ({"fill": "exact", "split": 3, "leading": -1}, "0 or more"),
        ({"maps": maps(3), "split": 2}, "fitted for split 3"),
        ({"maps": maps(7)}, "split at 7"),
    ],
)
def test_refusals_by_name(settings, words):
    with pytest.raises(SettingError, match=words):
        make_plan(6, **settings)


def test_shortest_prompt_has_one_row_to_fill():
    assert FillPlan(Identity(), 3, tail=24, leading=16).shortest == 41
    assert FillPlan(Identity(), 3, tail=1, leading=0).shortest == 2
