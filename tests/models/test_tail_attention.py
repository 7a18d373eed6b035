"""The tail's attention equals the stock one, without a mask, and only stands in where that is so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ridgefill.engines.transformers import filling
from ridgefill.models import tail_attention

from ..reference import (
    LEADING,
    TAIL,
    N,
    close,
    filled_rows,
    generate,
    model_of,
    padded,
    prompt,
    random_maps,
    reference_logits,
)

SETTINGS = {"split": 3, "tail": TAIL, "leading": LEADING, "min_tokens": 1}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def tensors(batch, heads, kv_heads, t, n, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, t, d, generator=g)
    k, v = (torch.randn(batch, kv_heads, n, d, generator=g) for _ in range(2))
    return q, k, v


def module(heads, kv_heads):
    return SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(
    ("batch", "t", "n", "d"), [(1, 24, 100, 16), (2, 2, 3, 64), (1, 70, 300, 256), (3, 33, 34, 8)]
)
@pytest.mark.parametrize("scaling", [None, 1.7])  # times the usual scale
def test_equals_the_stock_attention_with_its_mask(heads, kv_heads, batch, t, n, d, scaling):
    scaling = scaling and scaling * d**-0.5
    q, k, v = tensors(batch, heads, kv_heads, t, n, d)
    mask = (torch.arange(n)[None] <= torch.arange(n - t, n)[:, None])[None, None]
    expected, _ = sdpa_attention_forward(module(heads, kv_heads), q, k, v, mask, scaling=scaling)
    ours, weights = tail_attention.attend(module(heads, kv_heads), q, k, v, None, scaling=scaling)
    assert ours.shape == (batch, t, heads, d) and weights is None and ours.is_contiguous()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_equals_softmax_attention_written_out():
    q, k, v = tensors(1, 4, 2, 5, 12, 16)
    scores = torch.einsum("bhtd,bhnd->bhtn", q, k.repeat_interleave(2, 1)) / 4
    scores = scores.masked_fill(torch.arange(12)[None] > torch.arange(7, 12)[:, None], float("-inf"))
    expected = torch.einsum("bhtn,bhnd->bthd", scores.softmax(-1), v.repeat_interleave(2, 1))
    ours, _ = tail_attention.attend(module(4, 2), q, k, v, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [60.0, -60.0])
def test_one_part_may_take_all_the_weight(sink):
    """As an attention sink in the prefix does, or nearly all."""
    q, k, v = tensors(1, 4, 2, 8, 50, 16)
    k[:, :, 0] = sink * q.mean((1, 2))[:, None] / q.mean((1, 2)).norm()
    mask = (torch.arange(50)[None] <= torch.arange(42, 50)[:, None])[None, None]
    expected, _ = sdpa_attention_forward(module(4, 2), q, k, v, mask)
    ours, _ = tail_attention.attend(module(4, 2), q, k, v, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16():
    q, k, v = (x.bfloat16() for x in tensors(1, 4, 2, 24, 100, 16))
    mask = (torch.arange(100)[None] <= torch.arange(76, 100)[:, None])[None, None]
    expected, _ = sdpa_attention_forward(module(4, 2), q, k, v, mask)
    ours, _ = tail_attention.attend(module(4, 2), q, k, v, None)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("t", "n", "masked"), [(24, 100, True), (24, 24, False), (1, 100, False)])
def test_stock_where_a_mask_is_given_or_there_is_no_prefix(t, n, masked):
    q, k, v = tensors(1, 4, 2, t, n, 16)
    mask = torch.rand(1, 1, t, n, generator=torch.Generator().manual_seed(1)) < 0.9 if masked else None
    expected, _ = sdpa_attention_forward(module(4, 2), q, k, v, mask)
    assert torch.equal(tail_attention.attend(module(4, 2), q, k, v, mask)[0], expected)


# the mask function


def test_no_mask_where_the_tail_sees_every_earlier_row():
    assert tail_attention.mask(1, 24, 100, 76) is None
    assert tail_attention.mask(1, 24, 100, 76, attention_mask=torch.ones(1, 100)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_mask": torch.tensor([[False] * 10 + [True] * 90])},
        {"local_size": 32},
        {"allow_is_causal_skip": False},
    ],
    ids=["padding", "window", "a model's own mask"],
)
def test_the_stock_mask_elsewhere(settings):
    ours = tail_attention.mask(1, 24, 100, 76, **settings)
    assert ours is not None and torch.equal(ours, sdpa_mask(1, 24, 100, 76, **settings))


@pytest.mark.parametrize(
    ("kv_length", "kv_offset"), [(55, 45), (128, 0)], ids=["cropped cache", "spare slots"]
)
def test_the_stock_mask_where_keys_are_not_all_earlier_rows(kv_length, kv_offset):
    ours = tail_attention.mask(1, 24, kv_length, 76, kv_offset, allow_is_causal_skip=False)
    assert tail_attention.mask(1, 24, kv_length, 76, kv_offset) is not None
    assert torch.equal(ours, sdpa_mask(1, 24, kv_length, 76, kv_offset, allow_is_causal_skip=False))


# where it is used


class Watch(TorchDispatchMode):
    """Counts attention kernels by kind, and the largest boolean tensor of the tail's shape."""

    def __init__(self):
        super().__init__()
        self.unmasked_prefix, self.tail_masks = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FLASH in str(func):
            causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
            no_mask = kwargs.get("attn_mask") is None
            rows, keys = args[0].shape[2], args[1].shape[2]
            self.unmasked_prefix += no_mask and not causal and rows > 1 and keys == N - TAIL
        out = func(*args, **kwargs)
        # a mask of the tail over all rows, in any dtype (attention weights would have the heads before it)
        if isinstance(out, torch.Tensor) and out.ndim == 4 and out.shape[1:] == (1, TAIL, N):
            self.tail_masks += 1
        return out


