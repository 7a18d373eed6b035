from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from torch import nn
from transformers import AutoConfig

from ridgefill.bench.cost import (
    CostReport,
    ModelShape,
    Setting,
    _bends,
    crossing_tokens,
    layer_pass_ceiling,
    layer_pass_share,
    macs,
    macs_ceiling,
    parse_versus,
    report,
    table,
)
from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.models.decoder import Decoder
from tests.tiny import FAMILIES, tiny_model

# The published config.json files, as they were before head_dim and layer_types were written out.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "vocab_size": 128256,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA, QWEN = ModelShape.from_config(LLAMA_8B), ModelShape.from_config(QWEN3_8B)
SMOL = ModelShape(576, 30, 9, 3, 64, 1536, (None,) * 30)
TINY = ModelShape(8, 4, 2, 1, 4, 12, (None, 3, None, 5))
FULL = ModelShape(8, 3, 2, 1, 4, 12, (None,) * 3)


def paper(split: int, **changes: Any) -> Setting:
    return Setting(split=split, tail=4096, **changes)


def loop(shape: ModelShape, n: int, setting: Setting) -> Fraction:
    """The definition, row by row and key by key."""
    d, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    exact_row = d * width + d * kv_width + d * kv_width + width * d + 3 * d * shape.intermediate
    prefix = n - setting.tail

    def chance(i: int) -> Fraction:
        if setting.fill == "exact" or i >= prefix or i < setting.leading:
            return Fraction(1)
        return Fraction(str(setting.rows))

    total = Fraction(0)
    for layer in range(shape.layers):
        late = setting.fill != "exact" and layer >= setting.split
        for i in range(n):
            reach = [j for j in range(i + 1) if shape.windows[layer] is None or j > i - shape.windows[layer]]
            seen = Fraction(len(reach))
            if late and prefix > 0 and setting.fill == "none":
                seen = 1 + sum((chance(j) for j in reach if j != i), Fraction(0))
            exact = exact_row + 2 * width * seen
            if not late:
                total += exact
                continue
            filled = 0 if setting.fill == "none" else 2 * d * kv_width
            if setting.fill == "ridge" and setting.map == "full":
                filled += d * d if setting.map_at_split or layer > setting.split else 0
            total += chance(i) * exact + (1 - chance(i)) * filled
    return total


def some_setting(rng: random.Random, layers: int, longest: int) -> Setting:
    return Setting(
        split=rng.randint(1, layers - 1),
        tail=rng.randint(1, longest),
        rows=rng.choice([0.0, 0.0, 0.25, 0.5, 1.0]),
        leading=rng.choice([0, 0, 1, 2, 7]),
        fill=rng.choice(["ridge", "ridge", "identity", "none", "exact"]),
        map=rng.choice(["full", "none"]),
        map_at_split=rng.random() < 0.5,
    )


def some_shape(rng: random.Random) -> ModelShape:
    windows = tuple(rng.choice([None, None, 2, 5, 9]) for _ in range(rng.randint(2, 4)))
    return ModelShape(
        4, len(windows), rng.choice([2, 4]), rng.choice([1, 2]), 4, rng.choice([4, 16]), windows
    )


# The count


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
    for _ in range(400):
        shape, n = some_shape(rng), rng.randint(1, 24)
        setting = some_setting(rng, shape.layers, 20)
        assert macs(shape, n, setting) == loop(shape, n, setting), (shape, n, setting)


def test_a_share_that_leaves_a_part_is_rounded() -> None:
    setting = Setting(split=1, tail=2, rows=0.37, leading=1, fill="none")
    whole = loop(TINY, 15, setting)
    assert whole.denominator > 1
    assert macs(TINY, 15, setting) == round(whole)


