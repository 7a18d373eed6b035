from __future__ import annotations

import json
import math
import random

import pytest

from ridgefill.errors import SettingError
from ridgefill.eval.intervals import non_inferiority, paired_difference
from ridgefill.eval.results import Run
from ridgefill.eval.summary import summarise

ABOUT = {"kind": "loss", "baseline": "exact", "arms": {"exact": {}, "ridge": {}, "none": {}}}
RULER = ABOUT | {"kind": "ruler"}
QUICK = {"resamples": 300}


def line(arm, item, stratum, filled=None, **metrics):
    facts = {} if filled is None else {"filled": filled}
    return {"arm": arm, "item": item, "stratum": stratum, "metrics": metrics, **facts}


def row(summary, arm, metric, stratum="all"):
    found = [r for r in summary["rows"] if (r["arm"], r["metric"], r["stratum"]) == (arm, metric, stratum)]
    assert len(found) <= 1
    return found[0] if found else None


def losses(seed=0):
    """6 documents of code and 2 of prose, the ridge arm worse by 0.1 to 0.5 on code and by 0.05 on prose."""
    rng = random.Random(seed)
    lines = []
    for i in range(8):
        stratum, exact = ("code" if i < 6 else "prose"), rng.uniform(1, 3)
        added = rng.uniform(0.1, 0.5) if i < 6 else 0.05 + 0.01 * (i - 6)
        lines += [
            line("exact", f"d{i}", stratum, nll=exact, kl=0.0),
            line("ridge", f"d{i}", stratum, nll=exact + added, kl=added / 2),
        ]
    return lines


def pairs(lines, metric="nll"):
    """treated, base and strata by item, read from the lines apart from the code under test."""
    of = {(x["arm"], x["item"]): x for x in lines}
    items = sorted({x["item"] for x in lines})
    return (
        [of["ridge", i]["metrics"][metric] for i in items],
        [of["exact", i]["metrics"][metric] for i in items],
        [of["exact", i]["stratum"] for i in items],
    )


def test_means_medians_and_the_paired_difference_of_every_stratum():
    lines = losses()
    found = summarise(ABOUT, lines, **QUICK)
    treated, base, strata = pairs(lines)
    whole = row(found, "ridge", "nll")
    assert whole["n"] == 8 and whole["mean"] == pytest.approx(sum(treated) / 8)
    assert whole["median"] == pytest.approx((sorted(treated)[3] + sorted(treated)[4]) / 2)
    wanted = paired_difference(treated, base, strata, **QUICK).to_json()
    assert whole["difference"] == {k: v for k, v in wanted.items() if k != "n"}
    assert whole["difference"]["method"] == "BCa, stratified, 300 resamples"
    assert set(whole["difference"]) == {"mean", "median", "low", "high", "level", "method"}
    code = row(found, "ridge", "nll", "code")
    assert code["n"] == 6
    assert code["difference"]["mean"] == pytest.approx((sum(treated[:6]) - sum(base[:6])) / 6)
    assert (found["kind"], found["baseline"]) == ("loss", "exact") and "n_paired" not in whole


def test_the_baseline_has_means_and_nothing_to_differ_from():
    found = summarise(ABOUT, losses(), **QUICK)
    exact = row(found, "exact", "nll")
    assert exact["n"] == 8 and exact["difference"] is exact["noninferiority"] is exact["sign_test"] is None
    assert row(found, "exact", "perplexity_gap") is None
    assert row(found, "none", "nll") is None  # an arm that has not run yet


def test_losses_have_no_margin_in_points():
    found = summarise(ABOUT, losses(), **QUICK)
    assert all(r["noninferiority"] is None and r["sign_test"] is None for r in found["rows"])


def test_the_perplexity_gap_averages_within_strata_and_then_across():
    lines = losses()
    treated, base, _ = pairs(lines)
    gaps = [math.exp(t - b) - 1 for t, b in zip(treated, base, strict=True)]
    found = summarise(ABOUT, lines, **QUICK)
    whole = row(found, "ridge", "perplexity_gap")
    assert whole["mean"] == pytest.approx((sum(gaps[:6]) / 6 + sum(gaps[6:]) / 2) / 2)
    assert abs(whole["mean"] - sum(gaps) / 8) > 0.02  # so that the two means are told apart
    assert whole["difference"]["low"] < whole["mean"] < whole["difference"]["high"]
    assert "strata weighted equally" in whole["difference"]["method"]
    assert row(found, "ridge", "perplexity_gap", "prose")["mean"] == pytest.approx(sum(gaps[6:]) / 2)


def test_an_absurd_loss_still_gives_strict_json():
    lines = [line("exact", "a", "x", nll=1.0), line("ridge", "a", "x", nll=5000.0)]
    lines += [line("exact", "b", "x", nll=1.0), line("ridge", "b", "x", nll=1.0)]
    json.dumps(summarise(ABOUT, lines, **QUICK), allow_nan=False)


