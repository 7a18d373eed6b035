"""`--logits-processors ridgefill.engines.vllm.params:RidgeParams`: wrong request fields are refused with HTTP 400.

vLLM asks a logits processor to look over every request's fields before it is admitted; this one touches no logits.
"""

from __future__ import annotations

from typing import Any

from ridgefill.engines.vllm import check_version

check_version()  # before what another version may have moved

from vllm.v1.sample.logits_processor import LogitsProcessor  # noqa: E402

from ridgefill.engines.vllm.request import read  # noqa: E402


class RidgeParams(LogitsProcessor):
    """Looks over ``ridgefill`` and ``ridgefill_tail``."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises SettingError, a ValueError, for a value that `request.read` does not know."""
        read(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True, so that greedy sampling does not even ask."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Keeps nothing."""
