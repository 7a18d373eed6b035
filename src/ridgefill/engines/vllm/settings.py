"""What the operator asks of the vLLM engine: `--additional-config '{"ridgefill": {...}}'`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ridgefill.correct import TerminalState
from ridgefill.engines.arms import refuse_arm
from ridgefill.engines.transformers import UNMEASURED_BREAK_EVEN
from ridgefill.engines.vllm.request import Serving
from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.fill import Exact
from ridgefill.maps import RidgeMaps
from ridgefill.plan import FillPlan, make_plan
from ridgefill.settings_file import with_setting

ATTENTION = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
)
HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
FAMILIES = (*ATTENTION, *HYBRIDS)
_EXACT = "leave it out, or serve without the fill"


@dataclass(frozen=True)
class EngineSettings:
    """The value of ``ridgefill`` in vLLM's ``--additional-config``.

    Attributes:
        maps: a folder or hub name; the ridge fill needs them.
        fill: "ridge", "identity" or "exact".
        split, tail, leading, preset, rows, corrections, setting: as in `ridgefill.filling`.
        min_tokens: shorter prompts run exactly; the tail, the leading rows and 256 more unless named.
        stream: each layer's map is copied to the device when it is used.
        default: whether a request that says nothing is filled.
        untested_v2: also run in vLLM's second model runner, where nothing was ever run.
    """

    maps: str | None = None
    fill: str | None = None
    split: int | float | None = None
    tail: int | None = None
    leading: int | None = None
    preset: str | None = None
    rows: str | None = None
    corrections: str | None = None
    setting: str | None = None
    min_tokens: int | None = None
    stream: bool = False
    default: bool = True
    untested_v2: bool = False

    @classmethod
    def of(cls, additional: Any) -> EngineSettings | None:
        """Reads vLLM's ``additional_config``; None where it does not speak of the fill.

        Raises:
            SettingError: an unknown name, or a value of another kind.
        """
        given = additional.get("ridgefill") if isinstance(additional, Mapping) else None
        if given is None:
            return None
        if isinstance(given, str):
            given = {"maps": given}
        known = [f.name for f in fields(cls)]
        if not isinstance(given, Mapping) or (strange := [name for name in given if name not in known]):
            raise SettingError(
                f"--additional-config with ridgefill {json.dumps(given)}",
                "it is not an object"
                if not isinstance(given, Mapping)
                else f"no setting is named {strange[0]}",
                f"use {', '.join(known)}, or the flags that `ridgefill vllm-args` prints",
            )
        for name in ("tail", "leading", "min_tokens"):
            value = given.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise SettingError(
                    f"{name}={value!r} in --additional-config", "it is a count", "give a number"
                )
        for name in ("stream", "default", "untested_v2"):
            if not isinstance(given.get(name, False), bool):
                raise SettingError(
                    f"{name}={given[name]!r} in --additional-config", "it is on or off", "give true or false"
                )
        return cls(**given)

    def plan(self, n_layers: int) -> tuple[FillPlan, RidgeMaps | None, int]:
        """The plan, its maps, and the shortest prompt that is filled.

        Raises:
            SettingError, MapsFileError: by name, as `ridgefill.filling`; and what vLLM's engine cannot do.
        """
        loaded = None if self.maps is None else RidgeMaps.load(self.maps)
        wanted = {
            "preset": self.preset, "fill": self.fill, "split": self.split, "tail": self.tail,
            "leading": self.leading, "rows": self.rows, "corrections": self.corrections,
        }  # fmt: skip
        loaded, chosen, tuned = with_setting(self.setting, loaded, wanted)
        plan = make_plan(n_layers, loaded, **chosen)
        refuse_plan(plan)
        if loaded is not None:
            loaded.streamed = self.stream
        least = self.min_tokens if self.min_tokens is not None else tuned
        least = plan.shortest - 1 + UNMEASURED_BREAK_EVEN if least is None else least
        return plan, loaded, max(least, plan.shortest)


def key_of(plan: FillPlan, maps: RidgeMaps | None) -> str:
    """What tells cached blocks of this plan from any other's, the tail apart."""
    said = {**plan.to_json(), "maps": None if maps is None else maps.content_hash}
    said.pop("tail")
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def serving_of(config: Any, plan: FillPlan, maps: RidgeMaps | None, least: int, default: bool) -> Serving:
    """What every request is judged by.

    Args:
        config: a ``VllmConfig``.
        least: the shortest prompt that is filled.
        default: whether a request that says nothing is filled.
    """
    never = None
    if isinstance(plan.fill, Exact):
        never = "the fill is off (fill='exact')"
    elif config.speculative_config is not None:
        never = "speculative decoding is on, and drafts may read what filled rows do not have"
    alone = plan.joint or (plan.rows is not None and plan.rows.query_aware)
    return Serving(key_of(plan, maps), plan.tail, plan.leading, least, default, never, alone)