def test_only_items_of_both_arms_are_compared():
    lines = losses()
    lines = [x for x in lines if (x["arm"], x["item"]) not in {("exact", "d0"), ("ridge", "d1")}]
    whole = row(summarise(ABOUT, lines, **QUICK), "ridge", "nll")
    treated, base, _ = pairs(losses())
    assert (whole["n"], whole["n_paired"]) == (7, 6)
    assert whole["difference"]["mean"] == pytest.approx((sum(treated[2:]) - sum(base[2:])) / 6)
    alone = row(summarise(ABOUT, [x for x in losses() if x["arm"] == "ridge"], **QUICK), "ridge", "nll")
    assert alone["n"] == 8 and alone["n_paired"] == 0 and alone["difference"] is None


def test_a_metric_that_some_items_lack_counts_the_others():
    lines = losses()
    for x in lines[:4]:  # both arms of d0 and d1
        x["metrics"]["key_nll"] = x["metrics"]["nll"] + 1
    found = summarise(ABOUT, lines, **QUICK)
    key = row(found, "ridge", "key_nll")
    assert key["n"] == 2 and row(found, "ridge", "key_nll", "prose") is None


def scores():
    """20 samples of two tasks; ridge misses 3 that exact has, has 1 that exact misses; 12 are filled."""
    lines = []
    for i in range(20):
        exact, ridge = (0.0 if i == 19 else 1.0), (0.0 if i in (0, 1, 12) else 1.0)
        for arm, score in (("exact", exact), ("ridge", ridge)):
            lines.append(line(arm, f"s{i:02}", "single" if i < 10 else "multi", filled=i < 12, score=score))
    return lines


def test_scores_have_a_margin_in_points_and_a_sign_test():
    found = row(summarise(RULER, scores(), margin=3.0, **QUICK), "ridge", "score")
    assert found["difference"]["mean"] == pytest.approx(-0.1)
    assert found["sign_test"] == {"better": 1, "worse": 3, "ties": 16, "p": pytest.approx(0.625)}
    treated, base, strata = pairs(scores(), "score")
    wanted = non_inferiority(treated, base, strata, margin=3.0, **QUICK).to_json()
    assert found["noninferiority"] == wanted
    assert wanted["margin"] == 3.0 and wanted["lower"] < -10 and not wanted["holds"]
    assert row(summarise(RULER, scores(), margin=None, **QUICK), "ridge", "score")["noninferiority"] is None


def test_the_filled_samples_are_summarised_apart():
    found = summarise(RULER, scores(), **QUICK)
    filled = row(found, "ridge", "score_filled")
    assert filled["n"] == 12 and filled["mean"] == pytest.approx(10 / 12)
    assert filled["sign_test"]["worse"] == 2 and filled["noninferiority"]["floor"] > 20
    assert row(found, "ridge", "score_filled", "multi")["n"] == 2
    assert row(found, "exact", "score_filled")["mean"] == 1.0


def test_one_item_has_a_difference_and_says_why_no_interval():
    lines = [line("exact", "a", "x", score=1.0), line("ridge", "a", "x", score=0.0)]
    found = row(summarise(RULER, lines, **QUICK), "ridge", "score")
    assert found["difference"]["mean"] == -1 and found["difference"]["low"] is None
    assert found["difference"]["reason"] == "there is one item" and found["noninferiority"] is None


def test_the_order_of_lines_does_not_matter_and_all_is_strict_json():
    lines = losses() + [line("none", f"d{i}", "code", nll=4.0 + i) for i in range(6)]
    shuffled = random.Random(3).sample(lines, len(lines))
    one, other = (json.dumps(summarise(ABOUT, x, **QUICK), allow_nan=False) for x in (lines, shuffled))
    assert one == other
    assert one != json.dumps(summarise(ABOUT, lines, seed=1, **QUICK))
    names = list(dict.fromkeys(r["arm"] for r in json.loads(one)["rows"]))
    assert names == ["exact", "ridge", "none"]


def test_the_percentile_where_the_paper_used_it():
    found = summarise(RULER, scores(), method="percentile", resamples=10_000)
    assert row(found, "ridge", "score")["difference"]["method"] == "percentile, stratified, 10000 resamples"


def test_an_item_twice_is_refused_by_name():
    with pytest.raises(SettingError, match="item d0 of arm 'exact' stands there twice"):
        summarise(ABOUT, losses() + losses()[:1])


def test_a_run_without_items_has_no_rows():
    assert summarise(ABOUT, [])["rows"] == []


def test_a_run_writes_it(tmp_path):
    run = Run.open(tmp_path, "loss", {}, {k: v for k, v in ABOUT.items() if k != "kind"})
    for x in losses():
        run.add(x["arm"], x["item"], x["stratum"], x["metrics"])
    found = run.finish(**QUICK)
    assert json.loads((tmp_path / "summary.json").read_text()) == found == summarise(ABOUT, losses(), **QUICK)
