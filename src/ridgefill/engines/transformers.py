"""``with filling(model, maps):`` makes ``model.generate`` and pipelines fill, unchanged.

A hook before the model's forward sees a long prompt, writes the cache for all of it but the tail, and hands the
model the tail alone. Sampling, beam search, streaming and stopping stay the model's own. Whatever cannot be filled
correctly runs exactly, and `Filling.stats` and the log say why.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ridgefill.compat import CACHE_ARG, new_cache, take_cache
from ridgefill.devices import wait
from ridgefill.errors import PromptError, SettingError
from ridgefill.fill import Ridge
from ridgefill.measured import recall
from ridgefill.models import tail_attention
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from ridgefill.prefill import check_prompt, fill_prompt
from ridgefill.rows.request import Request, Span
from ridgefill.settings_file import with_setting
from ridgefill.stats import PrefillStats, exact_stats

if TYPE_CHECKING:
    from types import TracebackType

    from ridgefill.correct import Correction
    from ridgefill.fill import Fill
    from ridgefill.maps import RidgeMaps
    from ridgefill.rows.base import Selector

log = logging.getLogger("ridgefill")

# Below this many fillable rows two passes over the weights cost more than they save, until `ridgefill check` has
# measured the real figure on the machine.
UNMEASURED_BREAK_EVEN = 256
_PER_ROW_OUTPUTS = ("output_hidden_states", "output_attentions")


class Filling:
    """A model whose long prompts are filled, while the ``with`` block lasts.

    Attributes:
        plan: what is filled.
        min_tokens: shorter prompts run exactly.
        stats: `PrefillStats` of the last prompt, None before the first.
        question: rows [first, stop) of the next prompts' question, for selectors; None: they end with it.
    """

    def __init__(self, model: Any, plan: FillPlan, min_tokens: int, tokenizer: Any = None) -> None:
        self.decoder, self.plan, self.min_tokens = Decoder(model), plan, max(min_tokens, plan.shortest)
        self.stats: PrefillStats | None = None
        self.tokenizer = tokenizer
        self.question: Span | Sequence[Span] | None = None
        self._handles: list[Any] = []
        self._tail_began: float | None = None
        self._said: set[str] = set()
        # The no-fill arm needs the stock mask, to hide rows in it; exact and true promise the stock model's bits.
        fast = plan.fill.name not in ("none", "exact", "true") and tail_attention.usable(model)
        self._tail_attention = tail_attention.TailAttention(model) if fast else None

    def __enter__(self) -> Filling:
        model = self.decoder.model
        if getattr(model, "_ridgefill", None) is not None:
            raise SettingError(
                "a second `filling` on the same model",
                "the first is still on",
                "leave the first `with` block first",
            )
        model._ridgefill = self
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self.decoder.model._ridgefill

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if args:
            kwargs = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        ids: Any = kwargs.get("input_ids")
        cache = take_cache(kwargs)
        past = 0 if cache is None else cache.get_seq_length()
        self._tail_began = None
        if ids is not None and ids.shape[1] == 1 and past > 0:
            return None  # a decoding step: exact, as it comes
        reason = self._why_exact(ids, cache, kwargs)
        if reason is None:
            try:
                mask, positions = check_prompt(ids, kwargs.get("attention_mask"), past, model.config)
            except PromptError as error:
                reason = f"{error.asked}: {error.why}"
            else:
                if not _as_counted(kwargs.get("position_ids"), positions, mask):
                    reason = "its position_ids are not those that the mask counts"
        if reason is not None:
            self._run_exactly(ids, kwargs.get("attention_mask"), reason)
            return None
        cache = new_cache(model) if cache is None else cache
        kwargs.pop("past_key_values", None)  # the older name, if that is how the cache came
        kwargs |= {"use_cache": True, CACHE_ARG: cache}
        request = Request(self.tokenizer, self.plan.table, self.question)
        self.stats = fill_prompt(self.decoder, self.plan, ids, positions, mask, cache, request)
        left = self.plan.left_to_model
        kwargs["input_ids"] = ids[:, -left:]
        kwargs["position_ids"] = positions[:, -left:]
        self._tail_began = time.perf_counter()
        if self._tail_attention is not None and not torch.is_grad_enabled():  # its merge has no gradient
            self._tail_attention.on()
        return (), kwargs

    def _after(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._tail_attention is not None:
            self._tail_attention.off()
        if self._tail_began is not None and self.stats is not None:
            wait(model.device)
            self.stats.seconds["tail"] = time.perf_counter() - self._tail_began
            self._tail_began = None

    def _why_exact(self, ids: Tensor | None, cache: Any, kwargs: dict[str, Any]) -> str | None:
        """Why this call must run exactly, or None."""
        if ids is None or kwargs.get("inputs_embeds") is not None:
            return "the prompt comes as embeddings (images, soft prompts), not as tokens"
        if self.decoder.model.training:
            return "the model is in training mode"
        if kwargs.get("labels") is not None or not _last_logit_only(kwargs.get("logits_to_keep", 0)):
            return "logits of prompt tokens were asked for, and filled rows have none"
        asked = (kwargs.get(k, getattr(self.decoder.config, k, False)) for k in _PER_ROW_OUTPUTS)
        if any(asked):
            return "hidden states or attentions of prompt rows were asked for, and filled rows have none"
        if kwargs.get("use_cache") is False:
            return "the cache is off (use_cache=False)"
        if cache is not None and not (isinstance(cache, DynamicCache) and not cache.offloading):
            return f"a {type(cache).__name__} cannot be filled, only a DynamicCache on its device"
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            return "the attention mask is not the usual [batch, tokens] one"
        if self.plan.fill.name in ("none", "true") and cache is not None and cache.get_seq_length() > 0:
            return f"the {self.plan.fill.name!r} arm only fills an empty cache"
        if ids.shape[1] < self.min_tokens:
            return f"a prompt shorter than {self.min_tokens} tokens does not pay"
        return None

    def _run_exactly(self, ids: Tensor | None, mask: Any, reason: str) -> None:
        if not (isinstance(mask, Tensor) and mask.ndim == 2):
            mask = None
        self.stats = PrefillStats(reason=reason) if ids is None else exact_stats(ids, mask, reason)
        expected = reason.endswith("does not pay")
        if reason not in self._said:
            log.log(logging.INFO if expected else logging.WARNING, "this prompt runs exactly: %s", reason)
            self._said.add(reason)


def filling(
    model: Any,
    maps: RidgeMaps | None = None,
    *,
    preset: str | None = None,
    tail: int | None = None,
    leading: int | None = None,
    fill: str | Fill | None = None,
    split: int | float | None = None,
    rows: Selector | str | None = None,
    corrections: Sequence[Correction] | str | None = None,
    min_tokens: int | None = None,
    tokenizer: Any = None,
    setting: str | Path | None = None,
) -> Filling:
    """A context manager within which ``model.generate`` and pipelines fill long prompts (paper 2.1).

    ::

        with ridgefill.filling(model, maps, tail=1024) as f:
            out = model.generate(**inputs, max_new_tokens=128)
        print(f.stats)

    Args:
        model: a causal LM of a supported family.
        maps: fitted maps; needed by ``fill="ridge"``.
        preset, tail, leading, fill, split, rows, corrections: as in `ridgefill.prefill`.
        min_tokens: shorter prompts run exactly; the default is what ``ridgefill check`` measured for these maps
            on this machine, or the tail and 256 rows more.
        tokenizer: for selectors that read text; checked against the one that the maps were fitted with.
        setting: a file that `ridgefill tune` wrote; what is named beside it takes precedence.

    Raises:
        UnsupportedModelError, MapsMismatchError, SettingError: by name, before anything runs.
    """
    given = {
        "preset": preset,
        "fill": fill,
        "split": split,
        "tail": tail,
        "leading": leading,
        "rows": rows,
        "corrections": corrections,
    }
    maps, chosen, tuned = with_setting(setting, maps, given)
    plan = make_plan(Decoder(model).n_layers, maps, **chosen)
    min_tokens = tuned if min_tokens is None else min_tokens
    if maps is not None:
        maps.check_model(model, tokenizer)
    if min_tokens is None:
        measured = (
            recall(maps, plan, model.device) if isinstance(plan.fill, Ridge) and maps is not None else None
        )
        min_tokens = measured or plan.tail + plan.leading + UNMEASURED_BREAK_EVEN
    return Filling(model, plan, min_tokens, tokenizer)


def _last_logit_only(logits_to_keep: Any) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 1


def _as_counted(given: Tensor | None, counted: Tensor, mask: Tensor | None) -> bool:
    """Whether position_ids [B, n], if given, are ``counted`` [B, n] on every real token."""
    if given is None:
        return True
    if given.shape[-1] != counted.shape[1]:
        return False
    other = given.to(counted.device) != counted
    return not bool((other if mask is None else other & mask[:, -counted.shape[1] :].bool()).any())