def watched(case, mask=None, ids=None, **settings):
    model, ids = model_of(case), prompt() if ids is None else ids
    with filling(model, **{**SETTINGS, "fill": "identity", **settings}) as f, Watch() as watch:
        generate(model, ids, 1, attention_mask=mask)
    assert f.stats.filled > 0
    return watch


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3"])
def test_used_in_every_layer_of_a_plain_model_and_no_mask_is_made(case):
    watch = watched(case)
    assert watch.unmasked_prefix == 6 and watch.tail_masks == 0


@pytest.mark.parametrize(("case", "full"), [("gemma3_text", 2), ("qwen2-window", 3), ("mistral-window", 0)])
def test_used_in_full_layers_only_where_others_have_windows(case, full):
    watch = watched(case)
    assert watch.unmasked_prefix == full
    assert watch.tail_masks == 0


def test_not_used_in_a_padded_batch():
    ids, mask = padded((N, 60))
    watch = watched("llama", ids=ids, mask=mask)
    assert watch.unmasked_prefix == 0 and watch.tail_masks > 0


@pytest.mark.parametrize("fill", ["none", "exact", "true"])
def test_not_used_by_arms_that_need_or_promise_the_stock_attention(fill):
    watch = watched("llama", **{"fill": fill, "leading": 0}) if fill != "exact" else None
    if watch is None:
        model = model_of("llama")
        with filling(model, **{**SETTINGS, "fill": fill}), Watch() as watch:
            generate(model, prompt(), 1)
    assert watch.unmasked_prefix == 0 and watch.tail_masks > 0


@pytest.mark.parametrize("case", ["gemma2", "gemma3-eager"])  # Gemma 2's soft cap knows no other attention
def test_not_used_by_eager_attention(case):
    assert not tail_attention.usable(model_of(case))
    assert watched(case).unmasked_prefix == 0


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("fill", ["ridge", "identity"])
def test_tokens_are_equal_with_and_without_it(case, fill, monkeypatch):
    model, ids = model_of(case), prompt(batch=2)
    maps, found = random_maps(model, 3), []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(tail_attention, "_KERNEL", None)
            assert not tail_attention.usable(model)
        with filling(model, maps, **{**SETTINGS, "fill": fill}), Watch() as watch:
            found.append(generate(model, ids))
        assert (watch.unmasked_prefix > 0) == on
    assert torch.equal(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[1][1])  # it was another path
    rows = filled_rows(N, found[0][0].shape[1] - 1)
    expected = reference_logits(model, found[0][0][0, :-1], rows, 3, fill, maps)[N - 1 :]
    close(found[0][1][0], expected)


def test_switching_on_twice_and_off_twice_is_harmless():
    model = model_of("llama")
    switch = tail_attention.TailAttention(model)
    switch.off()
    assert model.config._attn_implementation == "sdpa"
    switch.on()
    assert model.config._attn_implementation == tail_attention.NAME
    switch.off()
    switch.off()
    assert model.config._attn_implementation == "sdpa"