def refuse_plan(plan: FillPlan) -> None:
    """Raises SettingError for what a plan asks and this engine cannot do."""
    refuse_arm(plan.fill, "in vLLM")
    if plan.rows is not None and plan.rows.probes:
        raise SettingError(
            f"rows chosen by {plan.rows} in vLLM",
            "the probe attends to the fill and to its own rows, but not to the rest of the tail between them, "
            "and paged attention reads every key before a row",
            "choose rows by the lower layers, such as attention(0.10), or use the transformers engine",
        )
    if any(isinstance(correction, TerminalState) for correction in plan.corrections):
        raise SettingError(
            "terminal_state in vLLM",
            "recurrent states are carried there by vLLM's own kernels, which say nothing of a filled row's share",
            "leave it out, or use the transformers engine",
        )


def refuse_engine(config: Any, plan: FillPlan, untested_v2: bool = False) -> None:
    """Raises for what vLLM was started with and the fill cannot honour.

    Args:
        config: a ``VllmConfig``.
        plan: the operator's.
        untested_v2: the second runner is wanted all the same.

    Raises:
        UnsupportedModelError, SettingError: by name.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"fill {model.architecture} in vLLM", f"it is none of {', '.join(FAMILIES)}", _EXACT
        )
    quantized = model.quantization
    cache_type = config.cache_config.cache_dtype
    refused = {
        f"--quantization {quantized}": (quantized, "late keys and values were never compared on packed weights"),
        f"--kv-cache-dtype {cache_type}": (
            cache_type != "auto", "filled rows of that cache type were never written and compared"
        ),
        "LoRA adapters": (config.lora_config, "the maps were fitted without them"),
        "pipeline parallelism": (
            parallel.pipeline_parallel_size > 1, "the split state and the late layers would be on other ranks"
        ),
        "context parallelism": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "a row's cache slot is then on another rank",
        ),
        "data parallelism": (
            getattr(parallel, "data_parallel_size", 1) > 1, "ranks that wait for one another were never tested"
        ),
        "expert parallelism": (
            getattr(parallel, "enable_expert_parallel", False), "its ranks expect the same rows in every layer"
        ),
        "dual batch overlap": (parallel.enable_dbo, "a step's rows come in two halves"),
        "a KV connector": (config.kv_transfer_config, "it would carry filled rows to requests that want exact ones"),
    }  # fmt: skip
    for asked, (given, why) in refused.items():
        if given:
            raise SettingError(f"{asked} with the fill in vLLM", why, _EXACT)
    if model.architecture in HYBRIDS:
        if plan.joint:
            raise SettingError(
                f"{plan.rows or 'corrections'} with {model.architecture} in vLLM",
                "recurrent states are carried chunk by chunk, and the tail comes in the last one",
                "choose rows that read tokens only, such as protected(0.25), or use the transformers engine",
            )
        if config.cache_config.enable_prefix_caching:
            raise SettingError(
                f"the prefix cache with {model.architecture} and the fill",
                "cached recurrent states of filled rows were never tested",
                "add --no-enable-prefix-caching",
            )
    kinds = getattr(model.hf_text_config, "layer_types", None)
    windowed = model.get_sliding_window() is not None if kinds is None else "sliding_attention" in kinds
    if plan.joint and windowed:
        raise SettingError(
            f"{plan.rows or 'corrections'} with {model.architecture} in vLLM",
            "layers with a sliding window have given back the rows before it when the tail is there",
            "leave them out, make the tail longer, or use the transformers engine",
        )
    caching = config.cache_config.enable_prefix_caching
    if caching and "ridgefill" not in str(config.scheduler_config.scheduler_cls):
        raise SettingError(
            "the prefix cache with the fill in vLLM",
            "vLLM's own scheduler would hand filled blocks to requests that want exact ones",
            "add --scheduler-cls ridgefill.engines.vllm.scheduler.RidgeScheduler (`ridgefill vllm-args` prints it), "
            "or --no-enable-prefix-caching",
        )
    if config.use_v2_model_runner and not (untested_v2 and model.enforce_eager):
        raise SettingError(
            "vLLM's second model runner with the fill",
            "it was never run there: it needs a GPU, and none was at hand",
            "set VLLM_USE_V2_MODEL_RUNNER=0; to try it untested, --enforce-eager and "
            '"untested_v2": true beside the maps',
        )
