"""`RidgeLlama` on a tiny model: what it fills, what it reuses, what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ridgefill.errors import (
    MapsMismatchError,
    ModelFileError,
    PromptError,
    RidgeFillWarning,
    SettingError,
    UnsupportedModelError,
)
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.reading import Reading

from ...gguf_maker import LAYERS, WIDTH, write
from . import needs_llama_cpp

pytestmark = [*needs_llama_cpp, pytest.mark.filterwarnings("ignore::ridgefill.errors.RidgeFillWarning")]

TAIL, LEADING = 16, 4
IDS = [(37 * i + 11) % 250 for i in range(120)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(made)
    return made


def llama(path, **given):
    from ridgefill.engines.llamacpp import RidgeLlama

    plan = {"fill": "identity", "split": 1, "tail": TAIL, "leading": LEADING, "min_tokens": 1}
    return RidgeLlama(
        path, **plan | {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | given
    )


def logits(llm, ids, exact=False):
    from ridgefill.engines.llamacpp.measures import first_token

    return first_token(llm, ids, exact=exact)[0]


def test_the_rows_are_the_plans(path):
    llm = llama(path)
    filled = logits(llm, IDS)
    assert (llm.stats.tokens, llm.stats.filled, llm.stats.exact) == (
        120,
        120 - TAIL - LEADING,
        TAIL + LEADING,
    )
    assert set(llm.stats.seconds) == {"lower", "fill", "tail"} and llm.stats.fill == "identity"
    assert np.abs(filled - logits(llm, IDS, exact=True)).max() > 0  # the layers' inputs differ
    assert llm.stats.reason == "the fill is off" and not llm._filled.any()


def test_maps_of_the_identity_are_the_identity_fill(path):
    eye = RidgeMaps(1, {1: AffineMap(torch.eye(WIDTH), torch.zeros(WIDTH))})
    ridge = llama(path, maps=eye, fill="ridge")
    assert np.array_equal(logits(ridge, IDS), logits(llama(path), IDS))


@pytest.mark.parametrize("reduced", [False, True])
def test_maps_that_give_the_layers_own_keys_and_values_are_the_identity_fill(path, tmp_path, reduced):
    from ridgefill.engines.llamacpp.gguf_model import GgufModel
    from ridgefill.maps_gguf import save_gguf

    file = GgufModel(path)
    keys, values, norm = (
        file.needed(f"blk.1.{name}.weight").unpacked() for name in ("attn_k", "attn_v", "attn_norm")
    )
    # maps have a model's order of numbers, files of the llama family their own
    keys = keys.reshape(file.kv_heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(keys.shape)
    own = torch.from_numpy(np.concatenate([keys, values]) * norm)
    none, reading = torch.zeros_like(own), Reading((0, 1), (1,), True, "writes")
    down = torch.cat([torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1)
    weight = own if reduced else torch.cat([none, own, none], 1)
    maps = RidgeMaps(
        1, {1: AffineMap(weight, torch.zeros(len(own)))}, reading=reading, down=down if reduced else None
    )
    identity = logits(llama(path), IDS)
    assert np.allclose(
        logits(llama(path, maps=maps, fill="ridge"), IDS), identity, atol=1e-2 * np.ptp(identity)
    )
    packed = logits(llama(path, maps=save_gguf(maps, tmp_path / "m.gguf"), fill="ridge"), IDS)
    assert np.allclose(packed, identity, atol=3e-2 * np.ptp(identity))


def test_the_row_before_is_read_across_the_leading_rows(path):
    """The first filled row has the last leading one before it; in a later turn, itself."""
    from ridgefill.engines.llamacpp.gguf_model import GgufModel

    file = GgufModel(path)
    llm = llama(path, maps=_before(file), fill="ridge")
    states = {1: np.arange(12, dtype=np.float32).reshape(3, 4).repeat(WIDTH // 4, 1)}
    before = {1: -np.ones((1, WIDTH), np.float32)}
    read = llm._sources.read(states, before, [*range(10)], 4)
    assert read.shape == (3, 2 * WIDTH)
    assert np.allclose(read[0, WIDTH:], -1) and np.allclose(read[1:, WIDTH:], read[:-1, :WIDTH])
    alone = llm._sources.read(states, {}, [*range(10)], 4)
    assert np.allclose(alone[0, WIDTH:], alone[0, :WIDTH])


def _before(file):
    width = file.kv_heads * (file.key_width + file.value_width)
    weight = torch.randn(width, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    return RidgeMaps(
        1, {1: AffineMap(weight, torch.zeros(width))}, reading=Reading((1,), (1,), True, "writes")
    )


def test_maps_decide_what_is_written(path, tmp_path):
    torch.manual_seed(0)
    maps = RidgeMaps(1, {1: AffineMap(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH))})
    want = logits(llama(path, maps=maps, fill="ridge"), IDS)
    assert np.abs(want - logits(llama(path), IDS)).max() > 1e-3
    from ridgefill.maps_gguf import save_gguf

    folder, file = maps.save(tmp_path / "maps"), save_gguf(maps, tmp_path / "maps.gguf")
    assert np.array_equal(want, logits(llama(path, maps=folder, fill="ridge"), IDS))
    packed = logits(llama(path, maps=file, fill="ridge", weights="packed"), IDS)
    assert np.abs(packed - want).max() < 0.1 * np.abs(want).max()


def test_filled_rows_do_not_hang_on_how_the_prompt_was_cut(path):
    whole, parts = llama(path), llama(path)
    want = logits(whole, IDS)
    parts.eval(IDS[:70])  # a first turn, whose tail is then far from the end
    parts._forget_filled(len(IDS))
    parts.eval(IDS[70:])
    assert parts.stats.filled > 0
    from ridgefill.engines.llamacpp.measures import last_logits

    assert np.corrcoef(last_logits(parts), want)[0, 1] > 0.99  # the first turn's tail is exact


def test_rows_of_a_longer_prompt_are_not_in_the_tail_of_a_shorter_one(path):
    llm = llama(path)
    list(zip(range(1), llm.generate(IDS), strict=False))
    assert llm._filled[LEADING : len(IDS) - TAIL].all()
    shorter = [*IDS[:80], 7]
    list(zip(range(1), llm.generate(shorter), strict=False))
    assert not llm._filled[len(shorter) - TAIL : len(shorter)].any()
    assert llm._filled[LEADING : len(shorter) - TAIL].all()  # those stayed


def test_exactly_takes_no_filled_row(path):
    llm = llama(path)
    list(zip(range(1), llm.generate(IDS), strict=False))
    with llm.exactly():
        list(zip(range(1), llm.generate([*IDS, 5]), strict=False))
    assert not llm._filled.any() and llm.stats.exact == len(IDS) + 1 - LEADING


def test_short_prompts_run_exactly_and_say_so(path):
    llm = llama(path, min_tokens=None)
    logits(llm, IDS)
    assert llm.stats.filled == 0 and "does not pay" in llm.stats.reason


def test_completions_chat_and_streaming_are_llama_cpp_pythons(path):
    llm = llama(path)
    text = "the heath " * 12
    whole = llm.create_completion(text, max_tokens=4, temperature=0.0)
    assert llm.stats.filled > 0 and whole["usage"]["completion_tokens"] == 4
    pieces = list(llm.create_completion(text, max_tokens=4, temperature=0.0, stream=True))
    assert "".join(p["choices"][0]["text"] for p in pieces) == whole["choices"][0]["text"]
    chat = llm.create_chat_completion(
        messages=[{"role": "user", "content": text}], max_tokens=2, temperature=0.0
    )
    assert chat["choices"][0]["message"]["role"] == "assistant"


def test_states_know_their_filled_rows(path):
    llm = llama(path)
    llm.eval(IDS)
    state = llm.save_state()
    with llm.exactly():
        logits(llm, IDS, exact=True)
    llm.load_state(state)
    assert llm._filled[LEADING : len(IDS) - TAIL].all() and llm.n_tokens == len(IDS)
    state.ridgefill = ("other maps", state.ridgefill[1])
    with pytest.raises(MapsMismatchError, match="other maps"):
        llm.load_state(state)


def test_it_can_be_pickled(path):
    llm = llama(path)
    again = pickle.loads(pickle.dumps(llm))
    assert np.array_equal(logits(again, IDS), logits(llm, IDS))


def test_several_micro_batches_give_what_one_gives(path):
    assert np.allclose(logits(llama(path, n_ubatch=32, n_batch=64), IDS), logits(llama(path), IDS), atol=1e-4)


def test_exact_has_no_fill_at_all(path):
    llm = llama(path, fill="exact", split=1)
    logits(llm, IDS)
    assert llm._late is None and llm.stats.filled == 0


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"n_ctx": 16}, SettingError, "nothing of it would be filled"),
        ({"corrections": "value_rescale(8)"}, SettingError, "not built there"),
        ({"type_k": "q4_0"}, SettingError, "never written and compared"),
        ({"weights": "f16"}, SettingError, "no such form"),
        ({"fill": "ridge"}, SettingError, "needs maps"),
    ],
)
def test_what_cannot_be_filled_is_refused(path, given, error, why):
    with pytest.raises(error, match=why):
        llama(path, **given)


def test_maps_of_another_model_are_refused(path):
    wide = RidgeMaps(1, {1: AffineMap(torch.eye(WIDTH * 2), torch.zeros(WIDTH * 2))})
    with pytest.raises(MapsMismatchError, match="states are 64 wide"):
        llama(path, maps=wide, fill="ridge")


def test_another_architecture_and_a_broken_file_are_refused(tmp_path):
    write(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match="not supported"):
        llama(tmp_path / "other.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        llama(tmp_path / "broken.gguf")


def test_stretched_positions_are_refused(tmp_path):
    write(tmp_path / "yarn.gguf", scaling="yarn")
    with pytest.raises(UnsupportedModelError, match="stretched by 'yarn'"):
        llama(tmp_path / "yarn.gguf")


def test_a_prompt_beyond_the_context_is_refused(path):
    llm = llama(path, n_ctx=64)
    with pytest.raises(PromptError, match="context holds"):
        llm.eval(IDS[:70] * 8)


def test_an_unknown_state_version_is_refused_before_anything_is_written(path, monkeypatch):
    from ridgefill.engines.llamacpp import self_check
    from ridgefill.engines.llamacpp.state import StateLayoutError

    monkeypatch.setattr(self_check, "SEQ_VERSIONS", (99,))
    with pytest.raises(StateLayoutError, match="of version 3, and version 99"):
        llama(path)


def test_rows_that_llama_cpp_would_not_write_are_refused(path, monkeypatch):
    from ridgefill.engines.llamacpp.gguf_model import GgufModel

    rope = GgufModel.rope
    monkeypatch.setattr(GgufModel, "rope", lambda self, layer: (rope(self, layer)[0], 10_000.0, 1.0))
    with pytest.raises(UnsupportedModelError, match="writes other keys in layer 1"):
        llama(path)


def test_maps_that_name_no_model_are_warned_of(path):
    with pytest.warns(RidgeFillWarning, match="name no model"):
        llama(path, maps=RidgeMaps(1, {1: AffineMap(torch.eye(WIDTH), torch.zeros(WIDTH))}), fill="ridge")


def test_it_has_every_layer(path):
    assert llama(path)._gguf.layers == LAYERS


def test_the_server_answers_with_it(path):
    testclient = pytest.importorskip("fastapi.testclient", reason="the server's packages are not installed")
    from ridgefill.engines.llamacpp.server import create_app

    llm = llama(path)
    client = testclient.TestClient(create_app(llm, "tiny"))
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    body = {"model": "tiny", "prompt": "the heath " * 12, "max_tokens": 3, "temperature": 0}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] > 0
    assert client.get("/ridgefill").json()["filled"] == llm.stats.filled > 0
