"""What maps read of a row: states side by side, the row before, reduced block after block, part by part."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.maps import RidgeMaps
from ridgefill.reading import Follower, Reading

W, M = 6, 9


def states(layers=(0, 2, 3), seed=0):
    g = torch.Generator().manual_seed(seed)
    return {i: torch.randn(2, M, W, generator=g) * (1 + i) for i in layers}


def unit(h):
    return h / h.square().mean(-1, keepdim=True).sqrt()


def test_the_papers_reading_is_the_split_state_itself():
    own = states()
    assert Reading.plain(3).of(own) is own[3]
    assert Reading.plain(3).is_plain and not Reading((3,), normed=True).is_plain


def test_states_stand_side_by_side_each_at_its_own_scale():
    own = states()
    read = Reading((0, 2, 3), normed=True).of(own)
    assert torch.allclose(read, torch.cat([unit(own[i]) for i in (0, 2, 3)], -1), atol=1e-5)


def test_the_row_before_comes_last_and_the_first_row_has_itself():
    own = states()
    read = Reading((2, 3), (3,)).of(own)
    assert torch.equal(read[..., : 2 * W], torch.cat([own[2], own[3]], -1))
    assert torch.equal(read[:, 1:, 2 * W :], own[3][:, :-1])
    assert torch.equal(read[:, 0, 2 * W :], own[3][:, 0])


def test_a_reduction_block_by_block_is_the_reduction_of_all():
    own, reading = states(), Reading((0, 2, 3), (0, 3), normed=True)
    down = torch.randn(4, reading.blocks * W, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(reading.of(own, down), reading.of(own) @ down.T, atol=1e-5)
    assert torch.allclose(Reading((3,)).of(own, down[:, :W]), own[3] @ down[:, :W].T, atol=1e-6)


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 5), (8,)])
@pytest.mark.parametrize("down", [None, torch.ones(3, 5 * W) / W])
def test_parts_read_what_the_whole_reads(cuts, down):
    own = states()
    maps = RidgeMaps(3, {}, reading=Reading((0, 2, 3), (0, 3), normed=True), down=down)
    follower = Follower(maps)
    assert follower.layers == (0, 2)
    ends = (0, *cuts, M)
    parts = [follower.of({i: h[:, a:b] for i, h in own.items()}) for a, b in pairwise(ends)]
    assert torch.allclose(torch.cat(parts, 1), maps.read(own), atol=1e-6)


def test_a_follower_of_nothing_reads_the_split_state():
    own = states()
    assert Follower(None).of(own) is own[3] and Follower(None).layers == ()


def test_it_comes_back_from_json():
    reading = Reading((0, 2, 3), (3,), True, "writes")
    assert Reading.from_json(reading.to_json()) == reading
    for wrong in ({"normed": 1}, {"gives": "all"}, {"layers": [3, 2]}, {"previous": [1]}):
        with pytest.raises((ValueError, SettingError)):
            Reading.from_json(reading.to_json() | wrong)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (((3, 2),), "not ascending"),
        (((),), "not ascending"),
        (((2, 2),), "not ascending"),
        (((-1, 2),), "not ascending"),
        (((2, 3), (1,)), "layers .1."),
        (((3,), (), False, "logits"), "logits"),
    ],
)
def test_bad_readings_are_refused(given, named):
    with pytest.raises(SettingError, match=named):
        Reading(*given)


def test_maps_end_at_their_split():
    with pytest.raises(SettingError, match="end the layers with 4"):
        RidgeMaps(4, {}, reading=Reading.plain(3))
