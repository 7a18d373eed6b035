from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgefill.bench.cost import Setting, layer_pass_ceiling, layer_pass_share, macs, macs_ceiling
from ridgefill.bench.count import expected_macs
from ridgefill.bench.shape import ModelShape
from ridgefill.errors import SettingError
from tests.bench.configs import FULL, HYBRID, LLAMA, QWEN, SMOL, TINY, paper
from tests.bench.loop import dense, loop, some_setting, some_shape


def test_a_count_by_hand() -> None:
    # One layer below the split, two above; 3 tokens, tail 1. d = 8, query width 8, key width 4, MLP 12.
    row, key, kv, a_map = 64 + 32 + 32 + 64 + 3 * 96, 2 * 8, 32 + 32, 64
    exact_layer = 3 * row + (1 + 2 + 3) * key
    assert macs(FULL, 3, Setting.exact()) == 3 * exact_layer
    ridge = exact_layer + 2 * (row + 3 * key) + 2 * 2 * (a_map + kv)
    assert macs(FULL, 3, Setting(split=1, tail=1)) == ridge
    assert macs(FULL, 3, Setting(split=1, tail=1, map_at_split=False)) == ridge - 2 * a_map
    assert macs(FULL, 3, Setting(split=1, tail=1, map="none")) == ridge - 4 * a_map
    assert macs(FULL, 3, Setting(split=1, tail=1, fill="identity")) == ridge - 4 * a_map
    assert macs(FULL, 3, Setting(split=1, tail=1, fill="none")) == exact_layer + 2 * (row + key)
    lead = exact_layer + 2 * (2 * row + (1 + 3) * key) + 2 * (a_map + kv)
    assert macs(FULL, 3, Setting(split=1, tail=1, leading=1)) == lead


def test_forms_of_maps_by_hand() -> None:
    # As above; keys and values together are 8 wide, two layers are filled for two rows.
    plain = macs(FULL, 3, Setting(split=1, tail=1))
    direct = macs(FULL, 3, Setting(split=1, tail=1, gives="writes"))
    assert plain - direct == 2 * 2 * (64 + 64 - 64)  # no 8 x 8 map before the 8 x 8 projection
    rich = macs(FULL, 3, Setting(split=1, tail=1, gives="writes", blocks=5, rank=6))
    assert rich - direct == 2 * (5 * 8 * 6) + 2 * 2 * (6 * 8 - 64)  # reduced once, then six columns a layer
    assert macs(FULL, 3, Setting(split=1, tail=1, blocks=3)) - plain == 2 * 2 * 2 * 64


