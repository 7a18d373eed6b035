from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from ridgefill.fit.quantize import dequantize_int8, quantize_int8
from ridgefill.models.identity import (
    ModelIdentity,
    public_name,
    sketch_correlation,
    sketch_weights,
    tokenizer_sha256,
)
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer


def test_fields_are_the_config_s():
    identity = ModelIdentity.of(tiny_model("llama", num_hidden_layers=4), tiny_tokenizer())
    assert (identity.model_type, identity.hidden, identity.layers) == ("llama", 64, 4)
    assert (identity.heads, identity.kv_heads, identity.head_dim, identity.vocab) == (4, 2, 16, 320)
    assert (identity.dtype, identity.quantization) == ("float32", None)
    assert identity.tokenizer == tokenizer_sha256(tiny_tokenizer())
    assert identity.sketch is not None and len(identity.sketch) == 4 * 2 * 32
    assert ModelIdentity.of(tiny_model("gemma2")).layer_types[2] == "full_attention"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_itself_after_json_and_no_other(family):
    mine = ModelIdentity.of(tiny_model(family), tiny_tokenizer())
    back = ModelIdentity.from_json(json.loads(json.dumps(mine.to_json())))
    assert back == mine
    assert mine.differences(back) == [] and mine.remarks(back) == []
    other = ModelIdentity.of(tiny_model(family, seed=1), tiny_tokenizer())
    assert [d.split(" (")[0] for d in mine.differences(other)] == ["other weights"]


def test_a_longer_model_is_sampled_in_eight_layers():
    assert len(sketch_weights(tiny_model("llama", num_hidden_layers=13))) == 8 * 2 * 32


def test_rounded_and_tuned_copies_are_the_same_model():
    model = tiny_model("qwen3")
    mine = ModelIdentity.of(model)
    coarse = copy.deepcopy(model)
    tuned = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in coarse.parameters():
            if weight.ndim == 2:
                weight.copy_(dequantize_int8(*quantize_int8(weight)))
        for weight in tuned.parameters():
            weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=generator))
    for other in (coarse, tuned):
        assert sketch_weights(other) != mine.sketch
        assert mine.differences(ModelIdentity.of(other)) == []
    half = ModelIdentity.of(copy.deepcopy(model).to(torch.bfloat16))
    assert mine.differences(half) == []
    assert mine.remarks(half) == ["another dtype (bfloat16, not float32)"]


def test_one_foreign_half_is_enough_to_refuse():
    model, other = tiny_model("llama", num_hidden_layers=4), tiny_model("llama", seed=1, num_hidden_layers=4)
    mixed = copy.deepcopy(model)
    mixed.model.layers[2:].load_state_dict(other.model.layers[2:].state_dict())
    found = ModelIdentity.of(model).differences(ModelIdentity.of(mixed))
    assert len(found) == 1 and found[0].startswith("other weights (correlation 0.")


def test_scale_of_one_weight_does_not_hide_the_others():
    a = tuple(torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist())
    b = tuple(torch.randn(64, generator=torch.Generator().manual_seed(1)).tolist())
    big = tuple(1000 * x for x in a[:32])
    assert sketch_correlation(big + a[32:], big + b[32:]) < 0.9
    assert sketch_correlation(a, a[:32]) == 0
    assert sketch_correlation((1.0,) * 32, (1.0,) * 32) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 5}, "number of layers (5, not 6)"),
        ({"hidden_size": 32}, "hidden width (32, not 64)"),
        ({"num_key_value_heads": 1}, "key/value heads (1, not 2)"),
        ({"head_dim": 8}, "head size (8, not 16)"),
        ({"vocab_size": 328}, "vocabulary size (328, not 320)"),
    ],
)
def test_another_shape_is_named(change, words):
    found = ModelIdentity.of(tiny_model()).differences(ModelIdentity.of(tiny_model(**change)))
    assert f"another {words}" in found


