"""What a correction is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from ridgefill.plan import FillPlan
    from ridgefill.walk import Prefix


class Correction:
    """Base of every correction: a frozen dataclass that changes what filled rows wrote.

    Attributes:
        name: what users know it by.
        reads_tail: it measures on the tail's rows, so that they run together with the fill.
    """

    name: ClassVar[str]
    reads_tail: ClassVar[bool] = False

    def check(self, plan: FillPlan) -> None:
        """Raises SettingError if the plan lacks what the correction needs, by name."""

    def written(self, prefix: Prefix, i: int, written: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the filled rows of attention layer i are to write in place of ``written``, keys and values first."""
        return written

    def state(self, prefix: Prefix, i: int, x: Tensor) -> None:
        """Corrects recurrent layer i's state in the cache, once, at the end of the prefix.

        Args:
            x: [B, m, d] the input that every prefix row's update came from.
        """
