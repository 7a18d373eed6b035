"""Fits `fill.direct.DirectKV`: a ridge regression of late layers' keys and values on the split state (paper 7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import CorpusError
from ridgefill.fill.direct import DirectKV, normalised, refuse_other_layers
from ridgefill.fit.capture import layer_inputs
from ridgefill.fit.corpus import read_sources
from ridgefill.fit.moments import Moments
from ridgefill.fit.run import evaluating
from ridgefill.fit.settings import Settings
from ridgefill.fit.solve import Spectrum, ridge
from ridgefill.fit.windows import MIN_WINDOW_ROWS, Cutter, Plan, Window, plan_windows
from ridgefill.maps import AffineMap
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.plan import layer_of

LAMBDA_REL = 0.01


@torch.no_grad()
def fit_direct(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str | Path],
    split: int | float,
    *,
    tokens: int = 65536,
    length: int = 4096,
    lambda_rel: float = LAMBDA_REL,
    leading: int = 16,
    seed: int = 0,
) -> DirectKV:
    """Fits direct maps in one pass over calibration text.

    The windows are those that `ridgefill.fit` draws with the same settings, so that both fills know the same text;
    the ones it holds out are left out here too, though the penalty is not chosen but given.

    Args:
        model, tokenizer, texts: as in `ridgefill.fit`.
        split: layer, or depth in (0, 1).
        tokens: tokens to draw, the share that is held out included.
        length: tokens of a window at most.
        lambda_rel: lambda over the mean of the Gram matrix's diagonal.
        leading: first rows of each window left out.
        seed: decides the documents' order.

    Raises:
        UnsupportedModelError: late layers that keep more than keys and values.
        SettingError, CorpusError: by name.
    """
    decoder = Decoder(model)
    split = layer_of(split, decoder.n_layers)
    refuse_other_layers(decoder, "direct maps", split)
    longest = getattr(model.config, "max_position_embeddings", None) or length
    settings = Settings(tokens, min(length, longest), 0.1, (float(lambda_rel),), leading, 0.25, seed)
    plan = _windows(decoder, tokenizer, texts, settings)
    eps = float(getattr(model.config, "rms_norm_eps", None) or 1e-6)
    moments = Moments([split], decoder.n_layers, _devices(decoder, split), apart=True)
    with evaluating(model):
        for window in plan.fit:
            _add(decoder, moments, window, leading, eps)
    provenance = {"settings": settings.to_json(), "rows": moments.rows, "sources": plan.sources}
    provenance |= {"documents_sha256": plan.documents_sha256, "tokens_sha256": plan.tokens_sha256}
    identity = ModelIdentity.of(model, tokenizer)
    return DirectKV(split, _solve(moments, split, lambda_rel), eps, identity, provenance)


def _windows(decoder: Decoder, tokenizer: Any, texts: Sequence[str | Path], s: Settings) -> Plan:
    shortest = s.leading + MIN_WINDOW_ROWS
    cutter = Cutter(tokenizer, length=s.length, shortest=shortest, chat_share=s.chat_share, seed=s.seed)
    return plan_windows(
        read_sources(texts),
        cutter,
        tokens=s.tokens,
        holdout=s.holdout,
        leading=s.leading,
        width=decoder.width_in,
    )


def _devices(decoder: Decoder, split: int) -> dict[int, torch.device]:
    own = {i: decoder.device(i) for i in range(split, decoder.n_layers)}
    return {i: torch.device("cpu") if where.type == "mps" else where for i, where in own.items()}  # no fp64


def _add(decoder: Decoder, moments: Moments, window: Window, leading: int, eps: float) -> None:
    """One window's normalised split states, and every late layer's keys and values."""
    split, last = moments.layers[0], moments.layers[-1]
    for layer, h, x in layer_inputs(decoder, window.ids.long()[None], split, last):
        state = normalised(h[0, leading:], eps) if layer == split else None
        if not moments.add(layer, _flat(decoder.project(layer, x))[leading:], state):
            raise CorpusError(
                f"fit on {window.document}",
                f"the input of layer {layer} holds NaN or infinity there",
                "load the model in bfloat16 or float32, or leave that text out",
            )


def _flat(projected: tuple[Tensor, Tensor]) -> Tensor:
    """[m, 2 H D] of keys and values [1, H, m, D], head by head."""
    return torch.cat([t[0].transpose(0, 1).flatten(1) for t in projected], 1)


def _solve(moments: Moments, split: int, lambda_rel: float) -> dict[int, AffineMap]:
    spectrum = Spectrum.of(moments.gram(split))
    maps = {}
    for layer in moments.layers[1:]:
        weight, bias = ridge(spectrum, moments.centred(split, layer), lambda_rel)
        maps[layer] = AffineMap(weight.float().cpu(), bias.float().cpu())
    return maps
