"""For every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_collected_again() -> Iterator[None]:
    """Takes what earlier modules have left out of the collector's sight.

    Some tests collect garbage to see that nothing holds a cache any more. Late in the suite there are millions of
    objects to walk through, and each of these collections takes seconds.
    """
    gc.freeze()
    yield
