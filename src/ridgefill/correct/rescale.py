"""Value and key rescale, measured on every request (paper 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ridgefill.correct.base import Correction
from ridgefill.errors import SettingError
from ridgefill.fill.base import predicting

if TYPE_CHECKING:
    from ridgefill.plan import FillPlan
    from ridgefill.walk import Prefix

KEYS, VALUES = 0, 1  # places in what an attention layer writes


@dataclass(frozen=True)
class _Rescale(Correction):
    """s = mean over the first w tail rows of ||true|| / ||predicted||, per layer and key head; filled rows *= s.

    Attributes:
        window: w, the number of tail rows that are measured.
        strength: the share of the way to s that is gone; 0 changes nothing, bit for bit.
    """

    window: int = 512
    strength: float = 1.0
    which: ClassVar[int]
    reads_tail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise SettingError(
                f"a {self.name} over {self.window} tail rows", "it is a mean over rows", "give 1 or more"
            )

    def check(self, plan: FillPlan) -> None:
        """Raises SettingError where the arm predicts nothing that could be rescaled."""
        if predicting(plan.fill) is None:
            raise SettingError(
                f"a {self.name} of the {plan.fill.name!r} arm",
                "it has no filled rows to rescale",
                "use fill='ridge' or 'identity', or leave the correction out",
            )

    def written(self, prefix: Prefix, i: int, written: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The filled rows' values (or keys) times the scale."""
        measured = None if self.strength == 0 else prefix.tail_writes(i, self.window)
        if measured is None:
            return written
        true, predicted = measured
        ratio = true[self.which].float().norm(dim=-1) / predicted[self.which].float().norm(dim=-1)
        scale = 1 + self.strength * (ratio.mean(-1)[..., None, None] - 1)  # [B, H, 1, 1]
        out = list(written)
        out[self.which] = (out[self.which] * scale).to(out[self.which].dtype)
        return tuple(out)


@dataclass(frozen=True)
class ValueRescale(_Rescale):
    """The 27B's correction: filled values get the size that the tail's true values have."""

    name: ClassVar[str] = "value rescale"
    which: ClassVar[int] = VALUES


@dataclass(frozen=True)
class KeyRescale(_Rescale):
    """The same with keys, for models that do not normalise them.

    Rotary embedding keeps a key's norm, so rotated keys serve as well as those before it.
    """

    name: ClassVar[str] = "key rescale"
    which: ClassVar[int] = KEYS
