from __future__ import annotations

import pytest
import torch

from ridgefill.errors import CorpusError, OutputError
from ridgefill.fit.capture import Capture, Checkpoint, heldout_rows, layer_inputs, run_capture
from ridgefill.fit.moments import Moments
from ridgefill.fit.windows import Plan, Window
from ridgefill.models.decoder import Decoder
from ridgefill.reading import Reading
from tests.disk import small_files
from tests.tiny import FAMILIES, tiny_model

LEADING = 16


def window(n, seed=0):
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Window(ids, 0, f"document {seed}", str(seed), False)


def plan(fit=4, held=2):
    fitted = [window(100 + i, i) for i in range(fit)]
    return Plan(fitted, [window(120, 50 + i) for i in range(held)], [], "", "")


def empty(splits=(2, 3)):
    return Capture(Moments(splits, 6, dict.fromkeys(range(6), torch.device("cpu"))))


def captured(decoder, the_plan, capture=None, after=lambda w: None):
    capture = capture or empty()
    with torch.no_grad():
        run_capture(decoder, the_plan, capture, leading=LEADING, seed=0, after_window=after)
    return capture


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny_model())


def same(a, b):
    assert a.position == b.position
    assert a.moments.rows == b.moments.rows
    for left, right in ((a.moments.tensors(), b.moments.tensors()), (a.heldout(), b.heldout())):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layer_inputs_are_the_model_s_own(family):
    model = tiny_model(family)
    ids = window(90).ids.long()[None]
    expected = model(ids, output_hidden_states=True).hidden_states
    found = list(layer_inputs(Decoder(model), ids, 0, 5))
    assert [layer for layer, _, _ in found] == [0, 1, 2, 3, 4, 5]
    for layer, h, x in found:
        assert torch.equal(h, expected[layer]), layer
        assert x is h