@pytest.mark.parametrize("fill", ["ridge", "none"])
def test_the_expected_count_is_close_to_that_of_evenly_scattered_rows(fill: str) -> None:
    shape, n, tail = ModelShape(8, 2, 2, 1, 4, 12, (None, 40)), 400, 40
    exact = set(range(3, n - tail, 4)) | set(range(n - tail, n))
    counted = n * shape.row + shape.key * n * (n + 1) // 2
    for i in range(n):
        reach = range(max(0, i - 39), i + 1)
        seen = len(reach) if fill == "ridge" else sum(j in exact for j in reach)
        counted += shape.row + shape.key * seen if i in exact else (fill == "ridge") * (shape.kv + shape.map)
    assert macs(shape, n, Setting(split=1, tail=tail, rows=0.25, fill=fill)) == pytest.approx(
        counted, rel=0.01
    )


def test_a_prompt_within_the_tail_and_all_rows_exact_cost_what_exact_costs() -> None:
    for n in (1, 9, 10):
        assert macs(TINY, n, Setting(split=1, tail=10, fill="none")) == macs(TINY, n, Setting.exact())
    assert macs(TINY, 11, Setting(split=1, tail=10)) != macs(TINY, 11, Setting.exact())
    for every in (Setting(split=1, tail=2, rows=1.0), Setting(split=1, tail=2, leading=99)):
        assert macs(TINY, 50, every) == macs(TINY, 50, Setting.exact())


def test_long_prompts_are_exact_integers() -> None:
    n, layer = 10**6, LLAMA.layers
    row = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert macs(LLAMA, n, Setting.exact()) == layer * (n * row + 2 * 4096 * (n * (n + 1) // 2))


def test_a_depth_is_floor_of_depth_times_layers() -> None:
    assert macs(QWEN, 9000, paper(13)) == macs(QWEN, 9000, Setting(split=0.375, tail=4096))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_is_that_of_the_model_itself(family: str, tmp_path: Any) -> None:
    model = tiny_model(family)
    layers = model.model.layers
    linear = [m for m in layers[0].modules() if isinstance(m, nn.Linear)]
    path = tmp_path / "config.json"
    model.config.to_json_file(path, use_diff=False)
    for config in (model.config, model.config.to_dict(), path, str(tmp_path)):
        shape = ModelShape.from_config(config)
        assert shape.row == sum(m.weight.numel() for m in linear)
        attention = layers[0].self_attn
        assert shape.kv == attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
        assert shape.map == layers[0].input_layernorm.weight.numel() ** 2
        assert shape.windows == tuple(Decoder(model).window(i) for i in range(len(layers)))


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 7}, [7] * 8),
        ("mistral", {"sliding_window": None}, [None] * 8),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 4}, [None] * 8),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 6},
            [None] * 6 + [7] * 2,
        ),
        ("gemma2", {"sliding_window": 7, "head_dim": 4}, [7, None] * 4),
        ("gemma3_text", {"sliding_window": 7, "head_dim": 4}, [7] * 5 + [None] + [7] * 2),
        ("gemma3_text", {"sliding_window": 7, "head_dim": 4, "sliding_window_pattern": 2}, [7, None] * 4),
        ("llama", {"sliding_window": 7}, [None] * 8),
    ],
)
def test_windows_of_configs_that_name_no_layer_types(
    family: str, settings: dict[str, Any], windows: list[int | None]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 4}
    shape = ModelShape.from_config({"model_type": family, "num_key_value_heads": 2, **sizes, **settings})
    assert list(shape.windows) == windows
    assert shape.head_dim == 4


def test_the_published_configs_are_read() -> None:
    assert ModelShape(4096, 32, 32, 8, 128, 14336, (None,) * 32, "llama") == LLAMA
    assert ModelShape(4096, 36, 32, 8, 128, 12288, (None,) * 36, "qwen3") == QWEN


