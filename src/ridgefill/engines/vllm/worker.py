"""`--worker-cls ridgefill.engines.vllm.worker.RidgeWorker`: the platform's own worker, whose runner fills."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ridgefill.engines.vllm import check_version

check_version()  # before what another version may have moved

from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402

from ridgefill.engines.vllm import counters  # noqa: E402
from ridgefill.engines.vllm.identity import identity_of, tokenizer_of  # noqa: E402
from ridgefill.engines.vllm.joint import Kept  # noqa: E402
from ridgefill.engines.vllm.late import LateLayer  # noqa: E402
from ridgefill.engines.vllm.request import Choice, Serving, choose_of  # noqa: E402
from ridgefill.engines.vllm.rows import Part, exact_rows  # noqa: E402
from ridgefill.engines.vllm.settings import EngineSettings, refuse_engine, serving_of  # noqa: E402
from ridgefill.engines.vllm.step import Group, Progress, SplitModel  # noqa: E402
from ridgefill.errors import RidgeFillError, UnsupportedModelError  # noqa: E402
from ridgefill.fill import Ridge  # noqa: E402
from ridgefill.reading import Follower  # noqa: E402
from ridgefill.rows.base import Prompt  # noqa: E402

log = logging.getLogger("vllm.ridgefill")  # vLLM's own handlers print it

_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
_Worker: Any = resolve_obj_by_qualname(_WORKERS["cpu" if current_platform.is_cpu() else "cuda"])


class RidgeWorker(_Worker):
    """The stock worker; once its runner is made, that runner fills."""

    def init_device(self) -> None:
        """As the stock worker, after what the fill cannot honour was refused by name."""
        settings = EngineSettings.of(self.vllm_config.additional_config)
        if settings is not None:
            layers = self.vllm_config.model_config.hf_text_config.num_hidden_layers
            refuse_engine(self.vllm_config, settings.plan(layers)[0])
        super().init_device()
        if settings is not None:
            stock = type(self.model_runner)
            self.model_runner.__class__ = type(f"Ridge{stock.__name__}", (RidgeRunner, stock), {})
            self.model_runner.ridge_settings = settings


class RidgeRunner:
    """Mixed into the stock runner: loads the maps after the model, and takes steps that have rows to fill."""

    ridge_settings: EngineSettings
    ridge: Filler | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As the stock runner; then the maps, which are compared with the model.

        Raises:
            MapsMismatchError, MapsFileError, SettingError: by name; the server does not start.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.ridge = Filler(self, self.ridge_settings)

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        if self.ridge is not None and input_ids is not None and inputs_embeds is None:
            filled = self.ridge.forward(input_ids, positions)
            if filled is not None:
                return filled
        return super()._model_forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **more
        )


class Filler:
    """The fill of one runner.

    Args:
        runner: vLLM's, its model loaded.
        settings: the operator's.
    """

    def __init__(self, runner: Any, settings: EngineSettings) -> None:
        self.runner = runner
        config = runner.vllm_config.model_config.hf_text_config
        self.plan, maps, least = settings.plan(config.num_hidden_layers)
        self.tokenizer = tokenizer_of(runner.vllm_config.model_config)
        if maps is not None:
            maps.check_identity(identity_of(runner.vllm_config.model_config, self.tokenizer))
        self.serving: Serving = serving_of(runner.vllm_config, self.plan, maps, least, settings.default)
        self.table = None if maps is None else maps.tokens
        self.whole = self.plan.joint
        off = self.serving.never is not None
        read = maps if isinstance(self.plan.fill, Ridge) else None
        self.model = None if off else SplitModel(runner.get_model(), self.plan.split, read)
        self.progress: dict[str, Progress] = {}
        self.choices: dict[str, tuple[Choice, np.ndarray | None]] = {}
        self._said: set[str] = set()
        self._groups: list[Group] | None = None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The step's output [n, d]; None if no row of it is filled, and the stock forward can take it."""
        runner = self.runner
        names = runner.input_batch.req_ids
        self._forget()
        starts = runner.query_start_loc.np[: len(names) + 1]
        parts = [
            self._part(row, name, int(starts[row]), int(starts[row + 1])) for row, name in enumerate(names)
        ]
        prompts = runner.input_batch.num_prompt_tokens
        counters.count(part for part in parts if part.start < prompts[part.row])
        if not any(part.fills or part.whole for part in parts):
            return None
        progress = {p.row: self._progress_of(names[p.row]) for p in parts if p.read}
        tables = {group.number: runner.input_batch.block_table[group.number] for group in self.groups}
        return self._model.forward(ids, positions, parts, progress, self.groups, tables)

    @property
    def _model(self) -> SplitModel:
        assert self.model is not None  # noqa: S101 - `forward` has returned otherwise
        return self.model

    @property
    def groups(self) -> list[Group]:
        """The late layers, by cache group; known once the cache is made."""
        if self._groups is None:
            late = {layer.name for layer in self._model.late if isinstance(layer, LateLayer)}
            found = list[Group]()
            for number, kinds in enumerate(self.runner.attn_groups):
                for kind in kinds:
                    own = tuple(name for name in kind.layer_names if name in late)
                    if own and kind.backend.forward_includes_kv_cache_update:
                        raise UnsupportedModelError(
                            f"the fill with {kind.backend.get_name()} attention",
                            "it writes keys and values with the attention, and filled rows have none",
                            "choose another --attention-backend",
                        )
                    if own:
                        found.append(Group(number, kind, own))
            self._groups = found
        return self._groups

    def _part(self, row: int, name: str, first: int, stop: int) -> Part:
        runner = self.runner
        start = int(runner.input_batch.num_computed_tokens_cpu[row])
        prompt = int(runner.input_batch.num_prompt_tokens[row])
        count = stop - first
        if start >= prompt:
            return Part(row, first, start, count, np.ones(count, bool))
        choice, chosen = self._choice(name)
        if choice.reason is not None:
            return Part(row, first, start, count, np.ones(count, bool))
        if self.whole:
            read = max(0, min(count, prompt - start))
            if start == 0:  # a preempted request starts anew
                self.progress[name] = Progress(Follower(self._model.maps), kept=self._kept(name, choice))
            return Part(row, first, start, count, np.ones(count, bool), read, whole=True)
        exact = exact_rows(start, count, prompt, choice.tail, self.plan.leading, chosen)
        read = max(0, min(count, prompt - choice.tail - start))
        if read and self._progress_of(name).reached != start:
            self.progress[name] = Progress(Follower(self._model.maps))
            # the row before came from the prefix cache, or ran in a step of the stock forward: its states are gone
            exact[0] |= start > 0 and self._model.reads_before
        return Part(row, first, start, count, exact, read)

    def _kept(self, name: str, choice: Choice) -> Kept:
        attends = self.plan.rows is not None and self.plan.rows.attends
        layers = tuple(range(self.plan.split)) if attends else ()
        ids = torch.tensor(self.runner.requests[name].prompt_token_ids)
        return Kept(self.plan, choice.tail, ids, layers, self.tokenizer, self.table)

    def _choice(self, name: str) -> tuple[Choice, np.ndarray | None]:
        """How the request's prompt is prefilled, and its chosen rows [m]; found once, at its first step."""
        if name not in self.choices:
            state = self.runner.requests[name]
            choice, chosen = choose_of(self.serving, state), None
            if choice.reason is None and self.plan.rows is not None and not self.whole:
                ids = torch.tensor(state.prompt_token_ids)
                prompt = Prompt(ids, len(ids) - choice.tail, self.plan.leading, self.tokenizer, self.table)
                try:
                    chosen = self.plan.rows.select(prompt).numpy()
                except RidgeFillError as error:
                    choice = Choice(choice.tail, str(error), said=True)
            if choice.said and choice.reason not in self._said:
                self._said.add(str(choice.reason))
                log.warning("this prompt runs exactly: %s", choice.reason)
            counters.count_prompt(choice.reason is None)
            self.choices[name] = choice, chosen
        return self.choices[name]

    def _progress_of(self, name: str) -> Progress:
        if name not in self.progress:
            self.progress[name] = Progress(Follower(self._model.maps))
        return self.progress[name]

    def _forget(self) -> None:
        """Drops what is known of requests that are gone."""
        for known in (self.progress, self.choices):
            for name in [name for name in known if name not in self.runner.requests]:
                del known[name]
