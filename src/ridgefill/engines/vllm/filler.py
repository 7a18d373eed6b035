"""What a runner does with a step that has rows to fill; the same for both of vLLM's runners."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ridgefill.engines.vllm import counters
from ridgefill.engines.vllm.identity import identity_of, tokenizer_of
from ridgefill.engines.vllm.joint import Kept
from ridgefill.engines.vllm.late import LateLayer
from ridgefill.engines.vllm.request import Choice, Serving, choose_of
from ridgefill.engines.vllm.rows import Part, exact_rows
from ridgefill.engines.vllm.settings import EngineSettings, serving_of
from ridgefill.engines.vllm.step import Group, Progress, SplitModel
from ridgefill.errors import RidgeFillError, UnsupportedModelError
from ridgefill.fill import Ridge
from ridgefill.maps import RidgeMaps
from ridgefill.plan import FillPlan
from ridgefill.reading import Follower
from ridgefill.rows.base import Prompt

log = logging.getLogger("vllm.ridgefill")  # vLLM's own handlers print it


@dataclass(frozen=True)
class Batch:
    """A step's requests, in the order of their rows.

    Attributes:
        names: [r] of the requests.
        starts: [r + 1] where each one's rows begin among the step's.
        computed: [r] tokens of each that earlier steps ran.
        prompts: [r] prompt tokens of each.
        tables: cache group -> vLLM's ``BlockTable``, or what has its ``get_device_tensor`` and ``block_size``.
        requests: name -> every live request, as `request.choose_of` reads it.
    """

    names: Sequence[str]
    starts: np.ndarray
    computed: np.ndarray
    prompts: np.ndarray
    tables: Mapping[int, Any]
    requests: Mapping[str, Any]


class Filler:
    """The fill of one runner.

    Args:
        runner: vLLM's, its model loaded.
        settings: the operator's; ``planned`` what `EngineSettings.plan` made of them.
    """

    def __init__(
        self, runner: Any, settings: EngineSettings, planned: tuple[FillPlan, RidgeMaps | None, int]
    ) -> None:
        self.runner = runner
        self.plan, maps, least = planned
        self.tokenizer = tokenizer_of(runner.vllm_config.model_config)
        if maps is not None:
            maps.check_identity(identity_of(runner.vllm_config.model_config, self.tokenizer))
        self.serving: Serving = serving_of(runner.vllm_config, self.plan, maps, least, settings.default)
        self.table = None if maps is None else maps.tokens
        self.whole = self.plan.joint
        off = self.serving.never is not None
        # vLLM keeps compiled code by its config; what is compiled here goes by the plan as well
        added = runner.vllm_config.additional_config
        runner.vllm_config.additional_config = {
            **added,
            "ridgefill_plan": [self.plan.split, self.serving.key],
        }
        read = maps if isinstance(self.plan.fill, Ridge) else None
        self.model = (
            None if off else SplitModel(runner.get_model(), self.plan.split, read, runner.vllm_config)
        )
        self.progress: dict[str, Progress] = {}
        self.choices: dict[str, tuple[Choice, np.ndarray | None]] = {}
        self._said: set[str] = set()
        self._groups: list[Group] | None = None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """The step's output [n, d]; None if no row of it is filled, and the stock forward can take it.

        Args:
            ids, positions: [n] as the model is given them.
        """
        self._forget(batch)
        parts = [self._part(batch, row) for row in range(len(batch.names))]
        counters.count(part for part in parts if part.start < batch.prompts[part.row])
        if not any(part.fills or part.whole for part in parts):
            return None
        progress = {p.row: self._progress_of(batch.names[p.row]) for p in parts if p.read}
        return self._model.forward(ids, positions, parts, progress, self.groups, batch.tables)

    @property
    def _model(self) -> SplitModel:
        if self.model is None:
            raise RuntimeError("a prompt is to be filled where nothing is")
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

    def _part(self, batch: Batch, row: int) -> Part:
        name, first, start = batch.names[row], int(batch.starts[row]), int(batch.computed[row])
        prompt, count = int(batch.prompts[row]), int(batch.starts[row + 1]) - first
        if start >= prompt:
            return Part(row, first, start, count, np.ones(count, bool))
        choice, chosen = self._choice(name, batch.requests[name])
        if choice.reason is not None:
            return Part(row, first, start, count, np.ones(count, bool))
        if self.whole:
            read = max(0, min(count, prompt - start))
            if start == 0:  # a preempted request starts anew
                self.progress[name] = Progress(
                    Follower(self._model.maps), kept=self._kept(batch.requests[name], choice)
                )
            return Part(row, first, start, count, np.ones(count, bool), read, whole=True)
        exact = exact_rows(start, count, prompt, choice.tail, self.plan.leading, chosen)
        read = max(0, min(count, prompt - choice.tail - start))
        if read and self._progress_of(name).reached != start:
            self.progress[name] = Progress(Follower(self._model.maps))
            # the row before came from the prefix cache, or ran in a step of the stock forward: its states are gone
            exact[0] |= start > 0 and self._model.reads_before
        return Part(row, first, start, count, exact, read)

    def _kept(self, request: Any, choice: Choice) -> Kept:
        attends = self.plan.rows is not None and self.plan.rows.attends
        layers = tuple(range(self.plan.split)) if attends else ()
        ids = torch.tensor(request.prompt_token_ids)
        return Kept(self.plan, choice.tail, ids, layers, self.tokenizer, self.table)

    def _choice(self, name: str, request: Any) -> tuple[Choice, np.ndarray | None]:
        """How the request's prompt is prefilled, and its chosen rows [m]; found once, at its first step."""
        if name not in self.choices:
            choice, chosen = choose_of(self.serving, request), None
            if choice.reason is None and self.plan.rows is not None and not self.whole:
                ids = torch.tensor(request.prompt_token_ids)
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

    def _forget(self, batch: Batch) -> None:
        """Drops what is known of requests that are gone."""
        for known in (self.progress, self.choices):
            for name in [name for name in known if name not in batch.requests]:
                del known[name]
