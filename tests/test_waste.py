"""Nothing wasted: which rows reach which module, and how large the largest mask is."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgefill.engines.transformers import filling
from tests.tiny import tiny_model

N, TAIL, LEADING, SPLIT = 400, 40, 8, 3


def rows_seen(model, modules):
    """module name -> rows that entered it while a prompt of N tokens was answered."""
    seen = dict.fromkeys(modules, 0)
    named = dict(model.named_modules())

    def counter(name):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            seen[name] += x.shape[0] * x.shape[1]

        return hook

    handles = [named[m].register_forward_pre_hook(counter(m), with_kwargs=True) for m in modules]
    ids = torch.randint(256, (1, N))
    with filling(model, fill="identity", split=SPLIT, tail=TAIL, leading=LEADING, min_tokens=1):
        model.generate(ids, max_new_tokens=1, do_sample=False)
    for handle in handles:
        handle.remove()
    return seen


def test_filled_rows_reach_keys_and_values_only():
    late = {
        part: f"model.layers.{SPLIT + 1}.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp")
    }
    written = {part: f"model.layers.{SPLIT + 1}.self_attn.{part}" for part in ("k_proj", "v_proj")}
    lower = f"model.layers.{SPLIT - 1}.mlp"
    seen = rows_seen(tiny_model(), [*late.values(), *written.values(), lower, "lm_head"])
    assert {seen[m] for m in late.values()} == {LEADING + TAIL}
    # every prefix row is written; the leading rows, which run as well, are written once more by their own run
    assert {seen[m] for m in written.values()} == {N + LEADING}
    assert seen[lower] == N
    assert seen["lm_head"] == 1


def test_a_window_layer_is_written_only_where_it_is_read():
    model = tiny_model("gemma3_text")  # windows of 32, full attention in layers 2 and 5
    windowed, full = (f"model.layers.{i}.self_attn.k_proj" for i in (4, 5))
    seen = rows_seen(model, [windowed, full])
    assert seen[windowed] == 31 + LEADING + TAIL
    assert seen[full] == N + LEADING


class Largest(TorchDispatchMode):
    """The most elements of any tensor made inside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_no_mask_of_rows_by_rows_is_made():
    model = tiny_model(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1)
    n, tail = 2048, 1024
    ids = torch.randint(256, (1, n))
    with (
        filling(model, fill="identity", split=SPLIT, tail=tail, leading=LEADING, min_tokens=1),
        Largest() as largest,
        torch.no_grad(),
    ):
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
    # The stock tail's mask alone would have 1,024 x 2,048 elements; states and weights stay far below.
    assert largest.elements < tail * n / 4
