"""A run's folder: resumed, refused where it is another run, whole after a kill."""

from __future__ import annotations

import json

import pytest

from ridgefill.errors import OutputError, SettingError
from ridgefill.eval.results import ITEMS, RUN, Run, read

ABOUT = {
    "arms": {"exact": {"words": "exact"}, "ridge": {"words": "ridge"}},
    "baseline": "exact",
    "model": "m",
}


def opened(folder, kind="loss", settings=None, **about):
    return Run.open(folder, kind, settings or {"tail": 8}, ABOUT | about)


def test_items_come_back_and_are_not_run_again(tmp_path):
    run = opened(tmp_path)
    run.add("ridge", "a", "prose", {"nll": 1.5}, tokens=9)
    again = opened(tmp_path)
    assert again.done("ridge", "a") and not again.done("exact", "a")
    assert again.lines == [
        {"arm": "ridge", "item": "a", "stratum": "prose", "metrics": {"nll": 1.5}, "tokens": 9}
    ]


def test_a_torn_last_line_is_cut_off_and_run_again(tmp_path):
    run = opened(tmp_path)
    run.add("ridge", "a", "prose", {"nll": 1.5})
    with (tmp_path / ITEMS).open("a") as file:
        file.write('{"arm": "ridge", "item": "b", "metr')
    again = opened(tmp_path)
    assert again.done("ridge", "a") and not again.done("ridge", "b")
    again.add("ridge", "b", "prose", {"nll": 2.0})
    assert [line["item"] for line in read(tmp_path)[1]] == ["a", "b"]


def test_a_line_without_its_end_counts_as_torn(tmp_path):
    run = opened(tmp_path)
    run.add("ridge", "a", "prose", {"nll": 1.5})
    text = (tmp_path / ITEMS).read_text()
    (tmp_path / ITEMS).write_text(text + text.replace('"a"', '"b"').rstrip("\n"))
    assert not opened(tmp_path).done("ridge", "b")


def test_a_broken_line_in_the_middle_is_refused_and_nothing_is_lost(tmp_path):
    run = opened(tmp_path)
    run.add("ridge", "a", "prose", {"nll": 1.5})
    kept = "not json\n" + (tmp_path / ITEMS).read_text()
    (tmp_path / ITEMS).write_text(kept)
    with pytest.raises(OutputError, match="middle"):
        opened(tmp_path)
    assert (tmp_path / ITEMS).read_text() == kept


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "ruler"}, "kind"),
        ({"settings": {"tail": 9}}, "tail was 8, now 9"),
        ({"model": "other"}, "model was 'm'"),
        ({"tokenizer": "ff"}, "tokenizer"),
        ({"ledger": "ab"}, "ledger"),
        ({"arms": {"ridge": {"words": "ridge tail=9"}}}, "ridge"),
    ],
)
def test_another_run_is_refused_by_what_differs(tmp_path, change, named):
    opened(tmp_path)
    before = (tmp_path / RUN).read_text()
    with pytest.raises(SettingError, match="another run") as refusal:
        opened(tmp_path, **change)
    assert named in str(refusal.value)
    assert (tmp_path / RUN).read_text() == before


def test_arms_can_be_added(tmp_path):
    opened(tmp_path).add("ridge", "a", "prose", {"nll": 1.5})
    more = opened(tmp_path, arms={"exact": {"words": "exact"}, "none": {"words": "none"}})
    assert set(more.about["arms"]) == {"exact", "ridge", "none"} and more.done("ridge", "a")


def test_what_is_no_number_is_refused_and_not_written(tmp_path):
    run = opened(tmp_path)
    with pytest.raises(SettingError, match="key_nll"):
        run.add("ridge", "a", "prose", {"nll": 1.0, "key_nll": float("nan")})
    assert not run.done("ridge", "a") and not (tmp_path / ITEMS).exists()


def test_the_summary_stands_in_the_folder(tmp_path):
    run = opened(tmp_path)
    for item, exact, ridge in (("a", 1.0, 1.25), ("b", 2.0, 2.75)):
        run.add("exact", item, "prose", {"nll": exact})
        run.add("ridge", item, "prose", {"nll": ridge})
    found = run.finish()
    assert json.loads((tmp_path / "summary.json").read_text()) == found == read(tmp_path)[2]
    row = next(r for r in found["rows"] if (r["arm"], r["metric"], r["stratum"]) == ("ridge", "nll", "all"))
    assert row["difference"]["mean"] == 0.5


def test_a_folder_without_a_run_or_of_another_format_is_refused(tmp_path):
    with pytest.raises(SettingError, match=RUN):
        read(tmp_path)
    (tmp_path / RUN).write_text('{"format": 99}')
    with pytest.raises(SettingError, match="99"):
        read(tmp_path)
    with pytest.raises(SettingError, match="99"):
        opened(tmp_path)
