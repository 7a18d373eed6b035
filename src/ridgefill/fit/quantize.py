"""Weights in int8 with one scale per group of consecutive columns of a row (paper 2.2: 128).

The rule, the same as in published int8 maps::

    scale = bf16(max|w| / 127) over the group         (1 where that is zero)
    code  = clamp(round_half_even(w / scale), -127, 127)
    w^    = code * scale                               (exact in fp32: 7 bits times 8 bits)

A weight is off by at most half a scale: 0.39 % of its group's largest magnitude (127 steps, and a scale
rounded to bf16's 8 bits). Where the number of columns is no multiple of the group, the last group is shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgefill.errors import SettingError

GROUP = 128
_LARGEST = 127


def quantize_int8(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight.

    Args:
        weight: [d_out, d_in], finite.
        group: columns that share a scale.

    Returns:
        codes: int8 [d_out, d_in]; scale: bf16 [d_out, ceil(d_in / group)].

    Raises:
        SettingError: ``weight`` is not a finite matrix, or ``group`` is below 1.
    """
    _refuse_bad_group(group)
    if weight.ndim != 2 or not torch.isfinite(weight).all():
        raise SettingError(
            f"store a weight of shape {list(weight.shape)} as int8",
            "only a matrix of finite numbers has scales",
            "fit the maps again, with more text or a larger penalty, or store them as fp32",
        )
    d_in = weight.shape[1]
    grouped = torch.nn.functional.pad(weight.float(), (0, -d_in % group)).unflatten(1, (-1, group))
    scale = (grouped.abs().amax(dim=-1) / _LARGEST).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (grouped / scale.float()[..., None]).round().clamp(-_LARGEST, _LARGEST)  # round: ties to even
    return codes.to(torch.int8).flatten(1)[:, :d_in].contiguous(), scale


def dequantize_int8(codes: Tensor, scale: Tensor, group: int = GROUP) -> Tensor:
    """The weight that codes and scales stand for.

    Args:
        codes: int8 [d_out, d_in].
        scale: [d_out, ceil(d_in / group)].
        group: columns that share a scale.

    Returns:
        fp32 [d_out, d_in].

    Raises:
        SettingError: the shapes do not belong together, or ``group`` is below 1.
    """
    _refuse_bad_group(group)
    if codes.ndim != 2 or tuple(scale.shape) != (codes.shape[0], -(-codes.shape[1] // group)):
        raise SettingError(
            f"read int8 codes of shape {list(codes.shape)} with scales of shape {list(scale.shape)}",
            f"there must be one scale for every {group} columns of every row",
            "use the codes and the scales of the same map",
        )
    return codes.float().mul_(scale.float().repeat_interleave(group, dim=1)[:, : codes.shape[1]])


def _refuse_bad_group(group: int) -> None:
    if group < 1:
        raise SettingError(
            f"share one scale between {group} columns", "a group has a column at least", f"use {GROUP}"
        )
