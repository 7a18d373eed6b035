"""The command line in this process."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ridgefill import cli


def call(*argv: Any) -> Any:
    """The exit code of the command line in this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", ["ridgefill", *map(str, argv)])
        cli.main()
    return exit.value.code
