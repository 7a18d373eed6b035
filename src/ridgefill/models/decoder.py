"""The one family-specific seam: a causal language model as embed, layers, final.

Everything that a family needs sits here; nothing else in the package names a family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import UnsupportedModelError
from ridgefill.models import attention

# `model_type` of every family whose filled cache is tested to equal the exact one bit for bit.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")


@dataclass(frozen=True)
class Rows:
    """Consecutive prompt rows as the layers need them; the same object serves every layer.

    Attributes:
        positions: [B, m] rotary positions.
        masks: the model's own attention mask, or one per layer type.
        ropes: (cos, sin), or one pair per layer type.
    """

    positions: Tensor
    masks: Any
    ropes: Any

    def last(self, m: int) -> Rows:
        """The last m rows, for writing only (their masks are left out)."""
        cut = lambda pair: (pair[0][:, -m:], pair[1][:, -m:])  # noqa: E731
        ropes = (
            {k: cut(v) for k, v in self.ropes.items()} if isinstance(self.ropes, dict) else cut(self.ropes)
        )
        return replace(self, positions=self.positions[:, -m:], masks=None, ropes=ropes)


class Decoder:
    """A transformers causal LM, seen layer by layer.

    Args:
        model: a loaded ``*ForCausalLM`` of one of `FAMILIES`.

    Raises:
        UnsupportedModelError: any other model, by name.
    """

    def __init__(self, model: Any) -> None:
        if hasattr(model, "config"):
            refuse_unsupported(model.config, type(model).__name__)
        if not (hasattr(model, "lm_head") and hasattr(getattr(model, "model", None), "layers")):
            raise UnsupportedModelError(
                f"fill {type(model).__name__}",
                "it is not a causal language model with its head",
                "load the ...ForCausalLM of the same weights",
            )
        self.model, self.base, self.config = model, model.model, model.config
        self.layers = self.base.layers[: self.config.num_hidden_layers]
        self._kinds = new_cache(model).layers  # the one place where every family says what a layer keeps

    @property
    def n_layers(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, m] -> hidden states entering layer 0, [B, m, d]."""
        return self.base.embed_tokens(ids)

    def rows(
        self, h: Tensor, positions: Tensor, attention_mask: Tensor | None = None, cache: Any = None
    ) -> Rows:
        """Masks and rotary embeddings of the rows of ``h`` [B, m, d], which follow what ``cache`` holds.

        Args:
            positions: [B, m].
            attention_mask: [B, past + m] with 0 for left padding, or None.
        """
        # Without a cache the model would read gappy positions as packed sequences: give it an empty one.
        cache = new_cache(self.model) if cache is None else cache
        masks = create_masks_for_generate(
            self.config, h, attention_mask, position_ids=positions, **cache_kwarg(cache)
        )
        if self.config.model_type == "gemma3_text":
            ropes: Any = {t: self.base.rotary_emb(h, positions, t) for t in set(self.config.layer_types)}
        else:
            ropes = self.base.rotary_emb(h, positions)
        return Rows(positions, masks, ropes)

    def run_layer(self, i: int, h: Tensor, rows: Rows, cache: Any = None) -> Tensor:
        """Layer i, whole: input [B, m, d] -> output; writes to ``cache`` if one is given."""
        out = self.layers[i](
            h,
            attention_mask=self._of(rows.masks, i),
            position_embeddings=self._of(rows.ropes, i),
            position_ids=rows.positions,
            use_cache=cache is not None,
            **cache_kwarg(cache),
        )
        return out[0] if isinstance(out, tuple) else out

    def project(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What layer i writes from input x [B, m, d]: keys before rotary embedding, values; [B, H, m, D]."""
        return attention.project(self.layers[i], x.to(self.device(i)))

    def rotate(self, i: int, keys: Tensor, rows: Rows) -> Tensor:
        """Layer i's keys [B, H, m, D] rotated to the positions of ``rows``."""
        cos, sin = self._of(rows.ropes, i)
        return attention.rotate(self.layers[i], keys, (cos.to(keys.device), sin.to(keys.device)))

    def first_read(self, i: int, n_rows: int) -> int:
        """The first of ``n_rows`` prefix rows that any later token reads in layer i (window layers forget)."""
        width = self.window(i)
        return 0 if width is None else max(0, n_rows - width + 1)

    def window(self, i: int) -> int | None:
        """Layer i's sliding window in rows, or None for full attention."""
        return getattr(self._kinds[i], "sliding_window", None)

    def device(self, i: int) -> torch.device:
        """Where layer i computes (an offloaded layer's execution device)."""
        for module in self.layers[i].modules():  # accelerate hangs its hooks on the layer or on its parts
            where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if where is not None:
                return torch.device(where)
        return next(self.layers[i].parameters()).device

    def final(self, h: Tensor) -> Tensor:
        """Output of the last layer [B, m, d] -> logits [B, m, vocabulary]."""
        logits = self.model.lm_head(self.base.norm(h))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _of(self, per_type: Any, i: int) -> Any:
        return per_type[self.config.layer_types[i]] if isinstance(per_type, dict) else per_type


def refuse_unsupported(config: Any, name: str) -> None:
    """Raises UnsupportedModelError, by name, for a config that cannot be filled correctly."""
    asked = f"fill {name} (model_type {config.model_type!r})"
    if config.model_type == "gemma3":
        raise UnsupportedModelError(
            asked, "it reads images too, and only its text model can be filled", "load Gemma3ForCausalLM"
        )
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            asked,
            "this architecture is not supported",
            f"use one of {', '.join(FAMILIES)}, or run this model without the fill",
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            asked,
            "its attention is bidirectional, so later rows change earlier ones",
            "run it without the fill",
        )
