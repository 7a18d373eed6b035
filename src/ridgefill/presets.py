"""The paper's deployments by name (Table 4)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgefill.errors import SettingError

DEFAULT_TAIL = 2048  # paper section 9: "an exact tail of 2,048 to 4,096 tokens"


@dataclass(frozen=True)
class Preset:
    """Settings of one deployment; whatever the user names instead takes precedence.

    Attributes:
        about: the deployment, for ``--help`` and the documentation.
        depth: of the split, where neither a split nor maps are given.
        fill, tail, rows, corrections: as in `ridgefill.plan.make_plan`; rows and corrections in words.
        leading: None for the package's own default (decision 0003); the paper has none.
        pop: the split is layer ceil(2L/3), which no depth says for every L.
    """

    about: str
    depth: float
    tail: int
    fill: str = "ridge"
    rows: str | None = None
    corrections: str = ""
    leading: int | None = None
    pop: bool = False


PRESETS = {
    "paper": Preset("the paper's plain maps at half the depth, and nothing else", 0.5, DEFAULT_TAIL),
    "reference": Preset("the reference study: split at 3/8 of the depth, tail 4,096", 0.375, 4096),
    "reference+rows": Preset(
        "the same, with the 10 % of prefix rows that the question attends to",
        0.375,
        4096,
        rows="attention(0.1)",
    ),
    "27b": Preset(
        "Qwen3.8-27B: split at 1/4, tail 4,096, probe, lexical net, special tokens, value rescale",
        0.25,
        4096,
        rows="probe(27b, within=lexical) | special",
        corrections="value_rescale(512)",
    ),
    "flash-next": Preset("Qwen3.8-Flash-Next: split at 1/2, tail 2,048", 0.5, 2048),
    "quality": Preset(
        "Flash-Next's quality mode: protected tokens and the terminal-state correction",
        0.5,
        2048,
        rows="protected(0.25)",
        corrections="terminal_state",
    ),
    "pop": Preset(
        "POP as published: the identity fill of the last third, a one-token tail",
        2 / 3,
        1,
        fill="identity",
        leading=0,
        pop=True,
    ),
}


def preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        SettingError: there is none of that name.
    """
    if name not in PRESETS:
        raise SettingError(
            f"the preset {name!r}", "there is none of that name", f"use one of {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def fitted_presets() -> list[str]:
    """Names of the presets that need maps."""
    return [name for name, found in PRESETS.items() if found.fill == "ridge"]