def test_missing_key_value_heads_mean_one_for_each_query_head() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(config).kv_heads == 32


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type"]
)
@pytest.mark.parametrize("how", ["gone", "null"])
def test_a_missing_key_is_named(key: str, how: str) -> None:
    config = dict(LLAMA_8B)
    if how == "gone":
        del config[key]
    else:
        config[key] = None
    with pytest.raises(SettingError, match=key):
        ModelShape.from_config(config)


@pytest.mark.parametrize("value", [0, -3, "4096", 4096.5, True])
@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "head_dim"])
def test_a_senseless_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(SettingError, match=key):
        ModelShape.from_config({**LLAMA_8B, key: value})


def test_other_families_are_refused_by_name() -> None:
    for family in ("mamba", "gemma3", "qwen3_next"):
        with pytest.raises(UnsupportedModelError, match=family):
            ModelShape.from_config({**LLAMA_8B, "model_type": family})
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        ModelShape.from_config({**LLAMA_8B, "model_type": "gemma3_text", "use_bidirectional_attention": True})
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        ModelShape.from_config(AutoConfig.for_model("gpt2"))


def test_layer_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises((SettingError, UnsupportedModelError)):
        ModelShape.from_config({**QWEN3_8B, "layer_types": ["full_attention"] * 3})
    with pytest.raises((SettingError, UnsupportedModelError), match="linear_attention"):
        ModelShape.from_config({**QWEN3_8B, "layer_types": ["linear_attention"] * 36})


def test_unreadable_configs_are_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingError, match=r"none\.json"):
        ModelShape.from_config(tmp_path / "none.json")
    for text in ("{", "[1]", "\x00"):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(SettingError, match=r"config\.json"):
            ModelShape.from_config(path)
    with pytest.raises(SettingError, match="NoneType"):
        ModelShape.from_config(None)


# The published figures (FORMULAS.md, "2.5 Compute")


@pytest.mark.parametrize(("n", "ceiling"), [(9216, 1.64), (16384, 1.78), (32768, 1.88)])
def test_published_layer_pass_ceilings(n: int, ceiling: float) -> None:
    assert round(layer_pass_ceiling(n, 24, 2048, 48), 2) == ceiling
    assert layer_pass_share(n, 0.5, 2048, 48) == pytest.approx(1 / layer_pass_ceiling(n, 24, 2048, 48))


def test_layer_passes_of_a_prompt_within_the_tail() -> None:
    assert layer_pass_share(100, 24, 2048, 48) == 1.0
    assert layer_pass_share(2048, 24, 2048, 48) == 1.0


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


@pytest.mark.parametrize(
    ("split", "n", "ratio"), [(13, 32768, 1 - 0.24), (22, 32768, 1.04), (22, 65536, 0.99)]
)
def test_published_ratios_to_pop(split: int, n: int, ratio: float) -> None:
    assert round(macs(QWEN, n, paper(split)) / macs(QWEN, n, Setting.pop(36)), 2) == pytest.approx(ratio)


def test_the_published_figures_charge_a_map_in_the_split_layer_too() -> None:
    without = [
        crossing_tokens(shape, paper(split, map_at_split=False), Setting.pop(shape.layers))
        for shape, split in ((LLAMA, 20), (QWEN, 13), (QWEN, 22))
    ]
    assert without == [44438, 10493, 57442]  # published: 46K, 10.6K, 59K


def test_ceilings_of_the_default_model() -> None:
    half = Setting(split=15, tail=1024)
    assert macs_ceiling(SMOL, 8192, half) == pytest.approx(1.605, abs=0.001)
    assert macs_ceiling(SMOL, 8192, Setting(split=15, tail=1024, map="none")) == pytest.approx(
        1.652, abs=0.001
    )
    assert macs_ceiling(SMOL, 8192, Setting(split=8, tail=1024, map="none")) == pytest.approx(
        2.373, abs=0.001
    )


# The crossing


