"""The terminal-state correction is the paper's formula, and off is off (paper 2.3, Appendix H)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg
from ridgefill.correct import TerminalState
from ridgefill.correct.terminal_state import filled_share
from ridgefill.errors import SettingError
from ridgefill.models.decoder import Decoder
from ridgefill.prefill import prefill

from ..reference import TAIL, N, close, generate, inputs_swapped, model_of, padded, prompt, random_maps
from ..test_walk import SCATTERED, Fixed, affine, tensors

HYBRIDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
M, SPLIT = N - TAIL, 3


def maps_with_states(model, seed: int = 11):
    maps, decoder = random_maps(model, SPLIT), Decoder(model)
    stock = prefill(model, prompt(), fill="exact", split=SPLIT, tail=TAIL)
    g = torch.Generator().manual_seed(seed)
    maps.terminal = {
        i: torch.randn(tensors(stock.layers[i])[-1].shape[1:], generator=g)
        for i in range(SPLIT, decoder.n_layers)
        if decoder.recurrent(i)
    }
    return maps


def slow_share(gates: Tensor, filled: Tensor) -> Tensor:
    """rho of one sequence, row by row: D <- e^g D + 1; N <- e^g N + (1 if filled)."""
    d = n = torch.zeros(gates.shape[-1])
    for g, mine in zip(gates, filled, strict=True):
        d, n = g.exp() * d + 1, g.exp() * n + float(mine)
    return n / d


@pytest.mark.parametrize("case", HYBRIDS)
@pytest.mark.parametrize("attends", [False, True])
def test_the_state_moves_by_rho_times_the_mean_difference(case, attends):
    model, ids = model_of(case), prompt()
    maps, decoder = maps_with_states(model), Decoder(model)
    settings = {"maps": maps, "tail": TAIL, "leading": 0, "rows": Fixed(SCATTERED)}
    plain = prefill(model, ids, **settings)
    ours = prefill(model, ids, corrections=[TerminalState(0.5)], **settings)
    filled = torch.zeros(M, dtype=torch.bool)
    filled[[r for r in range(M) if r not in SCATTERED]] = True
    inputs: dict[int, Tensor] = {}
    with torch.no_grad(), inputs_swapped(model, filled, SPLIT, affine(maps, SPLIT)):
        handles = [
            model.model.layers[i].register_forward_pre_hook(lambda m, a, i=i: inputs.__setitem__(i, a[0]))
            for i in range(SPLIT, decoder.n_layers)
        ]
        model(ids[:, :M], use_cache=False)
        for handle in handles:
            handle.remove()
    rows = decoder.rows(inputs[SPLIT], torch.arange(M)[None])
    first = min(maps.terminal)  # in later layers exact rows have read other states by then
    rho = slow_share(decoder.gates(first, inputs[first], rows)[0], filled)
    assert rho.min() > 0 and rho.max() < 1
    a, b = tensors(plain.layers[first])[-1], tensors(ours.layers[first])[-1]
    close(b - a, 0.5 * rho[None, :, None, None] * maps.terminal[first])
    joint = prefill(
        model, ids, corrections=[TerminalState(0.5)], **{**settings, "rows": Fixed(SCATTERED, attends)}
    )
    (x, x_logits), (y, y_logits) = (generate(model, ids, **cache_kwarg(c)) for c in (ours, joint))
    assert torch.equal(x, y)  # the correction comes before the tail, wherever that runs
    close(x_logits, y_logits)


def test_rho_is_the_filled_rows_share_padding_left_out():
    g = -torch.rand(2, 9, 3, generator=torch.Generator().manual_seed(2))
    filled = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :4] = False
    found = filled_share(g, filled & real, real)
    close(found[0], slow_share(g[0], filled[0]))
    close(found[1], slow_share(g[1, 4:], filled[1, 4:]))
    assert torch.equal(filled_share(g, real, real), torch.ones(2, 3))
    assert torch.equal(filled_share(g, ~real & False, real), torch.zeros(2, 3))


@pytest.mark.parametrize("case", HYBRIDS)
def test_scale_zero_changes_nothing_bit_for_bit(case):
    model, (ids, mask) = model_of(case), padded((N, 60))
    maps = maps_with_states(model)
    plain, zero, full = (
        prefill(model, ids, maps, tail=TAIL, attention_mask=mask, corrections=corrections)
        for corrections in ((), [TerminalState(0.0)], [TerminalState()])
    )
    assert same(plain, zero)
    assert not same(plain, full)


def same(ours, theirs) -> bool:
    pairs = zip(ours.layers, theirs.layers, strict=True)
    return all(torch.equal(x, y) for a, b in pairs for x, y in zip(tensors(a), tensors(b), strict=True))


def test_maps_without_states_are_refused():
    model = model_of("qwen3_next")
    with pytest.raises(SettingError, match="ridgefill fit"):
        prefill(model, prompt(), random_maps(model, SPLIT), tail=TAIL, corrections=[TerminalState()])
