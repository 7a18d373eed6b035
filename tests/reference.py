"""A slow reference for every arm that shares no code with the package.

The stock model runs once over the whole text, without a cache; hooks change what its late layers see. Positions,
rotary embeddings, masks and windows are the stock model's own.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.identity import ModelIdentity

from .tiny import FAMILIES, tiny_model

N_LAYERS, WIDTH = 6, 64
SPLITS = (1, 3, 5)  # the first that is allowed, the middle, the last layer
N, TAIL, LEADING = 100, 24, 16  # longer than the windows of 32
PAD = 256
# Every family; those whose windows are a setting also with windows; and a float mask without Gemma 2's soft cap.
CASES: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    "mistral-window": {"family": "mistral", "sliding_window": 32},
    "qwen2-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 3,
    },
    "gemma3-eager": {"family": "gemma3_text", "attn_implementation": "eager"},
    "mixtral-window": {"family": "mixtral", "sliding_window": 32},
    "olmo_hybrid-rope": {
        "family": "olmo_hybrid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
WINDOWS = (
    "gemma2",
    "gemma3_text",
    "mistral-window",
    "qwen2-window",
    "gemma3-eager",
    "gpt_oss",
    "mixtral-window",
)


@functools.cache
def model_of(case: str) -> Any:
    """The case's model, made once; no test may leave it changed."""
    settings = dict(CASES[case])
    attention = settings.pop("attn_implementation", None)
    model = tiny_model(**settings)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def hidden_states(model: Any, ids: Tensor) -> Any:
    """The stock model's hidden states; of a copy, since transformers leaves its recording hooks on a model."""
    return copy.deepcopy(model)(ids, output_hidden_states=True).hidden_states


def prompt(n: int = N, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, n), generator=torch.Generator().manual_seed(seed))


def random_maps(model: Any, split: int, seed: int = 7) -> RidgeMaps:
    """Maps that are far from the identity, for every layer above the split."""
    g = torch.Generator().manual_seed(seed)
    maps = {
        layer: AffineMap(
            torch.eye(WIDTH) + 0.05 * torch.randn(WIDTH, WIDTH, generator=g),
            0.2 * torch.randn(WIDTH, generator=g),
        )
        for layer in range(split + 1, model.config.num_hidden_layers)
    }
    return RidgeMaps(split, maps, identity=ModelIdentity.of(model))


@torch.no_grad()
def stock_cache(model: Any, ids: Tensor, mask: Tensor | None = None) -> Any:
    """The stock model's cache of ``ids``."""
    cache = new_cache(model)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
    model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **cache_kwarg(cache),
    )
    return cache


def generate(model: Any, ids: Tensor, new: int = 6, **settings: Any) -> tuple[Tensor, Tensor]:
    """Tokens [B, n + new] and the logits of the new ones [B, new, V], greedy unless told otherwise."""
    settings = {"do_sample": False, "eos_token_id": None, **settings}
    if settings.get("attention_mask") is None:
        settings["attention_mask"] = torch.ones_like(ids)
    out = model.generate(
        ids, max_new_tokens=new, output_logits=True, return_dict_in_generate=True, **settings
    )
    return out.sequences, torch.stack(out.logits, 1)


def filled_rows(n: int, total: int, tail: int = TAIL, leading: int = LEADING) -> Tensor:
    """[total] True on the rows of a prompt of n tokens that a plan fills."""
    rows = torch.arange(total)
    return (rows >= leading) & (rows < n - tail)