def test_the_crossing_equals_a_scan_of_every_length() -> None:
    rng, found, turns = random.Random(1), [], []
    for _ in range(600):
        # With wide layers and a thin MLP a map may cost more than an exact row: the sign turns often.
        shape = replace(some_shape(rng), hidden=rng.choice([4, 16]), intermediate=rng.choice([1, 16]))
        limit = rng.choice([1, 2, 30, 80])
        ours, versus = (some_setting(rng, shape.layers, 40) for _ in range(2))
        if rng.random() < 0.7:  # a lower split with maps and a longer tail, as against POP
            ours = replace(ours, fill="ridge", split=1)
            versus = replace(versus, fill="identity", split=shape.layers - 1, tail=rng.randint(1, 3))
        above = [macs(shape, n, ours) > macs(shape, n, versus) for n in range(1, limit + 1)]
        last = max((n for n, more in enumerate(above, 1) if more), default=0)
        expected = last + 1 if last < limit else None
        assert crossing_tokens(shape, ours, versus, limit) == expected, (shape, limit, ours, versus)
        found.append(expected)
        turns.append(sum(a != b for a, b in pairwise(above)))
    # The scan met every kind of answer, and differences that change sign more than once.
    assert min(found.count(None), found.count(1), sum((at or 0) > 1 for at in found)) > 20
    assert sum(count > 1 for count in turns) > 5


def test_a_loss_between_two_lengths_that_do_not_lose_is_found() -> None:
    # Equal at the tail of 2, dearer after it by maps larger than the layer they save, cheaper in the end.
    shape = ModelShape(16, 3, 1, 1, 1, 1, (None,) * 3)
    ours, versus = Setting(split=1, tail=2), Setting(split=2, tail=2, fill="identity")
    above = [n for n in range(1, 601) if macs(shape, n, ours) > macs(shape, n, versus)]
    assert (above[0], above[-1] < 600) == (3, True)
    assert crossing_tokens(shape, ours, versus, limit=600) == above[-1] + 1


def test_the_count_is_quadratic_between_the_lengths_that_the_crossing_stops_at() -> None:
    rng = random.Random(2)
    for _ in range(150):
        shape = some_shape(rng)
        setting = some_setting(rng, shape.layers, 20)
        counts = [macs(shape, n, setting) for n in range(1, 50)]
        for n, (a, b, c, d) in enumerate(zip(counts, counts[1:], counts[2:], counts[3:], strict=False), 1):
            if not {n + 1, n + 2} & _bends(shape, setting):
                assert d - 3 * c + 3 * b - a == 0, (shape, setting, n)


def test_a_setting_that_never_loses_crosses_at_one() -> None:
    assert crossing_tokens(LLAMA, paper(16), Setting.exact()) == 1
    assert crossing_tokens(LLAMA, paper(16), paper(16)) == 1
    assert crossing_tokens(LLAMA, Setting.exact(), paper(16)) is None


def test_the_crossing_does_not_walk_through_the_lengths() -> None:
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=1 << 60) == 14334
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=14334) == 14334
    assert crossing_tokens(LLAMA, paper(16), Setting.pop(32), limit=14333) is None


# Settings that cannot be


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
        ({"rows": float("nan")}, "rows nan"),
        ({"leading": -1}, "leading -1"),
        ({"fill": "pop"}, "fill 'pop'"),
        ({"map": "half"}, "map 'half'"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        Setting(**settings)


def test_splits_and_lengths_out_of_range_are_named() -> None:
    for split in (32, 33, 0.01):
        with pytest.raises(SettingError, match="split"):
            macs(LLAMA, 10, paper(split))
        with pytest.raises(SettingError, match="split"):
            crossing_tokens(LLAMA, Setting.exact(), paper(split))
    for n in (0, -1, 1.5):
        with pytest.raises(SettingError, match="length"):
            macs(LLAMA, n, Setting.exact())  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="length"):
            report(LLAMA, [n], paper(16), Setting.exact())  # type: ignore[list-item]
        with pytest.raises(SettingError, match="length"):
            layer_pass_share(n, 16, 4096, 32)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no prompt length"):
        report(LLAMA, [], paper(16), Setting.exact())
    with pytest.raises(SettingError, match="limit"):
        crossing_tokens(LLAMA, paper(16), Setting.exact(), limit=0)


