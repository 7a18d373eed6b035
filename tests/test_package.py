"""The package's surface: whatever is imported first, the names stay what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

import ridgefill

SOURCE = Path(ridgefill.__file__).parent
MODULES = sorted(
    ".".join(("ridgefill", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)


def test_functions_stay_functions_whatever_was_imported_first():
    # Each module alone in a fresh interpreter also finds import cycles; forked from one that has the libraries,
    # which a first child has found out.
    script = f"""
import contextlib, importlib, os, sys
names = {MODULES!r}
ours, theirs = os.pipe()
if os.fork() == 0:
    for name in names:
        with contextlib.suppress(Exception):  # the loop below says why
            importlib.import_module(name)
    os.write(theirs, " ".join(m for m in sys.modules if not m.startswith("ridgefill")).encode())
    os._exit(0)
os.close(theirs)
with os.fdopen(ours) as pipe:
    for name in pipe.read().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
for name in names:
    pid = os.fork()
    if pid == 0:
        try:
            __import__(name)
            import ridgefill
            assert callable(ridgefill.fit) and callable(ridgefill.prefill), name
            os._exit(0)
        except BaseException as error:
            if type(error).__name__ == "EngineMissingError":
                os._exit(0)  # a named refusal of an engine that is not installed
            if "engines.vllm" in name and getattr(error, "name", None) in ("vllm", "prometheus_client"):
                os._exit(0)  # behind the worker and the scheduler, which refuse by name
            print(name, repr(error), flush=True)
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ridgefill.__all__)
def test_every_public_name_is_there(name):
    assert getattr(ridgefill, name) is not None


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="nothing_like_it"):
        ridgefill.nothing_like_it  # noqa: B018


def test_no_module_is_too_long_to_read():
    assert {p.name: n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 420} == {}
