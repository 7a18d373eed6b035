"""The best rows by a score, and the layers that selectors read."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt, Reader, top

REFERENCE_LAYERS = (3, 7, 11, 15)  # paper 2.4: "every attention layer among layers 3, 7, 11 and 15"


def best(prompt: Prompt, score: Tensor, count: int, taken: Tensor | None = None) -> Tensor:
    """[m] bool: the ``count`` highest rows of score [m], ties to the lower position.

    The leading rows run exactly anyway, so that they are never among them.

    Args:
        taken: [m] bool, further rows that are not to be counted again.
    """
    free = torch.ones(prompt.prefix, dtype=torch.bool) if taken is None else ~taken
    free[: prompt.leading] = False
    return top(score.masked_fill(~free, -torch.inf), min(count, int(free.sum())))


def need_reader(prompt: Prompt, asked: str) -> Reader:
    """The prompt's reader.

    Raises:
        SettingError: there is none.
    """
    if prompt.reader is None:
        raise SettingError(
            asked, "they read the model's attention and no model was given", "choose them during a prefill"
        )
    return prompt.reader


def lower_attention(prompt: Prompt, asked: str, layers: tuple[int, ...] | None, queries: range) -> Tensor:
    """[layers, heads, m] fp32: what the query rows pay each prefix row in lower layers, summed over the queries.

    Args:
        asked: what reads it, for refusals.
        layers: see `readable_layers`.

    Raises:
        SettingError: no reader, or no such layer to read.
    """
    reader = need_reader(prompt, asked)
    return reader.lower(readable_layers(reader, asked, layers), queries).float().cpu()


def readable_layers(reader: Reader, asked: str, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """The attention layers below the split that are read.

    Args:
        layers: or None for the paper's (3, 7, 11, 15), as far as they are attention layers below the split; if
            none of them is, then every attention layer below the split.

    Raises:
        SettingError: there is none, or a named one is not an attention layer below the split.
    """
    below = tuple(i for i in reader.attention_layers if i < reader.split)
    if not below:
        raise SettingError(
            f"{asked} at split {reader.split}",
            "this model has no attention layer below it",
            "use a deeper split, or rows that read no attention, such as lexical or protected",
        )
    if layers is None:
        return tuple(i for i in below if i in REFERENCE_LAYERS) or below
    if wrong := [i for i in layers if i not in below]:
        raise SettingError(
            f"{asked} in layer {wrong[0]}",
            f"the attention layers below split {reader.split} are {', '.join(map(str, below))}",
            "name some of those, or leave the layers out",
        )
    return layers


def check_layers(asked: str, layers: tuple[int, ...] | None) -> None:
    """Raises SettingError for what is neither None nor a tuple of layer numbers."""
    whole = isinstance(layers, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in layers)
    if layers is not None and not (whole and layers):
        raise SettingError(f"{asked} in layers {layers!r}", "no layers", "give layer numbers such as (3, 7)")