# Reports and the other setting


def test_a_report_as_json() -> None:
    made = report(LLAMA, [16384, 32768], paper(20, leading=16), Setting.pop(32))
    found = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert list(found) == ["crossing_tokens", "lengths", "setting", "versus", "model"]
    assert found["crossing_tokens"] == crossing_tokens(LLAMA, paper(20, leading=16), Setting.pop(32))
    assert [set(row) for row in found["lengths"]] == [{"tokens", "macs", "macs_versus", "ratio"}] * 2
    for row, n in zip(found["lengths"], (16384, 32768), strict=True):
        ours, theirs = macs(LLAMA, n, paper(20, leading=16)), macs(LLAMA, n, Setting.pop(32))
        assert row == {"tokens": n, "macs": ours, "macs_versus": theirs, "ratio": ours / theirs}
    assert (found["setting"]["split"], found["setting"]["tail"], found["setting"]["leading"]) == (
        20,
        4096,
        16,
    )
    assert (found["versus"]["split"], found["versus"]["fill"]) == (22, "identity")
    assert found["model"]["layers"] == 32


def test_a_report_names_the_layer_of_a_depth_and_nothing_for_exact() -> None:
    found = report(LLAMA, [100], Setting(split=0.5), Setting.exact()).to_json()
    assert found["setting"]["split"] == 16
    assert found["versus"]["fill"] == "exact"
    assert {value for key, value in found["versus"].items() if key != "fill"} == {None}


def drawn(made: CostReport) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table(made))
    return " ".join(console.export_text().split())


def test_a_report_as_a_table() -> None:
    text = drawn(report(LLAMA, [16384, 65536], paper(20, rows=0.1), Setting.pop(32)))
    assert "16,384" in text and "65,536" in text
    assert "POP from layer 22 of 32, tail 1" in text
    assert "ridge fill from layer 20 of 32, tail 4,096, 0.1 of the prefix exact" in text
    text = drawn(report(LLAMA, [65536], paper(20), Setting.pop(32)))
    assert "from 45,661 tokens" in text
    assert f"{macs(LLAMA, 65536, paper(20)) / 1e12:,.3f}" in text
    assert "0.980" in text
    assert "at any length" in drawn(report(LLAMA, [8192], paper(20), Setting.exact()))
    assert "costs more" in drawn(report(LLAMA, [8192], Setting.exact(), paper(20)))


def test_the_other_setting_is_read() -> None:
    ours = paper(20)
    assert parse_versus(" Exact", LLAMA, ours) == Setting.exact()
    assert parse_versus("POP", LLAMA, ours) == Setting.pop(32)
    text = "split=16, tail=2048,rows=0.1,leading=16,fill=identity,map=no,map_at_split=no"
    assert parse_versus(text, LLAMA, ours) == Setting(16, 2048, 0.1, 16, "identity", "none", False)
    assert parse_versus("split=0.25", LLAMA, ours) == Setting(split=8)
    assert parse_versus("tail=7", LLAMA, ours) == Setting(split=16, tail=7)
    assert parse_versus("fill=exact", LLAMA, ours).fill == "exact"


def test_a_setting_reads_what_it_writes() -> None:
    for setting in (
        paper(20),
        Setting(1, 1, 1.0, 1, "none", "none", False),
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
        ("rows=2", "rows 2.0"),
        ("split=32", "split at 32"),
        ("fill=swift", "fill 'swift'"),
        ("tail=0", "tail 0"),
    ],
)
def test_the_bad_key_of_the_other_setting_is_named(text: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse_versus(text, LLAMA, paper(20))
