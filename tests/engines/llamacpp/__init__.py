"""Where llama-cpp-python is missing (it is built from source), what needs it is skipped."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

INSTALLED = find_spec("llama_cpp") is not None
needs_llama_cpp = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(not INSTALLED, reason="llama-cpp-python is not installed: make test-llamacpp"),
]
