"""What users name becomes a plan, or a refusal that names the setting."""

from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.fill import Exact, Identity, NoFill, Ridge, TrueInputs
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.plan import DEFAULT_LEADING, DEFAULT_TAIL, FillPlan, layer_of, make_plan


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
    assert make_plan(layers, fill="pop", tail=99, leading=9) == FillPlan(Identity(), split, tail=1, leading=0)
    assert split == layers - layers // 3


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
