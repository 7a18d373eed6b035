"""The promises on real models: SmolLM2-135M Q4_1 and Gemma-3-270M Q4_K_M (sliding windows), on this llama.cpp."""

from __future__ import annotations

import numpy as np
import pytest

from ridgefill import embedded
from ridgefill.models.identity import ModelIdentity

from . import needs_llama_cpp

pytestmark = needs_llama_cpp

MODELS = {"smollm2": (embedded.default_model, 15), "gemma3": (embedded.gemma_model, 9)}
FORMS = {
    "f16, flash": {"flash_attn": True},
    "f16": {"flash_attn": False},
    "q8_0, flash": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    "q8_0 keys": {"flash_attn": False, "type_k": "q8_0"},
    "small micro-batches": {"flash_attn": True, "n_ubatch": 128, "n_batch": 512},
    "small windowed cache": {"flash_attn": True, "swa_full": False},
}


def llama(name, **given):
    from ridgefill.engines.llamacpp import RidgeLlama

    file, split = MODELS[name]
    plan = {"fill": "identity", "split": split, "tail": 64, "min_tokens": 1}
    return RidgeLlama(
        file(), **plan | {"n_ctx": 1024, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | given
    )


@pytest.fixture(scope="module")
def text():
    return embedded.held_out()[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_off_is_llama_cpp_and_true_rows_change_nothing(name, form, text):
    from ridgefill.engines.llamacpp.check import compare_with_stock

    llm = llama(name, **FORMS[form])
    verdicts = compare_with_stock(llm, llm.tokenize(text.encode())[:800])
    assert all(v.holds and "bit for bit" in v.what for v in verdicts), verdicts


@pytest.mark.parametrize("name", MODELS)
def test_the_identity_of_maps_is_read_off_the_file(name):
    """The sample of weights equals what transformers would take of the same file."""
    import ridgefill
    from ridgefill.engines.llamacpp.gguf_model import GgufModel

    file = MODELS[name][0]()
    model, _ = ridgefill.load_model(file)
    theirs = ModelIdentity.of(model)
    ours = GgufModel(file).identity()
    assert not theirs.differences(ours) and theirs.sketch is not None
    assert np.allclose(theirs.sketch, ours.sketch, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_fill_alike(name, text):
    """First tokens of transformers (fp32) and llama.cpp (its own kernels): as near filled as they are exact."""
    import torch

    import ridgefill
    from ridgefill.engines.llamacpp.measures import first_token, kl

    file, split = MODELS[name]
    llm = llama(name, flash_attn=True)
    model, _ = ridgefill.load_model(file())
    ids = llm.tokenize(text.encode())[:600]
    tensor = torch.tensor([ids])
    with torch.no_grad():
        exact = model(tensor, use_cache=True, logits_to_keep=1).logits[0, -1]
        with ridgefill.filling(model, fill="identity", split=split, tail=64, min_tokens=1):
            filled = model(tensor, use_cache=True, logits_to_keep=1).logits[0, -1]
    ours = [first_token(llm, ids, exact=e)[0] for e in (True, False)]
    between = [kl(a.numpy(), b) for a, b in zip((exact, filled), ours, strict=True)]
    cost = kl(exact.numpy(), filled.numpy())
    found = (
        f"transformers to llama.cpp exact {between[0]:.4f}, filled {between[1]:.4f}; of the fill {cost:.4f}"
    )
    print(f"{name}, KL of the first token: {found}")
    assert between[0] < 0.05 and between[1] < max(0.05, 4 * between[0])
    assert cost > 2 * between[1]  # the fill did something, and both did the same
