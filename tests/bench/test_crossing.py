from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgefill.bench.cost import Setting, crossing_tokens, macs
from ridgefill.bench.count import expected_macs
from ridgefill.bench.crossing import _denominator, _power, bending_lengths
from ridgefill.bench.shape import ModelShape
from ridgefill.errors import SettingError
from tests.bench.configs import LLAMA, QWEN, paper
from tests.bench.loop import dense, some_setting, some_shape


def test_the_crossing_equals_a_scan_of_every_length() -> None:
    rng, found, turns = random.Random(1), [], []
    for _ in range(300):
        shape = some_shape(rng, thin=True)  # a map may cost more than an exact row: the sign turns often
        limit = rng.choice([1, 2, 30, 80])
        ours, versus = (some_setting(rng, shape, 40) for _ in range(2))
        if rng.random() < 0.7:  # a lower split with maps and a longer tail, as against POP
            ours = replace(ours, fill="ridge", split=1, score_rows=0)
            versus = replace(
                versus, fill="identity", split=shape.layers - 1, tail=rng.randint(1, 3), score_rows=0
            )
        above = [expected_macs(shape, n, ours) > expected_macs(shape, n, versus) for n in range(1, limit + 1)]
        last = max((n for n, more in enumerate(above, 1) if more), default=0)
        expected = last + 1 if last < limit else None
        assert crossing_tokens(shape, ours, versus, limit) == expected, (shape, limit, ours, versus)
        found.append(expected)
        turns.append(sum(a != b for a, b in pairwise(above)))
    # The scan met every kind of answer, and differences that change sign more than once.
    assert min(found.count(None), found.count(1), sum((at or 0) > 1 for at in found)) > 10
    assert sum(count > 1 for count in turns) > 5


def test_a_loss_between_two_lengths_that_do_not_lose_is_found() -> None:
    # Equal at the tail of 2, dearer after it by maps larger than the layer they save, cheaper in the end.
    shape = dense(16, 3, 1, 1, 1, 1)
    ours, versus = Setting(split=1, tail=2), Setting(split=2, tail=2, fill="identity")
    above = [n for n in range(1, 601) if macs(shape, n, ours) > macs(shape, n, versus)]
    assert (above[0], above[-1] < 600) == (3, True)
    assert crossing_tokens(shape, ours, versus, limit=600) == above[-1] + 1


def test_the_count_is_quadratic_between_the_lengths_that_the_crossing_stops_at() -> None:
    rng = random.Random(2)
    for _ in range(100):
        shape = some_shape(rng)
        setting = some_setting(rng, shape, 20, counts=False)
        counts = [expected_macs(shape, n, setting) for n in range(1, 50)]
        for n, (a, b, c, d) in enumerate(zip(counts, counts[1:], counts[2:], counts[3:], strict=False), 1):
            if not {n + 1, n + 2} & bending_lengths(shape, setting):
                assert d - 3 * c + 3 * b - a == 0, (shape, setting, n)


def test_with_a_count_of_rows_it_is_a_polynomial_over_the_rows_they_are_scattered_on() -> None:
    rng, met = random.Random(3), 0
    for _ in range(200):
        shape = some_shape(rng)
        setting = some_setting(rng, shape, 20)
        if setting.fill == "exact" or not isinstance(setting.rows, int):
            continue
        power = _power(setting)
        counts = [expected_macs(shape, n, setting) * _denominator(n, setting) for n in range(1, 60)]
        for n in range(1, 60 - 3 - power):
            if not set(range(n + 1, n + 3 + power)) & bending_lengths(shape, setting):
                differences = counts[n - 1 : n + 3 + power]
                for _ in range(3 + power):
                    differences = [b - a for a, b in pairwise(differences)]
                assert differences == [0], (shape, setting, n)
                met += 1
    assert met > 300


def test_a_setting_that_never_loses_crosses_at_one() -> None:
    assert crossing_tokens(LLAMA, paper(16), Setting.exact()) == 1
    assert crossing_tokens(LLAMA, paper(16), paper(16)) == 1
    assert crossing_tokens(LLAMA, Setting.exact(), paper(16)) is None


def test_the_crossing_does_not_walk_through_the_lengths() -> None:
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=1 << 60) == 14334
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=14334) == 14334
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=14333) is None


@pytest.mark.parametrize(
    ("shape", "split", "pop_split", "thousands"),
    [(LLAMA, 16, 22, 14), (LLAMA, 20, 22, 46), (QWEN, 13, 24, 10.6), (QWEN, 22, 24, 59)],
)
def test_published_crossings_with_pop(
    shape: ModelShape, split: int, pop_split: int, thousands: float
) -> None:
    ours, pop = paper(split), Setting.pop(shape.layers)
    assert (pop.split, pop.tail, pop.fill, pop.leading) == (pop_split, 1, "identity", 0)
    at = crossing_tokens(shape, ours, pop)
    assert at is not None
    assert round(at / 1000, 1 if thousands % 1 else None) == thousands
    assert macs(shape, at, ours) <= macs(shape, at, pop)
    assert macs(shape, at - 1, ours) > macs(shape, at - 1, pop)


def test_the_published_figures_charge_a_map_in_the_split_layer_too() -> None:
    without = [
        crossing_tokens(shape, paper(split, map_at_split=False), Setting.pop(shape.layers))
        for shape, split in ((LLAMA, 20), (QWEN, 13), (QWEN, 22))
    ]
    assert without == [44438, 10493, 57442]  # published: 46K, 10.6K, 59K


def test_what_cannot_be_crossed_is_named() -> None:
    for split in (32, 33, 0.01):
        with pytest.raises(SettingError, match="split"):
            crossing_tokens(LLAMA, Setting.exact(), paper(split))
    with pytest.raises(SettingError, match="limit"):
        crossing_tokens(LLAMA, paper(16), Setting.exact(), limit=0)
