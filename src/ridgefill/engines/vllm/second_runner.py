"""vLLM's second model runner, the default on GPUs. **Untested**: it needs Triton, and no GPU was at hand.

Behind ``"untested_v2": true`` and ``--enforce-eager``: it calls the model itself in eager steps alone, and
graphs would pass us by. The step (`filler.py`) is the first runner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgefill.engines.vllm.filler import Batch, Filler


@dataclass(frozen=True)
class GatheredTable:
    """One cache group's block table of a step, [requests, blocks], in the order of its rows."""

    rows: Tensor
    block_size: int

    def get_device_tensor(self, count: int) -> Tensor:
        """The first ``count`` requests'."""
        return self.rows[:count]


@dataclass(frozen=True)
class LiveRequest:
    """A request as `request.choose_of` reads it."""

    prompt_token_ids: Any
    num_prompt_tokens: int
    sampling_params: Any
    mm_features: Any
    prompt_embeds: Any


class SecondRidgeRunner:
    """Mixed into the second runner: remembers each step's batch, and takes the model's call where rows are filled."""

    ridge_given: tuple[Any, Any]
    ridge: Filler | None = None
    _step: Any = None
    _tables: Any = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As the stock runner; then the maps, as `worker.RidgeRunner`."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.ridge_requests: dict[str, LiveRequest] = {}
        self.ridge = Filler(self, *self.ridge_given)
        stock = self.model.forward  # type: ignore[attr-defined]

        def forward(input_ids: Any = None, positions: Any = None, *rest: Any, **more: Any) -> Any:
            if self._step is not None and input_ids is not None and more.get("inputs_embeds") is None:
                filled = self.ridge.forward(input_ids, positions, self._batch())  # type: ignore[union-attr]
                if filled is not None:
                    return filled
            return stock(input_ids, positions, *rest, **more)

        self.model.forward = forward  # type: ignore[attr-defined]

    def add_requests(self, scheduler_output: Any) -> None:
        """As the stock runner, which forgets what a request was once it has taken it apart."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            self.ridge_requests[new.req_id] = LiveRequest(
                new.prompt_token_ids,
                new.prompt_len,
                new.sampling_params,
                new.mm_features,
                new.prompt_embeds,
            )

    def prepare_attn(self, input_batch: Any) -> Any:
        """As the stock runner; remembers the batch and its block tables."""
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        self._step, self._tables = input_batch, tables
        return tables, slots

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock runner; a batch is remembered for its own step alone."""
        live = self.req_states.req_id_to_index  # type: ignore[attr-defined]
        for name in [name for name in self.ridge_requests if name not in live]:
            del self.ridge_requests[name]
        try:
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._step = self._tables = None

    def _batch(self) -> Batch:
        step, states = self._step, self.req_states  # type: ignore[attr-defined]
        sizes = self.block_tables.block_sizes  # type: ignore[attr-defined]
        tables = {g: GatheredTable(t, sizes[g]) for g, t in enumerate(self._tables)}
        return Batch(
            step.req_ids,
            step.query_start_loc_np,
            step.num_computed_tokens_np,
            states.prompt_len.np[step.idx_mapping_np],
            tables,
            self.ridge_requests,
        )
