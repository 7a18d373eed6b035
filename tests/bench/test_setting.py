from __future__ import annotations

from typing import Any

import pytest

from ridgefill.bench.cost import Setting, parse_versus
from ridgefill.errors import SettingError
from tests.bench.configs import HYBRID, LLAMA, paper


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"split": 0}, "split 0"),
        ({"split": -1}, "split -1"),
        ({"split": 1.0}, "split 1.0"),
        ({"split": 0.0}, "split 0.0"),
        ({"split": float("nan")}, "split nan"),
        ({"tail": 0}, "tail 0"),
        ({"tail": 1.5}, "tail 1.5"),
        ({"rows": 1.01}, "rows 1.01"),
        ({"rows": -0.1}, "rows -0.1"),
        ({"rows": -1}, "rows -1"),
        ({"rows": True}, "rows True"),
        ({"rows": "0.1"}, "rows '0.1'"),
        ({"probe": -1}, "probe -1"),
        ({"probe": 0.5}, "probe 0.5"),
        ({"score_rows": -1}, "score_rows -1"),
        ({"score_layers": -1}, "score_layers -1"),
        ({"value_rescale": -1}, "value_rescale -1"),
        ({"key_rescale": True}, "key_rescale True"),
        ({"rows": float("nan")}, "rows nan"),
        ({"leading": -1}, "leading -1"),
        ({"fill": "pop"}, "fill 'pop'"),
        ({"map": "half"}, "map 'half'"),
        ({"gives": "keys"}, "gives 'keys'"),
        ({"blocks": 0}, "blocks 0"),
        ({"rank": -1}, "rank -1"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        Setting(**settings)


def test_layers_to_score_must_lie_below_the_split() -> None:
    assert Setting(16, score_rows=64, score_layers=4).at(HYBRID).split == 16
    for split, layers in ((16, 5), (2, 1), (3, 0)):
        with pytest.raises(SettingError, match=f"layers below the split at {split}"):
            Setting(split, score_rows=64, score_layers=layers).at(HYBRID)


def test_a_plain_setting_does_not_name_what_it_lacks() -> None:
    assert "probe" not in str(paper(20)) and "rescale" not in str(paper(20))


def test_the_other_setting_is_read() -> None:
    ours = paper(20)
    assert parse_versus(" Exact", LLAMA, ours) == Setting.exact()
    assert parse_versus("POP", LLAMA, ours) == Setting.pop(32)
    text = "split=16, tail=2048,rows=0.1,leading=16,fill=identity,map=no,map_at_split=no"
    assert parse_versus(text, LLAMA, ours) == Setting(16, 2048, 0.1, 16, "identity", "none", False)
    assert parse_versus("split=0.25", LLAMA, ours) == Setting(split=8)
    assert parse_versus("tail=7", LLAMA, ours) == Setting(split=16, tail=7)
    assert parse_versus("fill=exact", LLAMA, ours).fill == "exact"
    assert parse_versus("rows=300,probe=256", LLAMA, ours) == Setting(split=16, rows=300, probe=256)
    assert parse_versus("rows=1", LLAMA, ours).rows == 1  # one row, where 1.0 is all of them
    assert type(parse_versus("rows=1.0", LLAMA, ours).rows) is float


def test_a_setting_reads_what_it_writes() -> None:
    for setting in (
        paper(20),
        Setting(1, 1, 1.0, 1, "none", "none", False),
        Setting(20, rows=300),
        Setting(20, 64, 1, 16, probe=256, score_rows=64, score_layers=3, value_rescale=512, key_rescale=7),
        Setting.pop(32),
        Setting.exact(),
    ):
        assert parse_versus(str(setting), LLAMA, paper(20)) == setting


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("depth=16", "no key 'depth'"),
        ("split=16,split=17", "'split' is given twice"),
        ("split", "'split' is not key=value"),
        ("", "'' is not key=value"),
        ("split=16,", "'' is not key=value"),
        ("tail=many", "'many' is no value for 'tail'"),
        ("tail=1.5", "'1.5' is no value for 'tail'"),
        ("map=maybe", "'maybe' is no value for 'map'"),
        ("rows=2.0", "rows 2.0"),
        ("rows=few", "'few' is no value for 'rows'"),
        ("probe=0.1", "'0.1' is no value for 'probe'"),
        ("split=32", "split at 32"),
        ("fill=swift", "fill 'swift'"),
        ("tail=0", "tail 0"),
    ],
)
def test_the_bad_key_of_the_other_setting_is_named(text: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse_versus(text, LLAMA, paper(20))
