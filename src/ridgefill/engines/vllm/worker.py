"""`--worker-cls ridgefill.engines.vllm.worker.RidgeWorker`: the platform's own worker, whose runner fills."""

from __future__ import annotations

from typing import Any

import torch

from ridgefill.engines.vllm import check_version

check_version()  # before what another version may have moved

from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402

from ridgefill.engines.vllm.filler import Batch, Filler  # noqa: E402
from ridgefill.engines.vllm.settings import EngineSettings, refuse_engine  # noqa: E402

_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
_Worker: Any = resolve_obj_by_qualname(_WORKERS["cpu" if current_platform.is_cpu() else "cuda"])


class RidgeWorker(_Worker):
    """The stock worker; once its runner is made, that runner fills."""

    def init_device(self) -> None:
        """As the stock worker, after what the fill cannot honour was refused by name."""
        settings = EngineSettings.of(self.vllm_config.additional_config)
        if settings is not None:
            planned = settings.plan(self.vllm_config.model_config.hf_text_config.num_hidden_layers)
            refuse_engine(self.vllm_config, planned[0], settings.untested_v2)
        super().init_device()
        if settings is not None:
            stock = type(self.model_runner)
            ours: type = RidgeRunner
            if self.vllm_config.use_v2_model_runner:
                from ridgefill.engines.vllm.second_runner import SecondRidgeRunner as ours
            self.model_runner.__class__ = type(f"Ridge{stock.__name__}", (ours, stock), {})
            self.model_runner.ridge_given = settings, planned


class RidgeRunner:
    """Mixed into the stock runner: loads the maps after the model, and takes steps that have rows to fill."""

    ridge_given: tuple[Any, Any]  # the operator's settings, and their plan
    ridge: Filler | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As the stock runner; then the maps, which are compared with the model.

        Raises:
            MapsMismatchError, MapsFileError, SettingError: by name; the server does not start.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.ridge = Filler(self, *self.ridge_given)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """As the stock runner; what is compiled for filled steps is compiled here too."""
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        if self.ridge is not None and self.ridge.model is not None:
            with torch.inference_mode():
                self.ridge.model.warm_up(self.max_num_tokens)  # type: ignore[attr-defined]

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        if self.ridge is not None and input_ids is not None and inputs_embeds is None:
            filled = self.ridge.forward(input_ids, positions, self._batch())
            if filled is not None:
                return filled
        return super()._model_forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **more
        )

    def _batch(self) -> Batch:
        batch, requests = self.input_batch, self.requests  # type: ignore[attr-defined]
        count = len(batch.req_ids)
        return Batch(
            batch.req_ids,
            self.query_start_loc.np[: count + 1],  # type: ignore[attr-defined]
            batch.num_computed_tokens_cpu,
            batch.num_prompt_tokens,
            dict(enumerate(batch.block_table.block_tables)),
            requests,
        )