@pytest.mark.parametrize("fill", ["ridge", "identity", "none", "exact"])
@pytest.mark.parametrize("shape", [FULL, TINY])
@pytest.mark.parametrize("rows", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("leading", [0, 4])
def test_the_closed_form_equals_the_loop(fill: str, shape: ModelShape, rows: float, leading: int) -> None:
    for split in range(1, shape.layers):
        for n in (1, 3, 4, 7, 8, 16):
            setting = Setting(split=split, tail=3, rows=rows, leading=leading, fill=fill)
            assert macs(shape, n, setting) == loop(shape, n, setting)


def test_the_closed_form_equals_the_loop_on_random_settings() -> None:
    rng = random.Random(0)
    for _ in range(500):
        shape, n = some_shape(rng), rng.randint(1, 24)
        setting = some_setting(rng, shape, 20)
        assert expected_macs(shape, n, setting) == loop(shape, n, setting), (shape, n, setting)


def test_a_share_that_leaves_a_part_is_rounded() -> None:
    setting = Setting(split=1, tail=2, rows=0.37, leading=1, fill="none")
    whole = loop(TINY, 15, setting)
    assert whole.denominator > 1
    assert macs(TINY, 15, setting) == round(whole)


@pytest.mark.parametrize("fill", ["ridge", "none"])
def test_the_expected_count_is_close_to_that_of_evenly_scattered_rows(fill: str) -> None:
    shape, n, tail = dense(8, 2, 2, 1, 4, 12, (None, 40)), 400, 40
    layer, key = shape.costs[0], 2 * 2 * 4
    exact = set(range(3, n - tail, 4)) | set(range(n - tail, n))
    counted = n * layer.row + key * n * (n + 1) // 2
    for i in range(n):
        reach = range(max(0, i - 39), i + 1)
        seen = len(reach) if fill == "ridge" else sum(j in exact for j in reach)
        counted += layer.row + key * seen if i in exact else (fill == "ridge") * (layer.filled + shape.map)
    assert macs(shape, n, Setting(split=1, tail=tail, rows=0.25, fill=fill)) == pytest.approx(
        counted, rel=0.01
    )


def test_a_prompt_within_the_tail_and_all_rows_exact_cost_what_exact_costs() -> None:
    for n in (1, 9, 10):
        assert macs(TINY, n, Setting(split=1, tail=10, fill="none")) == macs(TINY, n, Setting.exact())
    assert macs(TINY, 11, Setting(split=1, tail=10)) != macs(TINY, 11, Setting.exact())
    for every in (Setting(split=1, tail=2, rows=1.0), Setting(split=1, tail=2, leading=99)):
        assert macs(TINY, 50, every) == macs(TINY, 50, Setting.exact())


def test_a_count_of_rows_is_the_share_that_it_makes() -> None:
    for n in (40, 51, 90):
        as_count, as_share = Setting(split=1, tail=10, rows=15), Setting(split=1, tail=10, rows=15 / (n - 10))
        assert macs(FULL, n, as_count) == pytest.approx(macs(FULL, n, as_share), abs=1)
    assert macs(FULL, 20, Setting(split=1, tail=10, rows=10)) == macs(FULL, 20, Setting.exact())
    assert macs(FULL, 20, Setting(split=1, tail=10, rows=99)) == macs(FULL, 20, Setting.exact())
    assert macs(FULL, 20, Setting(split=1, tail=10, rows=0)) == macs(FULL, 20, Setting(split=1, tail=10))
    assert macs(FULL, 20, Setting(split=1, tail=10, rows=9)) != macs(FULL, 20, Setting.exact())


def test_the_probe_by_hand() -> None:
    # 10 tokens, tail 4: the last 2 rows run two late layers over 6 filled rows and one another.
    row, key = FULL.costs[0].row, 2 * 8
    plain = Setting(split=1, tail=4)
    assert macs(FULL, 10, replace(plain, probe=2)) - macs(FULL, 10, plain) == 2 * (2 * row + (7 + 8) * key)
    # With exact rows the first sweep has filled them as well.
    some = replace(plain, rows=3)
    twice = 2 * 3 * (FULL.map + 2 * 8 * 4)
    assert macs(FULL, 10, replace(some, probe=2)) - macs(FULL, 10, some) == 2 * (2 * row + 15 * key) + twice


def test_scores_by_hand() -> None:
    # The last 2 of 10 rows score 9 and 10 keys in the layers below the split: one product per query width.
    plain = Setting(split=2, tail=4)
    both = macs(FULL, 10, replace(plain, score_rows=2)) - macs(FULL, 10, plain)
    assert both == 2 * (9 + 10) * 8
    assert macs(FULL, 10, replace(plain, score_rows=2, score_layers=1)) - macs(FULL, 10, plain) == both // 2


def test_rescales_by_hand() -> None:
    # Two late layers: a map and the value projection for each of 3 tail rows; keys of the same rows share the map.
    plain, projection = Setting(split=1, tail=4), 8 * 4
    base = macs(FULL, 10, plain)
    assert macs(FULL, 10, replace(plain, value_rescale=3)) - base == 2 * 3 * (FULL.map + projection)
    assert macs(FULL, 10, replace(plain, key_rescale=3)) - base == 2 * 3 * (FULL.map + projection)
    both = replace(plain, value_rescale=3, key_rescale=2)
    assert macs(FULL, 10, both) - base == 2 * (3 * FULL.map + 5 * projection)
    assert macs(FULL, 10, replace(plain, value_rescale=99)) == macs(FULL, 10, replace(plain, value_rescale=4))
    known = replace(plain, map_at_split=False)  # layer S's input needs no prediction
    assert macs(FULL, 10, replace(known, value_rescale=3)) - macs(FULL, 10, known) == 3 * (
        FULL.map + projection
    )


def test_a_prompt_within_the_tail_pays_for_no_selection() -> None:
    setting = Setting(split=1, tail=10, probe=4, score_rows=4, value_rescale=4, rows=3)
    assert macs(TINY, 10, setting) == macs(TINY, 10, Setting.exact())


def test_long_prompts_are_exact_integers() -> None:
    n, layer = 10**6, LLAMA.layers
    row = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert macs(LLAMA, n, Setting.exact()) == layer * (n * row + 2 * 4096 * (n * (n + 1) // 2))
    plain = Setting(split=16, probe=256, rows=300, score_rows=64)
    assert macs(LLAMA, n, plain) == pytest.approx(macs(LLAMA, n, Setting(split=16)), rel=1e-2)


def test_a_depth_is_floor_of_depth_times_layers() -> None:
    assert macs(QWEN, 9000, paper(13)) == macs(QWEN, 9000, Setting(split=0.375, tail=4096))


def test_splits_and_lengths_out_of_range_are_named() -> None:
    for split in (32, 33, 0.01):
        with pytest.raises(SettingError, match="split"):
            macs(LLAMA, 10, paper(split))
    for n in (0, -1, 1.5):
        with pytest.raises(SettingError, match="length"):
            macs(LLAMA, n, Setting.exact())  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="length"):
            layer_pass_share(n, 16, 4096, 32)  # type: ignore[arg-type]


# The published figures (FORMULAS.md, "2.5 Compute")


@pytest.mark.parametrize(("n", "ceiling"), [(9216, 1.64), (16384, 1.78), (32768, 1.88)])
def test_published_layer_pass_ceilings(n: int, ceiling: float) -> None:
    assert round(layer_pass_ceiling(n, 24, 2048, 48), 2) == ceiling
    assert layer_pass_share(n, 0.5, 2048, 48) == pytest.approx(1 / layer_pass_ceiling(n, 24, 2048, 48))


def test_layer_passes_of_a_prompt_within_the_tail() -> None:
    assert layer_pass_share(100, 24, 2048, 48) == 1.0
    assert layer_pass_share(2048, 24, 2048, 48) == 1.0


@pytest.mark.parametrize(
    ("split", "n", "ratio"), [(13, 32768, 1 - 0.24), (22, 32768, 1.04), (22, 65536, 0.99)]
)
def test_published_ratios_to_pop(split: int, n: int, ratio: float) -> None:
    assert round(macs(QWEN, n, paper(split)) / macs(QWEN, n, Setting.pop(36)), 2) == pytest.approx(ratio)


@pytest.mark.parametrize(("n", "filled", "skipped"), [(16384, 0.54, 0.30), (120_000, 0.67, 0.42)])
def test_the_published_shares_of_the_27b(n: int, filled: float, skipped: float) -> None:
    """4.2: 54 % (67 %) of the tokens filled, and 30 % (42 %) of the multiply-accumulates skipped.

    Not to the last digit: the widths are those of the same size one generation before, and the paper does not say
    whether its count applies the maps of the Gated DeltaNet layers to rows that the second sweep runs exactly. That
    alone would take the count from 31.3 and 42.9 to 30.6 and 42.2.
    """
    rows = round(n - 4096 - filled * n)
    assert 0.275 < rows / (n - 4096) < 0.315  # "28 to 31 % of the prefix"
    ours = Setting(split=16, tail=4096, rows=rows, probe=256, value_rescale=512)
    found = 1 - 1 / macs_ceiling(HYBRID, n, ours)
    assert skipped <= found < skipped + 0.015
    maps = rows * 36 * HYBRID.map / macs(HYBRID, n, Setting.exact())
    assert found - maps == pytest.approx(skipped, abs=0.0065)


def test_ceilings_of_the_default_model() -> None:
    half = Setting(split=15, tail=1024)
    assert macs_ceiling(SMOL, 8192, half) == pytest.approx(1.605, abs=0.001)
    assert macs_ceiling(SMOL, 8192, Setting(split=15, tail=1024, map="none")) == pytest.approx(
        1.652, abs=0.001
    )
    assert macs_ceiling(SMOL, 8192, Setting(split=8, tail=1024, map="none")) == pytest.approx(
        2.373, abs=0.001
    )
