"""The search for the largest size that fits."""

import pytest

from ridgefill.eval.ruler.draft import largest


@pytest.mark.parametrize("guess", [0, 1, 7, 60, 5000])
@pytest.mark.parametrize("limit", [57, 100, 101, 1234, 99_999])
def test_the_largest_size_that_fits_is_found_in_few_tries(limit, guess):
    asked = []

    def length(size):
        asked.append(size)
        return 50 + 7 * size + (size % 3)  # 1 -> 58

    fitting = [size for size in range(1, 15_000) if 50 + 7 * size + size % 3 <= limit]
    assert largest(length, limit, 1, guess) == (fitting[-1] if fitting else None)
    assert len(asked) < 20 and min(asked) == 1


def test_lengths_that_stand_still_do_not_stop_it():
    assert largest(lambda size: size // 10 * 10, 55, 1, 3) == 59
