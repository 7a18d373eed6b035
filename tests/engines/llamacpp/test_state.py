"""The state's bytes: parsed completely or refused, and written where llama.cpp keeps them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ridgefill.engines.llamacpp.state import MAGIC, SequenceState, StateLayoutError

WIDTH = 4  # elements of a row, f16
LAYERS = 3


def cache(positions, layers=LAYERS, trans=False, seed=0, streams=1, sequences=1):
    """One cache as llama.cpp lays it out, and its keys and values [layers, cells, WIDTH] f16."""
    rng = np.random.default_rng(seed)
    n = len(positions)
    keys, values = rng.standard_normal((2, layers, n, WIDTH)).astype(np.float16)
    out = struct.pack("<II", streams, n)
    for position in positions:
        out += struct.pack("<iIi", position, sequences, 0)
    out += struct.pack("<II", int(trans), layers)
    for k in keys:
        out += struct.pack("<iQ", 1, 2 * WIDTH) + k.tobytes()
    for v in values:
        out += (
            struct.pack("<iII", 1, 2, WIDTH) + v.T.tobytes()
            if trans
            else struct.pack("<iQ", 1, 2 * WIDTH) + v.tobytes()
        )
    return out, keys, values


def state(*caches, magic=MAGIC):
    return np.frombuffer(bytearray(struct.pack("<Ii", magic, 0) + b"".join(caches)), np.uint8)


@pytest.mark.parametrize("trans", [False, True])
def test_rows_are_read_as_they_were_laid_out(trans):
    data, keys, values = cache([3, 0, 2, 1], trans=trans)
    found = SequenceState(state(data), [range(LAYERS)])
    assert found.caches[0].positions.tolist() == [3, 0, 2, 1] and found.layers() == [0, 1, 2]
    assert found.types() == {(1, 1)}
    for layer in range(LAYERS):
        assert np.array_equal(found.read(layer, "keys").view(np.float16), keys[layer])
        assert np.array_equal(found.read(layer, "values").view(np.float16), values[layer])


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("cells", [[1, 2], [3, 0]])
def test_rows_are_written_in_their_place_and_nowhere_else(trans, cells):
    data, keys, values = cache(range(5), trans=trans)
    found = SequenceState(state(data), [range(LAYERS)])
    before = found.data.copy()
    new = np.arange(2 * WIDTH, dtype=np.float16).reshape(2, WIDTH)
    for what, held in (("keys", keys), ("values", values)):
        found.write(1, what, np.array(cells), new.view(np.uint8))
        held[1][cells] = new
    for layer in range(LAYERS):
        assert np.array_equal(found.read(layer, "keys").view(np.float16), keys[layer])
        assert np.array_equal(found.read(layer, "values").view(np.float16), values[layer])
    assert (found.data != before).sum() <= 2 * 2 * WIDTH * 2  # two rows of keys and of values, two bytes each


def test_two_caches_hold_different_layers_and_cells():
    (full, keys, _), (local, _, values) = cache(range(6), 1), cache([4, 5], 2, seed=1)
    found = SequenceState(state(full, local), [[1], [0, 2]])
    assert np.array_equal(found.read(1, "keys").view(np.float16), keys[0])
    assert np.array_equal(found.read(2, "values").view(np.float16), values[1])
    assert found.cache_of(2).positions.tolist() == [4, 5]


def test_another_magic_is_refused():
    with pytest.raises(StateLayoutError, match="starts with 0x00000001"):
        SequenceState(state(cache([0])[0], magic=1), [range(LAYERS)])


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_state_that_ends_early_is_refused(cut):
    with pytest.raises(StateLayoutError, match="ends after"):
        SequenceState(state(cache(range(4))[0])[:-cut], [range(LAYERS)])


def test_bytes_left_over_are_refused():
    with pytest.raises(StateLayoutError, match="7 bytes are left over"):
        SequenceState(state(cache([0])[0], b"\0" * 7), [range(LAYERS)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": 2}, "2 layers"),
        ({"streams": 2}, "2 streams"),
        ({"sequences": 2}, "another number of sequences"),
    ],
)
def test_another_layout_is_refused(change, why):
    with pytest.raises(StateLayoutError, match=why):
        SequenceState(state(cache([0, 1], **change)[0]), [range(LAYERS)])
