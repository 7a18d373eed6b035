"""No fill: the late layers write nothing for the prefix, so there the tail attends only to itself (Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgefill.fill.hidden import hide, refuse_unmasked
from ridgefill.fill.kept import write_kept

if TYPE_CHECKING:
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class NoFill:
    """The lower bound of every comparison. Rows that write nothing are hidden by the attention mask.

    One mask serves layers of all lengths in the model's own code, so an unwritten row keeps a slot of zeros, and a
    hook on each late layer masks it for as long as the cache lives. Exact rows stay visible, and see one another. A
    copy of such a cache is not hidden: it is for measuring, not for serving.
    """

    name: str = "none"

    def write(self, prefix: Prefix) -> None:
        """Reserves the slots and hides them.

        Raises:
            SettingError: the model's attention takes no mask of that form.
            UnsupportedModelError: chosen rows in a model with several residual streams.
        """
        refuse_unmasked("no fill", prefix.decoder.config)
        if prefix.plan.rows is not None and prefix.exact is not None:
            write_kept(prefix, prefix.exact)
            return
        hidden = ~prefix.exact_mask()
        for i in prefix.late_layers:
            prefix.write_exact_only(i)  # leading rows: no dropped row stands before them
            if not prefix.decoder.recurrent(i):
                hide(prefix.decoder.layers[i], i, prefix.cache, hidden)
