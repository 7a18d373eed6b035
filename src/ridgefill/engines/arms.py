"""The arms that engines other than transformers run."""

from __future__ import annotations

from ridgefill.errors import SettingError
from ridgefill.fill import Exact, Fill, Identity, Ridge


def refuse_arm(fill: Fill, where: str) -> None:
    """Raises SettingError for an arm that ``where`` (such as "on llama.cpp") does not run."""
    if not isinstance(fill, (Ridge, Identity, Exact)):
        raise SettingError(
            f"the {fill.name!r} fill {where}",
            "only ridge, identity and exact run there",
            "use one of these, or the transformers engine",
        )
