"""What one request asks for: ``SamplingParams.extra_args``, or ``vllm_xargs`` over HTTP.

``ridgefill``: true or false (1 or 0), whether its prompt is filled; ``ridgefill_tail``: its last tokens that run
every layer. The scheduler and the workers both go by `choose`, and so cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgefill.errors import SettingError

ON, TAIL = "ridgefill", "ridgefill_tail"


@dataclass(frozen=True)
class Serving:
    """What every request is judged by.

    Attributes:
        key: of the plan and its maps, for the prefix cache (`settings.key_of`).
        tail, leading: of the plan.
        min_tokens: shorter prompts run exactly.
        default: whether a request that says nothing is filled.
        never: why no prompt is filled at all, or None.
        alone: a filled prompt takes nothing from the prefix cache: its rows are chosen by its own question, or its
            late layers are written when all of it is there.
    """

    key: str
    tail: int
    leading: int
    min_tokens: int
    default: bool = True
    never: str | None = None
    alone: bool = False


@dataclass(frozen=True)
class Choice:
    """How one prompt is prefilled.

    Attributes:
        tail: its last tokens that run every layer.
        reason: why all of it runs exactly, or None.
        said: whether the reason is one that the log should name: not length, and not a wish.
    """

    tail: int
    reason: str | None = None
    said: bool = False


def read(extra: Mapping[str, Any] | None) -> tuple[bool | None, int | None]:
    """Whether a request wants the fill, and its tail; None for what it does not say.

    Raises:
        SettingError: a value of another kind, or a name that is almost ours.
    """
    extra = extra or {}
    for name in extra:
        if name.startswith("ridge") and name not in (ON, TAIL):
            raise SettingError(f"{name} in a request", "there is no such field", f"use {ON} or {TAIL}")
    on, tail = extra.get(ON), extra.get(TAIL)
    if on is not None and on not in (0, 1):  # HTTP turns true into 1
        raise SettingError(f"{ON}={on!r} in a request", "it is on or off", "give true or false")
    if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 1):
        raise SettingError(
            f"{TAIL}={tail!r} in a request", "it is a count of the prompt's last tokens", "give 1 or more"
        )
    return None if on is None else bool(on), tail


def choose(
    serving: Serving,
    prompt: int,
    extra: Mapping[str, Any] | None,
    *,
    sampling: bool = True,
    prompt_logprobs: bool = False,
    tokens_alone: bool = True,
) -> Choice:
    """How a prompt of ``prompt`` tokens is prefilled.

    Args:
        extra: the request's own fields.
        sampling: False for pooling.
        prompt_logprobs: log-probabilities of prompt tokens are asked for.
        tokens_alone: False for prompts with images or embeddings.
    """
    if serving.never is not None:
        return Choice(serving.tail, serving.never, said=True)
    if not sampling:
        return Choice(
            serving.tail, "pooling reads every row's last state, and filled rows have none", said=True
        )
    try:
        on, tail = read(extra)
    except SettingError as error:  # the server refuses such a request; the offline class has no such gate
        return Choice(serving.tail, str(error), said=True)
    tail = serving.tail if tail is None else tail
    if not (serving.default if on is None else on):
        return Choice(tail, "the request asks for it")
    if prompt_logprobs:
        return Choice(
            tail, "log-probabilities of prompt tokens were asked for, and filled rows have none", said=True
        )
    if not tokens_alone:
        return Choice(tail, "the prompt has images or embeddings, not tokens alone", said=True)
    least = max(serving.min_tokens - serving.tail + tail, tail + serving.leading + 1)
    if prompt < least:
        return Choice(tail, f"a prompt shorter than {least} tokens does not pay")
    return Choice(tail)


def choose_of(serving: Serving, request: Any) -> Choice:
    """As `choose`, for a request as vLLM's scheduler and workers know it."""
    params = request.sampling_params
    return choose(
        serving,
        request.num_prompt_tokens,
        None if params is None else params.extra_args,
        sampling=params is not None,
        prompt_logprobs=params is not None and params.prompt_logprobs is not None,
        tokens_alone=not request.mm_features and request.prompt_embeds is None,
    )
