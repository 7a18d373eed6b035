from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.fit.quantize import dequantize_int8, quantize_int8


def test_codes_and_scales_follow_the_published_rule_in_plain_python():
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_int8(weight)
    assert codes.dtype == torch.int8 and scale.dtype == torch.bfloat16
    assert codes.shape == (3, 256) and scale.shape == (3, 2)
    for row in range(3):
        for group in range(2):
            values = weight[row, 128 * group : 128 * (group + 1)].tolist()
            expected = torch.tensor(max(map(abs, values)) / 127).to(torch.bfloat16).item()
            assert scale[row, group].item() == expected
            for column, value in enumerate(values):
                # Python's round takes ties to the even neighbour too
                assert codes[row, 128 * group + column] == max(-127, min(127, round(value / expected)))


def test_error_is_at_most_half_a_scale_which_is_0_39_percent_of_the_largest():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 512, generator=generator) * torch.rand(64, 1, generator=generator).exp2() * 1e-3
    codes, scale = quantize_int8(weight)
    error = (dequantize_int8(codes, scale) - weight).abs().view(64, 4, 128)
    largest = weight.abs().view(64, 4, 128).amax(-1, keepdim=True)
    assert (error <= 0.5 * scale.float()[..., None] * (1 + 1e-6)).all()
    assert (error / largest).max() <= 0.5 / 127 * (1 + 2**-8)  # half a step, of a scale rounded up
    assert (error / largest).max() > 0.003  # the bound is met, so it is the right one


def test_ties_go_to_even():
    weight = torch.zeros(1, 128)
    weight[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # the scale is 1
    codes, scale = quantize_int8(weight)
    assert scale.item() == 1
    assert codes[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_a_scale_rounded_down_does_not_overflow_the_codes():
    largest = max(
        torch.linspace(1, 4, 5000).tolist(), key=lambda x: x / torch.tensor(x / 127).bfloat16().item()
    )
    weight = torch.full((1, 128), largest)
    weight[0, 0] = -largest
    codes, scale = quantize_int8(weight)
    assert largest / scale.item() > 127.4
    assert codes[0, 0] == -127 and (codes[0, 1:] == 127).all()


def test_an_all_zero_group_has_scale_one():
    weight = torch.zeros(2, 256)
    weight[0, 200] = 3.0
    codes, scale = quantize_int8(weight)
    assert scale[0, 0] == 1 and scale[1].tolist() == [1, 1] and scale[0, 1] != 1
    assert torch.equal(dequantize_int8(codes, scale)[1], torch.zeros(256))


@pytest.mark.parametrize("d_in", [1, 64, 127, 129, 300])
def test_the_last_group_is_shorter_where_columns_do_not_divide(d_in):
    weight = torch.randn(5, d_in, generator=torch.Generator().manual_seed(d_in))
    codes, scale = quantize_int8(weight)
    assert codes.shape == (5, d_in) and scale.shape == (5, -(-d_in // 128))
    assert (dequantize_int8(codes, scale) - weight).abs().max() <= 0.004 * weight.abs().max()
    tail = weight[:, 128 * (scale.shape[1] - 1) :]
    assert torch.equal(quantize_int8(tail)[1][:, 0], scale[:, -1])  # no other group's column counts


def test_quantizing_what_was_quantized_changes_nothing():
    weight = torch.randn(32, 320, generator=torch.Generator().manual_seed(2))
    once = dequantize_int8(*quantize_int8(weight))
    assert not torch.equal(once, weight)
    assert torch.equal(dequantize_int8(*quantize_int8(once)), once)


def test_what_cannot_be_quantized_is_refused():
    for weight in (torch.tensor([[1.0, float("nan")]]), torch.tensor([[float("inf")]]), torch.zeros(4)):
        with pytest.raises(SettingError, match="finite"):
            quantize_int8(weight)
    with pytest.raises(SettingError, match="0 columns"):
        quantize_int8(torch.zeros(2, 2), group=0)
    codes, scale = quantize_int8(torch.zeros(2, 256))
    with pytest.raises(SettingError, match="one scale"):
        dequantize_int8(codes, scale[:, :1])