def test_another_family_layer_types_or_tokenizer_is_named():
    mine = ModelIdentity.of(tiny_model("gemma2"), tiny_tokenizer())
    assert "another architecture (gemma3_text, not gemma2)" in mine.differences(
        ModelIdentity.of(tiny_model("gemma3_text"))
    )
    shifted = replace(mine, layer_types=mine.layer_types[::-1])
    assert mine.differences(shifted) == ["another layer types (in another order)"]
    assert mine.differences(replace(mine, layer_types=None)) == []
    assert mine.differences(replace(mine, tokenizer="0" * 64))[0].startswith("another tokenizer")
    assert mine.differences(replace(mine, tokenizer=None)) == []


def test_weights_that_cannot_be_read_are_remarked_on():
    model = tiny_model()
    mine = ModelIdentity.of(model)
    packed = copy.deepcopy(model)
    packed.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(
        torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False
    )
    for unreadable in (packed, copy.deepcopy(model).to("meta")):
        other = ModelIdentity.of(unreadable)
        assert other.sketch is None
        assert mine.differences(other) == []
        assert "could not be compared" in mine.remarks(other)[-1]


def test_quantization_is_named():
    model = tiny_model()
    mine = ModelIdentity.of(model)
    model.config.quantization_config = {"quant_method": "awq", "bits": 4}
    assert "another quantization (awq, not none)" in mine.remarks(ModelIdentity.of(model))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/name", "org/name"),
        ("gpt2", "gpt2"),
        ("", ""),
        ("/data/models/some-model/", "some-model"),
        ("./some-model", "some-model"),
        ("~/some-model", "some-model"),
        ("../a/some-model", "some-model"),
        ("C:\\models\\some-model", "some-model"),
        ("/home/me/hub/models--org--name/snapshots/0123abc", "org/name"),
    ],
)
def test_names_never_hold_a_path(path, name):
    assert public_name(path) == name


def test_a_folder_that_looks_like_a_hub_name_gives_its_last_part(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("models/mine") == "mine"
    assert public_name("models/other") == "models/other"


def test_a_name_that_is_not_known_or_only_lacks_its_owner_is_no_remark():
    mine = replace(ModelIdentity.of(tiny_model()), name="org/name")
    assert mine.remarks(replace(mine, name="name")) == mine.remarks(replace(mine, name="")) == []
    assert mine.remarks(replace(mine, name="org/other")) == ["another name (org/other, not org/name)"]


def test_a_saved_model_keeps_its_name_out_of_paths(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "my-model")
    loaded = type(model).from_pretrained(tmp_path / "my-model")
    identity = ModelIdentity.of(loaded)
    assert identity.name == "my-model"
    assert str(tmp_path) not in json.dumps(identity.to_json())


def test_tokenizer_hash_sees_tokens_but_not_roles(tmp_path):
    tokenizer = tiny_tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer_sha256(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != before


def test_tokenizer_hash_of_a_slow_tokenizer(tmp_path):
    slow = ByT5Tokenizer()
    before = tokenizer_sha256(slow)
    slow.save_pretrained(tmp_path)
    assert tokenizer_sha256(ByT5Tokenizer.from_pretrained(tmp_path)) == before
    slow.add_tokens(["<new>"])
    assert tokenizer_sha256(slow) != before


def test_tokenizer_hash_is_the_same_in_another_process():
    code = (
        "from tests.tiny import tiny_tokenizer; from ridgefill.models.identity import tokenizer_sha256; "
        "print(tokenizer_sha256(tiny_tokenizer()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == tokenizer_sha256(tiny_tokenizer())


def test_json_of_another_kind_is_an_error_not_a_guess():
    fields = ModelIdentity.of(tiny_model()).to_json()
    assert ModelIdentity.from_json({**fields, "later_field": 1}) == ModelIdentity.from_json(fields)
    for broken in ({**fields, "hidden": None}, {**fields, "sketch": [1.0]}, {"name": "x"}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            ModelIdentity.from_json(broken)