@torch.no_grad()
def test_moments_hold_all_rows_but_the_leading(decoder):
    capture = captured(decoder, plan())
    states = [decoder.model(w.ids.long()[None], output_hidden_states=True).hidden_states for w in plan().fit]
    x, y = (torch.cat([h[layer][0, LEADING:] for h in states]).double() for layer in (2, 4))
    assert capture.moments.rows == len(x) == 4 * (100 - LEADING) + 6
    expected = (y - y.mean(0)).T @ (x - x.mean(0))
    torch.testing.assert_close(capture.moments.centred(2, 4).cross, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_sample_rows_are_the_same_of_every_layer(decoder):
    capture = captured(decoder, plan())
    held = plan().heldout
    rows = [heldout_rows(120, LEADING, 240, 0, 4 + i) for i in range(2)]
    for layer in (2, 3, 4, 5):
        parts = [
            decoder.model(w.ids.long()[None], output_hidden_states=True).hidden_states[layer][0, r]
            for w, r in zip(held, rows, strict=True)
        ]
        assert torch.equal(capture.heldout()[layer], torch.cat(parts))


class Doubled(Decoder):
    """A decoder whose layers read twice the state that enters them."""

    def layer_input(self, i, h, rows=None, cache=None):
        return 2 * h


@torch.no_grad()
def test_a_state_apart_is_captured_beside_the_layers_inputs(tmp_path):
    decoder, the_plan = Doubled(tiny_model()), plan()
    moments = Moments(
        (2, 3), 6, dict.fromkeys(range(6), torch.device("cpu")), reads={2: ((2, 0),), 3: ((3, 0),)}
    )
    capture = captured(decoder, the_plan, Capture(moments))
    states = [
        decoder.model(w.ids.long()[None], output_hidden_states=True).hidden_states for w in the_plan.fit
    ]
    x, y = (torch.cat([h[layer][0, LEADING:] for h in states]).double() for layer in (3, 5))
    xc, yc = x - x.mean(0), 2 * (y - y.mean(0))
    torch.testing.assert_close(moments.gram(3), xc.T @ xc, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moments.centred(3, 5).cross, yc.T @ xc, rtol=1e-9, atol=1e-9)
    assert list(capture.heldout_states()) == [2, 3]
    for split, rows in capture.heldout_states().items():
        assert torch.equal(2 * rows, capture.heldout()[split])
    Checkpoint(tmp_path, {}, 0).save(capture, 4)
    again = Capture(
        Moments((2, 3), 6, dict.fromkeys(range(6), torch.device("cpu")), reads={2: ((2, 0),), 3: ((3, 0),)})
    )
    assert "after 6 windows" in Checkpoint(tmp_path, {}, 0).resume(again)
    same(again, capture)
    assert all(torch.equal(t, again.heldout_states()[k]) for k, t in capture.heldout_states().items())


@torch.no_grad()
def test_what_is_read_is_captured_source_by_source(decoder):
    the_plan = plan(3, 1)
    reading = Reading((0, 2), (2,), True)
    moments = Moments((2,), 6, dict.fromkeys(range(6), torch.device("cpu")), reads={2: reading.sources})
    run_capture(decoder, the_plan, Capture(moments, {2: reading}), leading=LEADING, seed=0)
    read, y = [], []
    for window in the_plan.fit:
        h = decoder.model(window.ids.long()[None], output_hidden_states=True).hidden_states
        read.append(reading.of({0: h[0], 2: h[2]})[0, LEADING:])  # the first has a leading row before it
        y.append(h[4][0, LEADING:])
    x, y = torch.cat(read).double(), torch.cat(y).double()
    assert moments.rows == len(x)
    xc = x - x.mean(0)
    torch.testing.assert_close(moments.gram(2), xc.T @ xc, rtol=1e-6, atol=1e-6)
    expected = (y - y.mean(0)).T @ xc
    torch.testing.assert_close(moments.centred(2, 4).cross, expected, rtol=1e-6, atol=1e-6)


def test_heldout_states_are_the_inputs_where_nothing_is_apart(decoder):
    capture = captured(decoder, plan(1, 1))
    assert torch.equal(capture.heldout_states()[2], capture.heldout()[2]) and not capture.states


def test_heldout_rows_are_even_bounded_and_seeded():
    rows = heldout_rows(4096, 16, 6500, 0, 3)
    assert len(rows) == 256
    assert rows[0] >= 16 and rows[-1] < 4096
    assert (rows.diff() > 0).all() and rows.diff().max() <= 2 * 4080 / 256
    assert torch.equal(rows, heldout_rows(4096, 16, 6500, 0, 3))
    assert not torch.equal(rows, heldout_rows(4096, 16, 6500, 1, 3))
    assert len(heldout_rows(80, 16, 80, 0, 0)) == 64  # no more than there are
    # many windows share 4,096 rows
    assert sum(len(heldout_rows(4096, 16, 100 * 4096, 0, i)) for i in range(100)) <= 4096 + 100


def test_not_finite_names_layer_and_document():
    model = tiny_model()
    model.model.layers[3].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(CorpusError, match=r"document 0.*layer 4"):
        captured(Decoder(model), plan())


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_resumed_capture_is_bit_for_bit_the_same(decoder, tmp_path, stop):
    the_plan = plan()

    class Killed(Exception):
        pass

    first = empty()
    saver = Checkpoint(tmp_path, {"a": 1}, 0)

    def after(w):
        saver.save_if_due(first, len(the_plan.fit))
        if first.position == stop:
            raise Killed

    with pytest.raises(Killed):
        captured(decoder, the_plan, first, after)
    second = empty()
    assert f"after {stop} windows" in Checkpoint(tmp_path, {"a": 1}, 0).resume(second)
    assert second.position == stop
    same(captured(decoder, the_plan, second), captured(decoder, the_plan))


def test_checkpoint_is_bounded_and_removed(decoder, tmp_path):
    folder = tmp_path / "capture"
    capture, the_plan = empty(), plan()
    saver = Checkpoint(folder, {}, 0)
    captured(decoder, the_plan, capture, lambda w: saver.save_if_due(capture, len(the_plan.fit)))
    assert sorted(p.name for p in folder.iterdir()) == [
        "moments-4.safetensors",
        "sample-6.safetensors",
        "state.json",
    ]
    saver.remove()
    assert not folder.exists()


def test_other_fingerprint_and_damage_start_afresh(decoder, tmp_path):
    capture = captured(decoder, plan())
    Checkpoint(tmp_path / "c", {"a": 1}, 0).save(capture, 4)
    again = empty()
    assert "starting afresh" in Checkpoint(tmp_path / "c", {"a": 2}, 0).resume(again)
    assert again.position == 0 and not again.moments.products
    assert not (tmp_path / "c").exists()  # or a later run could pair the old state with new files
    assert Checkpoint(tmp_path / "c", {"a": 1}, 0).resume(again) is None
    for name in ("moments-4.safetensors", "sample-6.safetensors", "state.json"):
        Checkpoint(tmp_path / "c", {"a": 1}, 0).save(capture, 4)
        path = tmp_path / "c" / name
        path.write_bytes(path.read_bytes()[:40])
        assert "damaged" in Checkpoint(tmp_path / "c", {"a": 1}, 0).resume(again)
        assert again.position == 0 and not again.moments.products and not again.sample


def test_checkpoints_wait_for_their_time(decoder, tmp_path):
    capture = captured(decoder, plan(1, 1))
    Checkpoint(tmp_path, {}, 1000).save_if_due(capture, 1)
    assert not any(tmp_path.iterdir())


def test_full_disk_keeps_the_last_checkpoint(decoder, tmp_path):
    capture = captured(decoder, plan(2, 1))
    saver = Checkpoint(tmp_path, {}, 0)
    saver.save(capture, 2)
    capture.position, capture.sample = 1, {}
    with pytest.raises(OutputError), small_files(20000):
        saver.save(capture, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "moments-2.safetensors",
        "sample-3.safetensors",
        "state.json",
    ]
    again = empty()
    assert "after 3 windows" in Checkpoint(tmp_path, {}, 0).resume(again)
