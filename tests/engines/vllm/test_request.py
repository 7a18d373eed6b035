import pytest

from ridgefill.engines.vllm.request import Serving, choose, read
from ridgefill.errors import SettingError

SERVING = Serving("key", tail=100, leading=16, min_tokens=400)


def test_a_request_says_whether_it_is_filled():
    assert choose(SERVING, 400, None).reason is None
    assert choose(SERVING, 400, {"ridgefill": 0}).reason == "the request asks for it"
    on_request = Serving("key", 100, 16, 400, default=False)
    assert choose(on_request, 400, {}).reason is not None
    assert choose(on_request, 400, {"ridgefill": 1}).reason is None
    assert choose(SERVING, 400, {"kv_transfer_params": {}}).reason is None  # others' fields


@pytest.mark.parametrize(
    ("extra", "prompt", "filled"),
    [({}, 399, False), ({}, 400, True), ({"ridgefill_tail": 200}, 499, False), ({"ridgefill_tail": 200}, 500, True),
     ({"ridgefill_tail": 10}, 310, True)],
)  # fmt: skip
def test_break_even_goes_with_the_tail(extra, prompt, filled):
    choice = choose(SERVING, prompt, extra)
    assert (choice.reason is None) == filled and choice.tail == extra.get("ridgefill_tail", 100)
    assert filled or ("does not pay" in choice.reason and not choice.said)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"prompt_logprobs": True}, "log-probabilities"), ({"sampling": False}, "pooling"),
     ({"tokens_alone": False}, "images")],
)  # fmt: skip
def test_what_cannot_be_filled_runs_exactly_and_is_said(more, words):
    choice = choose(SERVING, 4000, None, **more)
    assert words in choice.reason and choice.said


def test_where_nothing_is_filled_the_reason_is_said():
    never = Serving("key", 100, 16, 400, never="speculative decoding is on")
    assert choose(never, 4000, {"ridgefill": 1}).said


@pytest.mark.parametrize(
    "extra",
    [{"ridgefill": "maybe"}, {"ridgefill": 2}, {"ridgefill_tail": 0}, {"ridgefill_tail": True},
     {"ridgefill_tail": "8"},
     {"ridgefill_tale": 8}, {"ridgefil": 0}],
)  # fmt: skip
def test_a_wrong_field_is_refused_and_without_that_gate_runs_exactly(extra):
    with pytest.raises(SettingError, match="in a request"):
        read(extra)
    assert choose(SERVING, 4000, extra).said
