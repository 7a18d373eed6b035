"""The states that the late rows are computed from: which ones, and what maps read of them (`ridgefill.reading`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgefill.engines.llamacpp.gguf_model import GgufModel
from ridgefill.engines.llamacpp.late_rows import READ, LateRows
from ridgefill.engines.llamacpp.stopped import StoppedContext
from ridgefill.fill import Ridge
from ridgefill.plan import FillPlan
from ridgefill.reading import Follower


@dataclass(frozen=True)
class Sources:
    """What one fill reads.

    Attributes:
        model: the file, whose embedding is what enters layer 0.
        plan: what is filled.
        late: the late rows, None where nothing is filled.
    """

    model: GgufModel
    plan: FillPlan
    late: LateRows | None

    @property
    def reads(self) -> bool:
        """Whether the maps read more than the split state as it is."""
        return self.late is not None and READ in self.late.sources

    @property
    def layers(self) -> set[int]:
        """Layers whose entering states are wanted of llama.cpp."""
        late = set() if self.late is None else set(self.late.sources)
        read = self.plan.fill.maps.reading.layers if self.reads and isinstance(self.plan.fill, Ridge) else ()
        return (late | set(read)) - {READ, 0}

    def lead(self, context: StoppedContext, tokens: Sequence[int], past: int) -> dict[int, np.ndarray]:
        """Runs the leading rows; the last one's states, [1, d] each, for maps that read the row before."""
        if not tokens:
            return {}
        if not self.reads:
            context.decode(tokens, past)
            return {}
        states = context.inputs_of(self.layers, tokens, past, stop=False)
        return {i: h[-1:] for i, h in states.items()}

    def read(
        self,
        states: Mapping[int, np.ndarray],
        before: Mapping[int, np.ndarray],
        ids: Sequence[int],
        first: int,
    ) -> np.ndarray:
        """What the maps read of the filled rows, [m, K].

        Args:
            states: of rows ``first``, ``first`` + 1, ...; before: of the row before them, or nothing.
            ids: of the prompt.
        """
        maps, stop = self.plan.fill.maps, first + len(states[self.plan.split])  # type: ignore[attr-defined]
        follower = Follower(maps)
        for part, a, b in ((before, first - 1, first), (states, first, stop)):
            if part:
                known = {**part, 0: self.model.embed(ids[a:b])}
                found = follower.of({i: torch.from_numpy(known[i])[None] for i in maps.reading.layers})
        return np.asarray(found[0].numpy())
