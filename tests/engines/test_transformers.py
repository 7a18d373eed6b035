"""`filling`: the model's own generate fills, unchanged; whatever cannot be filled runs exactly and says so."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from transformers import TextStreamer, pipeline
from transformers.generation.streamers import BaseStreamer

from ridgefill import measured
from ridgefill.compat import CACHE_ARG, cache_kwarg, new_cache
from ridgefill.engines.transformers import UNMEASURED_BREAK_EVEN, filling
from ridgefill.errors import MapsMismatchError, SettingError, UnsupportedModelError

from ..reference import (
    CASES,
    LEADING,
    PAD,
    SPLITS,
    TAIL,
    N,
    close,
    filled_rows,
    generate,
    held,
    hooks_of,
    model_of,
    padded,
    prompt,
    random_maps,
    reference_logits,
    stock_cache,
)
from ..tiny import tiny_model, tiny_tokenizer

M = N - TAIL
SETTINGS = {"split": 3, "tail": TAIL, "leading": LEADING, "min_tokens": 1}
TRUE = {**SETTINGS, "fill": "true", "leading": 0}
IDENTITY = {**SETTINGS, "fill": "identity"}
each_case = pytest.mark.parametrize("case", CASES)


def state_of(model):
    return hooks_of(model), model.config._attn_implementation, set(vars(model)), model.training


# equal to the stock model, and to the slow reference


@each_case
@pytest.mark.parametrize("split", SPLITS)
def test_true_inputs_give_stock_tokens(case, split):
    model, ids = model_of(case), prompt(batch=2)
    expected, _ = generate(model, ids)
    with filling(model, **{**TRUE, "split": split}) as f:
        ours, _ = generate(model, ids)
    assert torch.equal(ours, expected)
    assert f.stats.filled == 2 * M


@each_case
@pytest.mark.parametrize("fill", ["exact", "true"])
def test_off_equals_stock_bit_for_bit(case, fill):
    model, ids = model_of(case), prompt()
    cache, ours = stock_cache(model, ids[:, :M]), new_cache(model)
    expected, logits = generate(model, ids, **cache_kwarg(cache))
    with filling(model, **{**TRUE, "fill": fill}):
        tokens, our_logits = generate(model, ids, **cache_kwarg(ours))
    assert torch.equal(tokens, expected) and torch.equal(our_logits, logits)
    for a, b in zip(ours.layers, cache.layers, strict=True):
        assert all(map(torch.equal, held(a), held(b)))


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
@pytest.mark.parametrize("tail", [TAIL, 1])
def test_fill_equals_the_slow_reference(case, fill, tail):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, 3)
    with filling(model, maps, **{**SETTINGS, "fill": fill, "tail": tail}) as f:
        tokens, logits = generate(model, ids)
    rows = filled_rows(N, tokens.shape[1] - 1, tail)
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 3, fill, maps)[N - 1 :])
    assert f.stats.filled == N - tail - LEADING


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "mistral-window"])
@pytest.mark.parametrize("fill", ["ridge", "none"])
def test_each_row_of_a_padded_batch_is_as_alone(case, fill):
    lengths = (N, 60, 30, 14)
    model, (ids, mask) = model_of(case), padded(lengths)
    maps = random_maps(model, 3)
    with filling(model, maps, **{**SETTINGS, "fill": fill}) as f:
        tokens, logits = generate(model, ids, attention_mask=mask)
    assert f.stats.tokens == sum(lengths) and f.stats.exact == 2 * (TAIL + LEADING) + 30 + 14
    for b, n in enumerate(lengths):
        own = tokens[b, N - n : -1]
        close(logits[b], reference_logits(model, own, filled_rows(n, len(own)), 3, fill, maps)[n - 1 :])


# nothing is left behind


@each_case
@pytest.mark.parametrize("fill", ["identity", "none", "true"])
def test_leaving_the_block_leaves_the_model_as_it_was(case, fill):
    model, ids = model_of(case), prompt()
    before, (tokens, logits) = state_of(model), generate(model, ids)
    with filling(model, **{**SETTINGS, "fill": fill}) as f:
        generate(model, ids)
        assert f.stats.filled > 0
    assert state_of(model) == before
    again, same_logits = generate(model, ids)
    assert torch.equal(again, tokens) and torch.equal(same_logits, logits)


@pytest.mark.parametrize("case", ["llama", "gemma3-eager"])
@pytest.mark.parametrize("rows", [M, LEADING, TAIL, 1])
def test_an_error_in_any_stage_leaves_the_model_as_it_was(case, rows):
    """Raised from a layer while it runs the prefix, the leading rows, the tail, or a decoding step."""
    model, ids = model_of(case), prompt()
    before, (tokens, logits) = state_of(model), generate(model, ids)

    def fail(_, args):
        if args[0].shape[1] == rows:
            raise RuntimeError("no memory")

    f = filling(model, **IDENTITY)
    handle = model.model.layers[0 if rows in (M, TAIL, 1) else 4].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="no memory"), f:
            generate(model, ids)
        with f, pytest.raises(RuntimeError, match="no memory"):
            generate(model, ids)
        assert model.config._attn_implementation == before[1]
    finally:
        handle.remove()
    assert state_of(model) == before
    again, same_logits = generate(model, ids)
    assert torch.equal(again, tokens) and torch.equal(same_logits, logits)


def test_after_an_error_the_block_goes_on():
    model, ids = model_of("llama"), prompt()
    with filling(model, **IDENTITY) as f:
        expected, _ = generate(model, ids)
        with pytest.raises(IndexError):
            generate(model, torch.full_like(ids, 10**6))  # not in the vocabulary
        ours, _ = generate(model, ids)
        assert torch.equal(ours, expected) and f.stats.filled == M - LEADING


def test_an_exception_in_the_block_passes():
    model = model_of("llama")
    before = state_of(model)
    with pytest.raises(KeyError), filling(model, **IDENTITY):
        raise KeyError("the user's own")
    assert state_of(model) == before


def test_a_second_filling_is_refused_until_the_first_is_left():
    model, ids = model_of("llama"), prompt()
    with filling(model, **IDENTITY) as first:
        with pytest.raises(SettingError, match="a second `filling`"), filling(model, **IDENTITY):
            pass
        generate(model, ids)  # the first is still on
        assert first.stats.filled == M - LEADING
    with first:  # and may be entered again
        assert generate(model, ids)[0].shape == (1, N + 6)


# every way to generate


def test_sampling_with_a_seed():
    model, ids = model_of("qwen3"), prompt(batch=2)
    drawn = []
    for context in (None, filling(model, **TRUE)):
        torch.manual_seed(11)
        with context or torch.no_grad():
            drawn.append(generate(model, ids, 12, do_sample=True, temperature=1.3, top_k=40)[0])
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], generate(model, ids, 12)[0])


@each_case
@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=["beams", "several beams"],
)
def test_beam_search(case, settings):
    model, (ids, mask) = model_of(case), padded((N, 60))
    settings = {"do_sample": False, "max_new_tokens": 5, "attention_mask": mask, **settings}
    expected = model.generate(ids, **settings)
    with filling(model, **TRUE) as f:
        assert torch.equal(model.generate(ids, **settings), expected)
    assert f.stats.tokens == 3 * (N + 60)
    with filling(model, **IDENTITY) as f:
        assert model.generate(ids, **settings).shape == expected.shape


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_beam_search_with_hidden_rows(case):
    """Beams are reordered; each must go on seeing what its own prompt may see."""
    model, (ids, mask) = model_of(case), padded((N, 60))
    settings = {"num_beams": 3, "attention_mask": mask, "return_dict_in_generate": True, "do_sample": False}
    with filling(model, **{**SETTINGS, "fill": "none"}):
        out = model.generate(
            ids, max_new_tokens=5, eos_token_id=None, output_scores=True, length_penalty=0.0, **settings
        )
    for b, n in enumerate((N, 60)):
        own = out.sequences[b, N - n :]
        rows = filled_rows(n, len(own) - 1)
        logits = reference_logits(model, own[:-1], rows, 3, "none", None)[n - 1 :]
        score = logits.log_softmax(-1).gather(1, own[n:, None]).sum()
        close(out.sequences_scores[b], score)


def test_several_return_sequences():
    model, ids = model_of("gemma3_text"), prompt(batch=2)
    drawn = []
    for context in (None, filling(model, **TRUE)):
        torch.manual_seed(2)
        with context or torch.no_grad():
            drawn.append(generate(model, ids, do_sample=True, num_return_sequences=3)[0])
    assert drawn[0].shape[0] == 6 and torch.equal(*drawn)


def test_pipeline_and_streaming(capsys):
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "The law of the land is the will of its people. " * 3
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    chat = [{"role": "user", "content": text}]
    expected = [pipe(text, **settings), pipe(chat, **settings)]
    with filling(model, tokenizer=tokenizer, **TRUE) as f:
        assert pipe(text, **settings) == expected[0]
        assert f.stats.filled > 50
        first = f.stats
        assert pipe(chat, **settings) == expected[1]
        assert f.stats is not first and f.stats.filled > 50
        ids = tokenizer(text, return_tensors="pt").input_ids
        capsys.readouterr()
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        streamed = generate(model, ids, streamer=streamer)[0][0, ids.shape[1] :]
        assert capsys.readouterr().out.strip() == tokenizer.decode(streamed).strip()


class Watch(BaseStreamer):
    """Keeps what `stats` was at every token."""

    def __init__(self, f):
        self.f, self.seen = f, []

    def put(self, value):
        self.seen.append((self.f.stats, copy.deepcopy(vars(self.f.stats) if self.f.stats else None)))

    def end(self):
        pass


@pytest.mark.parametrize("new_prompt", [N, 30])
def test_decoding_leaves_the_stats_alone(new_prompt):
    model, ids = model_of("llama"), prompt(new_prompt)
    with filling(model, **IDENTITY) as f:
        watch = Watch(f)
        generate(model, ids, 5, streamer=watch)
    assert watch.seen[0] == (None, None)  # the prompt itself
    assert len(watch.seen) == 6
    for stats, fields in watch.seen[1:]:
        assert stats is f.stats and fields == vars(f.stats)
    assert f.stats.tokens == new_prompt


def test_stats_count_every_row_and_time_every_stage():
    model, ids = model_of("llama"), prompt(batch=2)
    with filling(model, **IDENTITY) as f:
        assert f.stats is None
        generate(model, ids)
        assert (f.stats.tokens, f.stats.filled, f.stats.exact) == (
            2 * N,
            2 * (M - LEADING),
            2 * (TAIL + LEADING),
        )
        assert f.stats.fill == "identity" and f.stats.reason is None
        assert set(f.stats.seconds) == {"lower", "select", "fill", "tail"}
        assert min(f.stats.seconds.values()) > 0
        generate(model, ids[:, :30])
        assert (f.stats.tokens, f.stats.filled, f.stats.exact) == (60, 0, 60)


# a second turn


def two_turns(model, more, *, new=6, ids=None, mask=None, **settings):
    """Tokens after turn 2, its first row, its logits, and the stats of both turns."""
    ids = prompt() if ids is None else ids
    cache = new_cache(model)
    with filling(model, **settings) as f:
        one, _ = generate(model, ids, new, attention_mask=mask, **cache_kwarg(cache))
        stats = f.stats
        two = torch.cat([one, prompt(more, len(ids), seed=3)], 1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones(len(ids), two.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        tokens, logits = generate(model, two, new, attention_mask=mask, **cache_kwarg(cache))
    return tokens, N + new - 1, logits, stats, f.stats


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
def test_a_short_second_turn_runs_exactly_on_the_filled_cache(case, fill):
    model = model_of(case)
    maps = random_maps(model, 3)
    tokens, start, logits, first, second = two_turns(model, 9, maps=maps, **{**SETTINGS, "fill": fill})
    assert first.filled == M - LEADING
    assert (second.filled, second.exact, second.tokens) == (0, 10, 10)
    assert "only fills an empty cache" in second.reason if fill == "none" else "does not pay" in second.reason
    rows = filled_rows(N, tokens.shape[1] - 1)
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 3, fill, maps)[start + 9 :])


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
@pytest.mark.parametrize("more", [45, 80])  # before the last TAIL rows, fewer and more than a window
def test_a_long_second_turn_is_filled_too(case, fill, more):
    model = model_of(case)
    maps = random_maps(model, 3)
    tokens, start, logits, _, second = two_turns(model, more, maps=maps, **{**SETTINGS, "fill": fill})
    rows, n = filled_rows(N, tokens.shape[1] - 1), start + more + 1
    if fill == "none":
        assert "only fills an empty cache" in second.reason and second.filled == 0
    else:  # the sink is in the cache already: no leading rows here
        assert second.reason is None and (second.filled, second.exact) == (n - start - TAIL, TAIL)
        rows[start : n - TAIL] = True
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 3, fill, maps)[n - 1 :])


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen2-window"])
def test_a_long_second_turn_of_a_padded_batch(case):
    model, lengths = model_of(case), (N, 60, 14)
    ids, mask = padded(lengths)
    tokens, start, logits, _, second = two_turns(model, 60, ids=ids, mask=mask, **IDENTITY)
    assert (second.tokens, second.filled) == (3 * 61, 3 * (61 - TAIL))
    for b, n in enumerate(lengths):
        own, pad = tokens[b, N - n : -1], N - n
        rows = filled_rows(n, len(own))
        rows[start - pad : start - pad + 61 - TAIL] = True
        expected = reference_logits(model, own, rows, 3, "identity", None)[start - pad + 60 :]
        close(logits[b], expected)


@each_case
def test_a_second_turn_that_is_off_equals_stock_bit_for_bit(case):
    model = model_of(case)
    tokens, start, logits, _, second = two_turns(model, 80, **{**TRUE, "fill": "exact"})
    assert (second.filled, second.exact, second.reason) == (0, 81, None)
    n = tokens.shape[1] - 6
    cache = stock_cache(model, prompt()[:, :M])
    generate(model, prompt(), **cache_kwarg(cache))
    with torch.no_grad():
        model(tokens[:, start : n - TAIL], use_cache=True, **cache_kwarg(cache))
    expected, expected_logits = generate(model, tokens[:, :n], **cache_kwarg(cache))
    assert torch.equal(tokens, expected) and torch.equal(logits, expected_logits)


# what runs exactly, and why


def by_generate(**settings):
    return lambda model, ids: generate(model, ids, **settings)[1]


def by_forward(**settings):
    @torch.no_grad()
    def call(model, ids):
        kwargs = {k: v(ids) if callable(v) else v for k, v in settings.items()}
        return model(ids, **{"logits_to_keep": 1, **kwargs}).logits

    return call


@torch.no_grad()
def in_training(model, ids):
    model.train()
    try:
        return model(ids, logits_to_keep=1).logits
    finally:
        model.eval()


def embeddings(model, ids):
    return generate_from(model, inputs_embeds=model.model.embed_tokens(ids))


def generate_from(model, **inputs):
    out = model.generate(
        **inputs,
        max_new_tokens=3,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(out.logits, 1)


def right_padding(ids):
    return torch.ones_like(ids).index_fill(1, torch.tensor([N - 1]), 0)


def a_hole(ids):
    return torch.ones_like(ids).index_fill(1, torch.tensor([50]), 0)


def four_dimensions(ids):
    return torch.ones(N, N, dtype=torch.bool).tril()[None, None]


REASONS = {
    "labels": (by_forward(labels=lambda ids: ids[:, -1:]), "logits of prompt tokens"),
    "every logit": (by_forward(logits_to_keep=0), "logits of prompt tokens"),
    "two logits": (by_forward(logits_to_keep=2), "logits of prompt tokens"),
    "logits by index": (by_forward(logits_to_keep=torch.tensor([1])), "logits of prompt tokens"),
    "hidden states": (by_generate(output_hidden_states=True), "hidden states or attentions"),
    "attentions": (by_forward(output_attentions=True), "hidden states or attentions"),
    "embeddings": (embeddings, "embeddings"),
    "static cache": (by_generate(cache_implementation="static"), "a StaticCache cannot be filled"),
    "no cache": (by_generate(use_cache=False), "use_cache=False"),
    "training": (in_training, "training mode"),
    "right padding": (by_forward(attention_mask=right_padding), "padding is on the left"),
    "a hole": (by_forward(attention_mask=a_hole), "padding is on the left"),
    "4-D mask": (by_forward(attention_mask=four_dimensions), r"not the usual \[batch, tokens\]"),
    "positions": (by_forward(position_ids=lambda ids: torch.arange(N)[None] * 2), "position_ids"),
    "short": (lambda model, ids: by_generate()(model, ids[:, :40]), "shorter than 41 tokens does not pay"),
    "one token": (lambda model, ids: by_generate()(model, ids[:, :1]), "shorter than 41 tokens"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_filled_runs_exactly_and_says_why(name, caplog):
    call, words = REASONS[name]
    model, ids = tiny_model("llama"), prompt()  # transformers leaves hooks of its own for some of these
    expected = call(model, ids)
    with filling(model, **IDENTITY) as f, caplog.at_level("INFO", "ridgefill"):
        generate(model, ids, 1)  # fills, so that stats of a later call could be stale
        assert f.stats.filled > 0
        ours = call(model, ids)
    assert torch.equal(ours, expected)
    assert f.stats.filled == 0 and f.stats.fill == "exact"
    assert f.stats.exact == f.stats.tokens
    assert re.search(words, f.stats.reason)
    assert f.stats.reason in caplog.text


def test_output_flags_of_the_config_count_too():
    model, ids = tiny_model("llama"), prompt()
    model.config.output_hidden_states = True
    with torch.no_grad(), filling(model, **IDENTITY) as f:
        out = model(ids, logits_to_keep=1)
    assert out.hidden_states[0].shape[1] == N and "hidden states" in f.stats.reason


def test_a_prompt_longer_than_the_context_runs_exactly():
    model, ids = tiny_model("llama", max_position_embeddings=64), prompt(65)
    expected = generate(model, ids, 1)[1]
    with filling(model, **IDENTITY) as f:
        assert torch.equal(generate(model, ids, 1)[1], expected)
    assert "the model's context is 64 tokens" in f.stats.reason


def test_prompt_lookup_decoding_gives_stock_tokens():
    model, ids = model_of("llama"), prompt(30).repeat(1, 4)
    settings = {"do_sample": False, "max_new_tokens": 10, "prompt_lookup_num_tokens": 3}
    expected = model.generate(ids, **settings)
    with filling(model, **IDENTITY) as f:
        assert torch.equal(model.generate(ids, **settings), expected)
    assert f.stats.filled == 0 and f.stats.reason


def test_stats_of_an_exact_run_leave_the_padding_out():
    model, (ids, mask) = model_of("llama"), padded((N, 60))
    with filling(model, **{**IDENTITY, "min_tokens": 500}) as f:
        generate(model, ids, attention_mask=mask)
    assert (f.stats.tokens, f.stats.exact) == (160, 160)


def test_a_reason_is_logged_once(caplog):
    model, ids = model_of("llama"), prompt()
    with filling(model, **IDENTITY), torch.no_grad(), caplog.at_level("INFO", "ridgefill"):
        for _ in range(3):
            model(ids)
            generate(model, ids[:, :20], 1)
    found = [(r.levelname, "logits" in r.message) for r in caplog.records]
    assert found == [("WARNING", True), ("INFO", False)]  # a short prompt is expected, nothing to warn of


# how the model is called


def test_arguments_by_position():
    model, (ids, mask) = model_of("llama"), padded((N, 60))
    with torch.no_grad(), filling(model, **IDENTITY) as f:
        expected = model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits
        assert f.stats.filled > 0
        f.stats = None
        assert torch.equal(model(ids, mask, logits_to_keep=1).logits, expected)
        assert f.stats.filled > 0


def test_the_older_name_of_the_cache_argument(recwarn):
    model, ids, cache = model_of("llama"), prompt(), new_cache(model_of("llama"))
    with torch.no_grad(), filling(model, **IDENTITY) as f:
        out = model(ids, past_key_values=cache, logits_to_keep=1)
    assert out[CACHE_ARG] is cache and cache.get_seq_length() == N and f.stats.filled > 0
    assert not [w for w in recwarn if "past_key_values" in str(w.message)]


def test_a_forward_without_a_cache_returns_the_filled_one():
    model, ids = model_of("llama"), prompt()
    with torch.no_grad(), filling(model, **IDENTITY):
        out = model(ids, logits_to_keep=1)
    assert out.logits.shape[1] == 1 and out[CACHE_ARG].get_seq_length() == N


def test_gradients_are_those_of_the_filled_model():
    """The tail's own attention has no gradient through its merge, so it must not run where one is asked for."""
    model, ids = tiny_model("llama").double(), prompt()
    weight = model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    with filling(model, **IDENTITY):
        model(ids, logits_to_keep=1).logits[0, 0, 5].backward()
        found, weight.grad = weight.grad, None
        step = 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).double()
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                weight += sign * step
                ends.append(model(ids, logits_to_keep=1).logits[0, 0, 5].item())
                weight -= sign * step
    assert (found * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2, rel=2e-3)