@torch.no_grad()
def logits_with_inputs(
    model: Any, ids: Tensor, filled: Tensor, split: int, predict: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Logits [n, V] when the filled rows of ids [n] enter each late layer as predicted from the split state."""
    with inputs_swapped(model, filled, split, predict):
        return model(ids[None], use_cache=False).logits[0]


@contextmanager
def inputs_swapped(
    model: Any, filled: Tensor, split: int, predict: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """While it lasts, filled rows [n] enter each late layer of the stock model as predicted from the split state."""
    state: dict[str, Tensor] = {}

    def swap(i: int) -> Callable[..., Any]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            h = args[0]
            if i == split:
                state["h"] = h
            h = torch.where(filled[None, :, None], predict(i, state["h"]), h)
            return (h, *args[1:]), kwargs

        return hook

    with _late_hooks(model, split, swap):
        yield


@torch.no_grad()
def logits_with_hidden_rows(model: Any, ids: Tensor, hidden: Tensor, split: int) -> Tensor:
    """Logits [n, V] when no row of ids [n] attends to the hidden rows in the late layers, and no state holds them."""
    config, n = model.config, len(ids)
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]

    def hide(i: int) -> Callable[..., Any]:
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        windowed = kinds[i] == "sliding_attention" or (
            config.model_type in ("mistral", "mixtral") and config.sliding_window is not None
        )
        seen = (k <= q) & (k > q - config.sliding_window if windowed else k >= 0)
        seen = (seen & ~hidden[None]) | (q == k)  # a row with nothing to see would be undefined
        mask = seen[None, None]
        if config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, kwargs if kinds[i] == "linear_attention" else {**kwargs, "attention_mask": mask}

        return hook

    with _late_hooks(model, split, hide), _skipped(model, split, ~hidden):
        return model(ids[None], use_cache=False).logits[0]


def reference_logits(
    model: Any, ids: Tensor, filled: Tensor, split: int, fill: str, maps: RidgeMaps | None
) -> Tensor:
    """The reference of an arm by its name: logits [n, V] of ids [n]."""
    if fill == "none":
        return logits_with_hidden_rows(model, ids, filled, split)
    if fill == "identity":
        return logits_with_inputs(model, ids, filled, split, lambda _, h: h)
    assert fill == "ridge" and maps is not None

    def affine(i: int, h: Tensor) -> Tensor:
        return h if i == split else h @ maps.maps[i].weight.T + maps.maps[i].bias

    return logits_with_inputs(model, ids, filled, split, affine)


def assert_same_cache(ours: Any, stock: Any) -> None:
    """What every layer keeps is equal bit for bit: keys and values, or the convolution's and the recurrent state."""
    assert ours.get_seq_length() == stock.get_seq_length()
    for i, (a, b) in enumerate(zip(ours.layers, stock.layers, strict=True)):
        assert type(a) is type(b)
        if not is_recurrent(b):
            assert a.get_seq_length() == b.get_seq_length(), i
        for mine, theirs in zip(held(a), held(b), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), i


def is_recurrent(layer: Any) -> bool:
    """Whether a cache's layer keeps states instead of keys and values."""
    return hasattr(layer, "recurrent_states")


def held(layer: Any) -> tuple[Tensor, ...]:
    """The tensors that a cache's layer keeps."""
    if not is_recurrent(layer):
        return layer.keys, layer.values
    assert layer.has_previous_state[0]
    return layer.conv_states[0], layer.recurrent_states[0]


def close(ours: Tensor, theirs: Tensor, atol: float = 3e-5) -> None:
    """Equal to rounding; logits here are of size 1."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def padded(lengths: Sequence[int], seed: int = 5) -> tuple[Tensor, Tensor]:
    """Left-padded prompts [B, max] of these lengths, and their mask."""
    longest = max(lengths)
    ids, mask = prompt(longest, len(lengths), seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for b, n in enumerate(lengths):
        ids[b, : longest - n], mask[b, : longest - n] = PAD, 0
    return ids, mask


def hooks_of(model: Any) -> int:
    """How many hooks hang on the model's modules; those of caches that nobody holds any more are gone by then."""
    gc.collect()  # a cache in a refusal's traceback lives until then
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@contextmanager
def _late_hooks(model: Any, split: int, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    layers = list(enumerate(model.model.layers))[split:]
    handles = [layer.register_forward_pre_hook(make(i), with_kwargs=True) for i, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _skipped(model: Any, split: int, visible: Tensor) -> Iterator[None]:
    """While it lasts, the late recurrent layers see only the visible rows [n], one right after the other."""

    def pick(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"][:, visible]}

    def spread(_: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        every = out.new_zeros(len(out), len(visible), out.shape[-1])
        every[:, visible] = out
        return every

    handles = []
    for layer in model.model.layers[split:]:
        if hasattr(layer, "linear_attn"):
            handles.append(layer.linear_attn.register_forward_pre_hook(pick, with_kwargs=True))
            handles.append(layer.linear_attn.register_forward_hook(spread))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
