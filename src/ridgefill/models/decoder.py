"""The one family-specific seam: a causal language model as embed, layers, final.

Everything that a family needs sits here; nothing else in the package names a family.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import UnsupportedModelError
from ridgefill.models import attention, indexed, recurrent, streams
from ridgefill.models.gathered import Places, Scatter

# `model_type` of every family whose filled cache is tested to equal the exact one bit for bit.
GGUF_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
)  # GGUF files of these load too
MOE_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
HYBRID_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
WIDE_FAMILIES = ("qwen4_exp_text",)  # their layers read a mix of several residual streams
FAMILIES = (*GGUF_FAMILIES, *MOE_FAMILIES, *HYBRID_FAMILIES, *WIDE_FAMILIES)

_SINCE = {"qwen4_exp": "5.18", "qwen4_exp_text": "5.18"}  # the first transformers that has them

# Models that read images too, and the class that loads their text model alone.
_TEXT_CLASS = {
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
}


@dataclass(frozen=True)
class Rows:
    """Consecutive prompt rows as the layers need them; the same object serves every layer.

    Attributes:
        positions: [B, m] rotary positions.
        masks: the model's own attention mask, or one per layer type; a recurrent layer's is [B, m] or None.
        ropes: (cos, sin), one pair per layer type, or None for a model without rotary embeddings.
        seen: (cos, sin) of earlier turns' rows and these, for an indexer; None where no layer has one.
        tokens: for per-layer embeddings; None where no layer has them, or where they are not known.
    """

    positions: Tensor
    masks: Any
    ropes: Any
    seen: tuple[Tensor, Tensor] | None = None
    tokens: streams.Tokens | None = None

    def last(self, m: int) -> Rows:
        """The last m rows, for writing only (their masks are left out)."""
        if isinstance(self.ropes, dict):
            ropes: Any = {kind: _last(pair, m) for kind, pair in self.ropes.items()}
        else:
            ropes = _last(self.ropes, m)
        return replace(self, positions=self.positions[:, -m:], masks=None, ropes=ropes, tokens=None)


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
        self.wide = self.config.model_type in WIDE_FAMILIES
        indexers = (i for i, kind in enumerate(self._kinds) if hasattr(kind, "indexer_keys"))
        self._first_indexed = next(indexers, None)  # where the positions of all rows are kept

    @property
    def n_layers(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    @property
    def width_in(self) -> int:
        """W, the width of the state between layers: d, or all residual streams laid end to end."""
        return self.config.hidden_size * (self.config.hc_count if self.wide else 1)

    @property
    def width_out(self) -> int:
        """d, the width of a layer's input (`layer_input`)."""
        return self.config.hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, m] -> hidden states entering layer 0, [B, m, W]."""
        h = self.base.embed_tokens(ids)
        return streams.widen(self.config, h) if self.wide else h

    def rows(
        self,
        h: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        ids: Tensor | None = None,
    ) -> Rows:
        """Masks and rotary embeddings of the rows of ``h`` [B, m, d], which follow what ``cache`` holds.

        Args:
            positions: [B, m].
            attention_mask: [B, past + m] with 0 for left padding, or None.
            ids: [B, m] the rows' tokens, for models with per-layer embeddings.
        """
        # Without a cache the model would read gappy positions as packed sequences: give it an empty one.
        cache = new_cache(self.model) if cache is None else cache
        masks = create_masks_for_generate(
            self.config, h, attention_mask, position_ids=positions, **cache_kwarg(cache)
        )
        rows = Rows(positions, masks, self._ropes(h, positions))
        if self._first_indexed is not None:
            seen = indexed.seen_positions(cache.layers[self._first_indexed], positions)
            rows = replace(rows, seen=self._ropes(h, seen))
        if self.wide:
            rows = replace(rows, tokens=streams.tokens_of(self.config, ids, masks["linear_attention"]))
        return rows

    def run_layer(self, i: int, h: Tensor, rows: Rows, cache: Any = None) -> Tensor:
        """Layer i, whole: input [B, m, d] -> output; writes to ``cache`` if one is given."""
        if self.wide:
            return self._run_wide(i, h, rows, cache)
        if cache is not None and self.recurrent(i):
            cache = recurrent.OneLayer(cache, i)
        out = self.layers[i](
            h,
            attention_mask=self._of(rows.masks, i),
            position_embeddings=self._of(rows.ropes, i),
            position_ids=rows.positions,
            use_cache=cache is not None,
            **cache_kwarg(cache),
        )
        return out[0] if isinstance(out, tuple) else out

    def layer_input(
        self,
        i: int,
        h: Tensor,
        rows: Rows | None = None,
        cache: Any = None,
        at: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Tensor:
        """What layer i writes from, given the state that enters it: h itself, or the layer's mix of the streams.

        Args:
            h: [B, m, W].
            rows, cache: the rows of h and what earlier turns left (only read), for per-layer embeddings.
            at, others: as in `run_gathered_recurrent`, where h holds kept rows of ``rows``.

        Returns:
            [B, m, d].

        Raises:
            SettingError: the layer has per-layer embeddings and ``rows`` does not know its tokens.
        """
        if not self.wide:
            return h
        h = h.to(self.device(i))
        with self._among(i, at, others):
            return streams.layer_input(self.layers[i], h, None if rows is None else rows.tokens, cache)

    def recurrent(self, i: int) -> bool:
        """Whether layer i keeps a recurrent state instead of keys and values."""
        return hasattr(self._kinds[i], "recurrent_states")

    def writes(self, i: int, x: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """What attention layer i writes from input x, true or predicted.

        Args:
            x: [B, m, d], the last m of ``rows``.

        Returns:
            keys at their positions and values, [B, H, m, D] each; an indexer's keys [B, m, D_i] if it has one.
        """
        keys, values = self.project(i, x)
        own = rows if x.shape[1] == rows.positions.shape[1] else rows.last(x.shape[1])
        written = self.rotate(i, keys, own), values
        return (*written, indexed.index_keys(self.layers[i], x.to(keys.device))) if self.wide else written

    def project(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before rotary embedding and values of attention layer i, from input x [B, m, d]; [B, H, m, D]."""
        return attention.project(self.layers[i], x.to(self.device(i)))

    def given_ready(self, i: int, gives: str) -> bool:
        """Whether layer i's map gives its keys and values (`Reading.gives`), and not its input."""
        return gives == "writes" and not self.recurrent(i)

    def map_width(self, i: int, gives: str) -> int:
        """How wide layer i's map is: d, or keys and values side by side."""
        ready = self.given_ready(i, gives)
        return 2 * self.layers[i].self_attn.v_proj.out_features if ready else self.width_out

    def target(self, i: int, x: Tensor, gives: str) -> Tensor:
        """What layer i's map is fitted to (`Reading.gives`): its input x [B, m, d], or `attention.targets` of it."""
        return attention.targets(self.layers[i], x) if self.given_ready(i, gives) else x

    def finish(self, i: int, both: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """What `writes` gives, from keys (before their norm) and values side by side, [B, m, 2 H_kv D]."""
        keys, values = attention.heads(self.layers[i], *both.to(self.device(i)).chunk(2, -1))
        own = rows if both.shape[1] == rows.positions.shape[1] else rows.last(both.shape[1])
        return self.rotate(i, keys, own), values

    def rotate(self, i: int, keys: Tensor, rows: Rows) -> Tensor:
        """Layer i's keys [B, H, m, D] rotated to the positions of ``rows``."""
        pair = self._of(rows.ropes, i)
        if pair is not None:
            pair = (pair[0].to(keys.device), pair[1].to(keys.device))
        return attention.rotate(self.layers[i], keys, pair)

    def settle(self, cache: Any, positions: Tensor) -> None:
        """Call when all layers of the rows at ``positions`` [B, m] are written: keeps what is kept once for all."""
        if self._first_indexed is not None:
            indexed.settle(cache.layers[self._first_indexed], positions)

    def write_state(self, i: int, x: Tensor, rows: Rows, cache: Any, h: Tensor | None = None) -> None:
        """Carries recurrent layer i's states over x [B, m, d], true or predicted, in order, into ``cache``.

        Nothing else of the layer runs: no output projection, no MLP, no expert.

        Args:
            h: [B, m, W] state entering the layer, or in filled rows the split state: for per-layer embeddings.
        """
        x = x.to(self.device(i))
        if self.wide:
            streams.write_embeddings(
                self.layers[i], None if h is None else h.to(x.device), rows.tokens, cache
            )
        recurrent.write_state(self._normed(i), x, self._padding(rows, i, x.device), cache)

    def run_gathered_recurrent(
        self,
        i: int,
        h: Tensor,
        at: Tensor,
        x: Tensor,
        rows: Rows,
        cache: Any,
        others: Tensor | None = None,
    ) -> Tensor:
        """Recurrent layer i, whole, for the kept rows; its states pass once over all N rows, in order.

        Args:
            h: [B, k, W] true states of the kept rows.
            at: [B, k] their places among the N rows of ``rows``; a repeated place must hold the same row.
            x: [B, N, d] predicted inputs of the other rows (what it holds at kept places is ignored).
            cache: keeps the states after the last of the N rows.
            others: [B, N, W] split state of the other rows, for per-layer embeddings.

        Returns:
            [B, k, W] outputs of the kept rows.
        """
        if h.shape[1] == 0:
            self.write_state(i, x, rows, cache, others)
            return h
        where = self.device(i)
        with recurrent.gathered(self._normed(i), at.to(where), x.to(where)), self._among(i, at, others):
            return self.run_layer(i, h, rows, cache)

    def gates(self, i: int, x: Tensor, rows: Rows) -> Tensor:
        """Log-gates of recurrent layer i on x [B, m, d]: g [B, m, H_v] fp32; row t keeps exp(g_t) of the state."""
        x = x.to(self.device(i))
        return recurrent.gates(self._normed(i), x, self._padding(rows, i, x.device))

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
        logits = self.model.lm_head(self.base.hyper_connection_mixer(h) if self.wide else self.base.norm(h))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _ropes(self, h: Tensor, positions: Tensor) -> Any:
        rotary = self.base.rotary_emb
        if rotary is None:
            return None
        if self.config.model_type == "gemma3_text":
            return {kind: rotary(h, positions, kind) for kind in set(self.config.layer_types)}
        if self.config.model_type in ("qwen3_5_text", "qwen3_5_moe_text", *WIDE_FAMILIES):
            positions = positions[None].expand(3, -1, -1)  # time, height and width; text has the same in each
        return rotary(h, positions)

    def _normed(self, i: int) -> Any:
        return streams.Normed(self.layers[i].linear_attn) if self.wide else self.layers[i]

    def _run_wide(self, i: int, h: Tensor, rows: Rows, cache: Any) -> Tensor:
        layer, mask, ropes = self.layers[i], self._of(rows.masks, i), rows.ropes
        if self.recurrent(i):
            ids = None if rows.tokens is None else rows.tokens[0]
            return layer(h, ropes, conv_mask=mask, ple_input_ids=ids, **cache_kwarg(cache))
        if isinstance(cache, Scatter):
            length = cache.get_seq_length()
            seen = self._ropes(ropes[0], indexed.key_positions(mask, length))
            if isinstance(mask, Places):
                mask = indexed.IndexedPlaces.of(mask, length)
            scatter = indexed.IndexedScatter(cache)
            return layer(h, indexed.behind(seen, ropes), attention_mask=mask, **cache_kwarg(scatter))
        out = layer(h, rows.seen, attention_mask=mask, **cache_kwarg(cache))
        if cache is not None and i == self._first_indexed:
            self.settle(cache, rows.positions)
        return out

    def _among(self, i: int, at: Tensor | None, others: Tensor | None) -> AbstractContextManager[None]:
        if at is None or not self.wide:
            return nullcontext()
        where = self.device(i)
        return streams.gathered(self.layers[i], at.to(where), None if others is None else others.to(where))

    def _padding(self, rows: Rows, i: int, device: torch.device) -> Tensor | None:
        mask = self._of(rows.masks, i)
        return None if mask is None else mask.to(device)

    def _of(self, per_type: Any, i: int) -> Any:
        return per_type[self.config.layer_types[i]] if isinstance(per_type, dict) else per_type


def _last(rope: tuple[Tensor, Tensor] | None, m: int) -> tuple[Tensor, Tensor] | None:
    return None if rope is None else (rope[0][:, -m:], rope[1][:, -m:])


def refuse_unsupported(config: Any, name: str) -> None:
    """Raises UnsupportedModelError, by name, for a config that cannot be filled correctly."""
    refuse_absent(config.model_type, name)
    asked = f"fill {name} (model_type {config.model_type!r})"
    if config.model_type in _TEXT_CLASS:
        raise UnsupportedModelError(
            asked,
            "it reads images too, and only its text model can be filled",
            f"load {_TEXT_CLASS[config.model_type]}",
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


def refuse_absent(model_type: str, name: str) -> None:
    """Raises UnsupportedModelError for a model type of `WIDE_FAMILIES` that the installed transformers lacks."""
    since = _SINCE.get(model_type)
    if since is not None and Version(transformers.__version__) < Version(since):
        raise UnsupportedModelError(
            f"load {name} (model_type {model_type!r})",
            f"transformers {transformers.__version__} does not have this architecture",
            f"install transformers {since} or newer",
        )
