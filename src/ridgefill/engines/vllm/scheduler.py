"""`--scheduler-cls ridgefill.engines.vllm.scheduler.RidgeScheduler`: filled and exact cache blocks kept apart.

A cached block of a filled prompt holds late keys and values that no exact prompt may read, and a shorter prompt that
branches off it must not find filled rows inside its own tail. So the block hashes of a filled prompt start from the
plan's key, and a hit ends before the tail.
"""

from __future__ import annotations

from typing import Any

from ridgefill.engines.vllm import check_version

check_version()  # before what another version may have moved

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from ridgefill.engines.vllm.request import Choice, Serving, choose_of  # noqa: E402
from ridgefill.engines.vllm.settings import EngineSettings, serving_of  # noqa: E402


class _Apart:
    """Mixed into a stock scheduler."""

    serving: Serving | None = None
    hash_block_size: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        settings = EngineSettings.of(vllm_config.additional_config)
        if settings is not None:
            plan, maps, least = settings.plan(vllm_config.model_config.hf_text_config.num_hidden_layers)
            self.serving = serving_of(vllm_config, plan, maps, least, settings.default)

    def add_request(self, request: Any) -> None:
        """As the stock scheduler, once a filled prompt's blocks have hashes of their own."""
        choice = self._choice(request)
        if self.serving is not None and choice is not None and choice.reason is None:
            salts = (request.cache_salt, f"ridgefill {self.serving.key} tail {choice.tail}")
            request.cache_salt = " ".join(salt for salt in salts if salt)
            request.block_hashes.clear()
            request.update_block_hashes()
            if self.serving.alone:
                request.skip_reading_prefix_cache = True
        super().add_request(request)  # type: ignore[misc]

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        choice = self._choice(request)
        if choice is None or choice.reason is not None:
            return super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        hashes = request.block_hashes
        before_tail = max(0, request.num_prompt_tokens - choice.tail)
        request.block_hashes = hashes[: before_tail // self.hash_block_size]
        try:
            return super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        finally:
            request.block_hashes = hashes

    def _choice(self, request: Any) -> Choice | None:
        """As the workers choose; None where the fill is not set up."""
        return None if self.serving is None else choose_of(self.serving, request)


class _Sync(_Apart, Scheduler):
    pass


class _Async(_Apart, AsyncScheduler):
    pass


class RidgeScheduler(Scheduler):
    """Whichever of vLLM's two schedulers the server's settings ask for, with blocks kept apart."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes one of the two; neither is a subclass of this, so that it is made once."""
        kind = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
        return kind(vllm_config, *args, **kwargs)
