from __future__ import annotations

import pytest
import torch

from ridgefill.compat import new_cache
from ridgefill.models.decoder import Decoder
from ridgefill.models.updates import project
from tests.tiny import HYBRIDS, tiny_model


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_keys_and_values_are_what_enters_the_convolution(family):
    model = tiny_model(family)
    decoder, cache = Decoder(model), new_cache(model)
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    rows = decoder.rows(x, torch.arange(9)[None], None, cache)
    layer = next(i for i in range(decoder.n_layers) if decoder.recurrent(i))
    decoder.run_layer(layer, x, rows, cache)
    kept = cache.layers[layer].conv_states[0]  # [1, queries, keys and values, last rows]
    keys, values = project(decoder.layers[layer], x)
    assert (keys.shape[-1], values.shape[-1]) == (2 * 8, 4 * 12)
    entered = torch.cat([keys, values], dim=-1)[:, -3:].transpose(1, 2)
    assert torch.equal(kept[:, keys.shape[-1] :, -3:], entered)
