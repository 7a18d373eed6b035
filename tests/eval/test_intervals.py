from __future__ import annotations

import json
from statistics import NormalDist

import numpy as np
import pytest

from ridgefill.errors import SettingError
from ridgefill.eval.intervals import (
    binomial_floor,
    interval,
    non_inferiority,
    paired_difference,
    share_closed,
    sign_test,
)

NORMAL = NormalDist()


TRUE = 0.06  # mean added loss of `skewed`


def skewed(rng, n, shape):
    """Two arms' losses on n documents of two domains: correlated, their difference skewed by 2 / sqrt(shape)."""
    base = rng.normal(2.0, 0.5, n)
    strata = ["code"] * (n // 3) + ["prose"] * (n - n // 3)
    added = rng.gamma(shape, np.where(np.array(strata) == "code", 0.14, 0.02) / shape)
    return base + added, base, strata


def covered(trials, resamples, n, shape):
    """Share of trials whose 95 % interval holds the true mean difference."""
    hits = 0
    for trial in range(trials):
        treated, base, strata = skewed(np.random.default_rng(trial), n, shape)
        found = paired_difference(treated, base, strata, resamples=resamples, seed=trial + 1_000_000)
        hits += found.low <= TRUE <= found.high
    return hits / trials


def efron(groups, resamples=40_000, level=0.95):
    """BCa by the formulas of Efron (1987) for a stratified mean, written apart from scipy."""
    rng = np.random.default_rng(99)
    n = sum(map(len, groups))
    share = [len(g) / n for g in groups]
    mean = sum(w * g.mean() for w, g in zip(share, groups, strict=True))
    drawn = sum(w * rng.choice(g, (resamples, len(g))).mean(1) for w, g in zip(share, groups, strict=True))
    z0 = NORMAL.inv_cdf(((drawn < mean).mean() + (drawn <= mean).mean()) / 2)
    influence = np.concatenate([g - g.mean() for g in groups])  # w_j (x - mean_j) / n_j, up to 1/n
    a = (influence**3).sum() / (6 * (influence**2).sum() ** 1.5)
    ends = []
    for z in (NORMAL.inv_cdf((1 - level) / 2), NORMAL.inv_cdf((1 + level) / 2)):
        ends.append(np.quantile(drawn, NORMAL.cdf(z0 + (z0 + z) / (1 - a * (z0 + z)))))
    return ends, drawn.std()


@pytest.mark.parametrize("sizes", [[30], [12, 40, 7]])
def test_bca_is_efrons_formula_within_strata(sizes):
    rng = np.random.default_rng(5)
    groups = [rng.exponential(1 + 3 * i, size) + 5 * i for i, size in enumerate(sizes)]
    names = [f"s{i}" for i, size in enumerate(sizes) for _ in range(size)]
    found = interval(np.concatenate(groups), names, resamples=40_000)
    (low, high), sd = efron(groups)
    assert found.low == pytest.approx(low, abs=0.06 * sd)
    assert found.high == pytest.approx(high, abs=0.06 * sd)
    plain = interval(np.concatenate(groups), names, resamples=40_000, method="percentile")
    assert found.high - plain.high > 0.1 * sd  # so that the two methods are told apart


def test_resampling_stays_within_the_strata():
    # Two strata far apart, each almost constant: only their mix, which stays, could move the mean.
    values = [0.0, 0.01] * 10 + [10.0, 10.01] * 10
    within = interval(values, ["a"] * 20 + ["b"] * 20)
    across = interval(values)
    assert within.high - within.low < 0.005 < 1 < across.high - across.low


def test_items_weigh_the_same_unless_strata_shall():
    values, strata = [1.0, 1.2, 0.8, 1.0, 5.0, 5.2], ["a"] * 4 + ["b"] * 2
    assert interval(values, strata).mean == pytest.approx(14.2 / 6)
    equal = interval(values, strata, equal_strata=True)
    assert equal.mean == pytest.approx((1.0 + 5.1) / 2) and equal.low < equal.mean < equal.high
    assert "strata weighted equally" in equal.method
    assert interval(values, strata).median == 1.1


def test_a_paired_difference_is_that_of_the_pairs():
    rng = np.random.default_rng(1)
    base = rng.normal(0, 100, 50)  # spread that pairing takes away
    found = paired_difference(base + 1 + rng.normal(0, 0.01, 50), base)
    assert found.low < 1 < found.high and found.high - found.low < 0.02
    assert found.n == 50 and found.method == "BCa, stratified, 5000 resamples" and found.level == 0.95


def test_one_sided_bounds():
    values = np.random.default_rng(2).exponential(size=60)
    both = interval(values, level=0.9)
    lower, upper = interval(values, side="lower"), interval(values, side="upper")
    assert lower.high is None and lower.low == pytest.approx(both.low)
    assert upper.low is None and upper.high == pytest.approx(both.high)
    assert "one-sided" in lower.method and interval(values).low < lower.low < upper.high


def test_same_seed_same_interval_and_another_seed_another():
    values = np.random.default_rng(3).normal(size=30)
    assert interval(values, seed=4) == interval(values, seed=4)
    assert interval(values, seed=4).low != interval(values, seed=5).low


def test_a_stratum_of_one_item_is_kept_fixed_and_said():
    found = interval([0.0, 1.0, 0.0, 1.0, 50.0], ["a"] * 4 + ["b"])
    assert found.mean == pytest.approx(52 / 5)
    assert 10 - 1e-9 < found.low < found.high < 54 / 5 + 1e-9 and found.low < found.high
    assert "1 stratum of one item kept fixed" in found.method


def test_no_interval_from_strata_of_one_item_alone():
    for values, strata, why in (([0.5], None, "there is one item"), ([1, 2], ["a", "b"], "every stratum")):
        found = interval(values, strata)
        assert (found.low, found.high) == (None, None) and why in found.reason
        assert found.mean == np.mean(values)
        json.dumps(found.to_json(), allow_nan=False)


def test_equal_differences_give_both_ends_that_difference():
    same = interval([0.25] * 8, ["a"] * 4 + ["b"] * 4)
    assert (same.low, same.high, same.mean) == (0.25, 0.25, 0.25)
    assert paired_difference([1, 0, 1], [1, 0, 1]).to_json()["high"] == 0
    within = interval([0.1] * 4 + [0.3] * 4, ["a"] * 4 + ["b"] * 4)
    assert (within.low, within.high) == pytest.approx((0.2, 0.2)) and "all equal" in within.method
    rounded = paired_difference([0.7, 0.9, 0.3], [0.2, 0.4, -0.2])  # 0.5 but for the last bit
    assert rounded.low == rounded.high == pytest.approx(0.5)


def test_ties_of_resamples_do_not_hang_on_rounding():
    # Sums of tenths in another order differ in the last bit, which must not count as above or below.
    whole = np.random.default_rng(60).integers(-3, 4, 60).astype(float)
    found, exact = interval(0.1 * whole), interval(whole)
    assert (10 * found.low, 10 * found.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_where_bca_is_undefined_the_percentile_is_taken_and_said():
    found = interval(
        [0.0] * 9 + [1.0], resamples=2, seed=3
    )  # neither resample holds the one item that differs
    assert (found.low, found.high) == (0, 0) and "percentile (BCa is undefined here)" in found.method


@pytest.mark.parametrize(("n", "points"), [(136, 2.18), (138, 2.15), (216, 1.38), (219, 1.36)])
def test_the_binomial_floor_is_the_papers(n, points):
    assert round(binomial_floor(n), 2) == points
    # its meaning: with this failure rate, n items all pass once in twenty times
    assert (1 - binomial_floor(n) / 100) ** n == pytest.approx(0.05)


def test_the_floor_binds_where_both_arms_are_nearly_right():
    # Table 22: +0.2 points on 216 samples, lower bound -1.38 = minus the floor; and 0.0 on 219, -1.36
    better = non_inferiority([1.0] * 216, [1.0] * 215 + [0.5])
    assert round(better.difference, 1) == 0.2 and round(better.lower, 2) == -1.38 and better.holds
    same = non_inferiority([1.0] * 219, [1.0] * 219)
    assert round(same.lower, 2) == -1.36 and same.bound == 0 and same.holds
    # Table 21: 4.6 points better, and still no more than the floor of 136
    far = non_inferiority([1.0] * 136, [1.0] * 130 + [0.0] * 6, margin=3.0)
    assert far.bound > 0 and round(far.lower, 2) == -2.18 and far.holds
    # 3.4: at 138 samples a 2-point test cannot pass
    assert not non_inferiority([1.0] * 138, [1.0] * 138).holds


def test_the_bootstrap_bound_binds_where_an_arm_loses():
    treated = [1.0] * 450 + [0.0] * 50
    found = non_inferiority(treated, [1.0] * 500)
    assert found.lower == found.bound < -10 and not found.holds
    assert non_inferiority(treated, [1.0] * 500, margin=15.0).holds
    assert set(found.to_json()) >= {"margin", "lower", "holds", "floor"}


def test_no_claim_without_a_bound():
    found = non_inferiority([1.0], [1.0], margin=99.0)
    assert found.lower is None and not found.holds


def test_the_sign_test_is_the_papers():
    # 4.8: stock alone right on 48 items, RidgeFill alone on 41: p = 0.525
    found = sign_test([1.0] * 41 + [0.0] * 48 + [1.0] * 414, [0.0] * 41 + [1.0] * 48 + [1.0] * 414)
    assert (found.better, found.worse, found.ties, round(found.p, 3)) == (41, 48, 414, 0.525)
    assert sign_test([0.1 + 0.2, 1.0], [0.3, 1.0]).to_json() == {"better": 0, "worse": 0, "ties": 2, "p": 1.0}


def test_share_closed_is_the_ratio_of_means():
    rng = np.random.default_rng(7)
    exact = rng.normal(2, 0.5, 60)
    added = rng.exponential(0.3, 60)
    found = share_closed(exact + added, exact + 0.4 * added, exact)
    assert found.mean == pytest.approx(0.6) and found.low == pytest.approx(0.6, abs=1e-9)
    noisy = share_closed(exact + added, exact + 0.4 * added + rng.normal(0, 0.05, 60), exact, seed=1)
    assert noisy.low < noisy.mean < noisy.high < 0.8 and noisy.low > 0.4 and noisy.median is None
    heavy = added.copy()
    heavy[0] = 30.0  # means of ratios and ratios of means differ most on a heavy document
    cut = np.where(np.arange(60) == 0, 30.0, 0.0)
    ratio = share_closed(exact + heavy, exact + heavy - cut, exact, method="percentile")
    assert ratio.mean == pytest.approx(30 / heavy.sum())


def test_share_closed_says_where_there_is_nothing_to_close():
    exact = np.arange(20.0)
    noise = np.random.default_rng(8).normal(0, 1, 20)
    unclear = share_closed(exact + noise, exact, exact)
    assert unclear.low is None and "too small" in unclear.reason
    none = share_closed(exact, exact + 1, exact)
    assert none.mean is None and "do not differ" in none.reason
    single = share_closed([2.0], [1.5], [1.0])
    assert single.mean == 0.5 and single.low is None and single.reason == "there is one item"


@pytest.mark.parametrize(
    ("values", "options", "named"),
    [
        ([], {}, "no values"),
        ([1.0, float("nan")], {}, "not finite"),
        ([1.0, 2.0], {"strata": ["a"]}, "1 strata"),
        ([1.0, 2.0], {"method": "magic"}, "magic"),
        ([1.0, 2.0], {"resamples": 0}, "0 resamples"),
        ([1.0, 2.0], {"level": 95}, "level 95"),
        ([1.0, 2.0], {"side": "left"}, "left"),
    ],
)
def test_refusals_are_named(values, options, named):
    with pytest.raises(SettingError, match=named):
        interval(values, **options)


def test_unpaired_items_a_bad_margin_and_no_items_are_refused():
    with pytest.raises(SettingError, match="2 items with 3"):
        paired_difference([1, 2], [1, 2, 3])
    with pytest.raises(SettingError, match="margin"):
        non_inferiority([1, 1], [1, 1], margin=0)
    with pytest.raises(SettingError, match="0 items"):
        binomial_floor(0)


def test_coverage_is_near_95_percent_small():
    assert 0.90 <= covered(trials=200, resamples=400, n=126, shape=2) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("n", "shape"), [(126, 2), (300, 1)])
def test_coverage_is_near_95_percent(n, shape):
    assert 0.92 <= covered(trials=2000, resamples=2000, n=n, shape=shape) <= 0.97