# settings


def test_min_tokens_is_the_tail_and_256_rows_unless_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path))
    model = model_of("llama")
    maps = random_maps(model, 3)
    assert filling(model, maps).min_tokens == 2048 + 16 + UNMEASURED_BREAK_EVEN
    f = filling(model, maps, tail=8, leading=4)
    measured.remember(maps, f.plan, model.device, 77)
    assert filling(model, maps, tail=8, leading=4).min_tokens == 77
    assert filling(model, maps, tail=9, leading=4).min_tokens == 9 + 4 + UNMEASURED_BREAK_EVEN
    assert (
        filling(model, maps, fill="identity", tail=8, leading=4).min_tokens == 8 + 4 + UNMEASURED_BREAK_EVEN
    )
    assert filling(model, maps, tail=8, leading=4, min_tokens=2).min_tokens == 13  # one row to fill


def test_bfloat16():
    model, ids = tiny_model("llama").bfloat16(), prompt()
    maps = random_maps(model, 3)
    with filling(model, maps, **SETTINGS) as f:
        tokens, logits = generate(model, ids, 3)
    assert f.stats.filled > 0 and logits.isfinite().all()
    model, rows = model.float(), filled_rows(N, tokens.shape[1] - 1)
    expected = reference_logits(model, tokens[0, :-1], rows, 3, "ridge", maps)[N - 1 :]
    close(logits[0].float(), expected, atol=0.1)


@pytest.mark.parametrize("min_tokens", [N, N + 1])
def test_min_tokens_is_the_shortest_filled(min_tokens):
    model = model_of("llama")
    with filling(model, **{**IDENTITY, "min_tokens": min_tokens}) as f:
        generate(model, prompt(), 1)
    assert (f.stats.filled > 0) == (min_tokens == N)


def test_refusals_before_anything_runs():
    model = model_of("llama")
    before = state_of(model)
    with pytest.raises(MapsMismatchError, match="other weights"):
        filling(model, random_maps(tiny_model("llama", seed=1), 3))
    with pytest.raises(SettingError, match="needs maps"):
        filling(model)
    with pytest.raises(UnsupportedModelError, match="Linear"):
        filling(torch.nn.Linear(2, 2), fill="identity", split=3)
    assert state_of(model) == before
    assert model.config.pad_token_id == PAD
