"""Mixed serving (paper 4.8): one long request arrives while other users decode; any OpenAI-compatible server.

Both arms run in turn against live servers, or against one that reads the arm from the request. A streamed chunk
counts as a token, which it is for vLLM and llama.cpp.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

from ridgefill.errors import PromptError, SettingError

WARM = 4  # tokens that every other user has been given before the long request comes
ARMS = ("exact", "filled")


@dataclass(frozen=True)
class Endpoint:
    """Where an arm's requests go.

    Attributes:
        url: the server's, without or with ``/v1``.
        model: its name there.
        body: further fields of every request, such as {"vllm_xargs": {"ridgefill": 0}}.
        key: of the API, or None.
    """

    url: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None

    def stream(self, prompt: str, max_tokens: int, timeout: float = 3600.0) -> Iterator[dict[str, Any]]:
        """A completion's chunks as they come, greedy.

        Raises:
            SettingError: nobody answers, or the server refuses; in its words.
        """
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/completions"
        said = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        said |= {"stream": True, "stream_options": {"include_usage": True}, **self.body}
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(url, json.dumps(said).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                for line in answer:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise SettingError(f"a request to {url}", str(chunk["error"]), "see the server's log")
                    yield chunk
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")[:500].strip() or str(error)
            raise SettingError(
                f"a request to {url}", why, "see the server's log, --model and the body"
            ) from error
        except (urllib.error.URLError, OSError) as error:
            raise SettingError(
                f"a request to {url}", str(error), "start the server, or name its address"
            ) from error


@dataclass
class Cell:
    """One repetition of one arm at one number of users.

    Attributes:
        tokens: of the long prompt, as the server counts them.
        ttft: seconds to the long request's first token.
        others: tokens a second that all other users together were given, from the long request's arrival to its last
            token; None without others.
        gaps: seconds between two tokens of one of the others in that time.
    """

    tokens: int
    ttft: float
    others: float | None
    gaps: list[float]

    def to_json(self) -> dict[str, Any]:
        """The figures, the gaps as percentiles."""
        found = {"tokens": self.tokens, "ttft_s": self.ttft, "others_tokens_per_s": self.others}
        return found | (gap_figures(self.gaps) if self.gaps else {})


def gap_figures(gaps: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and largest of inter-token gaps, in milliseconds."""
    p50, p99 = np.percentile(gaps, (50, 99)) * 1000
    return {"itl_p50_ms": float(p50), "itl_p99_ms": float(p99), "itl_max_ms": max(gaps) * 1000}


class _Other(threading.Thread):
    """A user who decodes until told to stop, one completion after another; notes when each token comes."""

    def __init__(self, endpoint: Endpoint, prompt: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.prompt, self.stop = endpoint, prompt, stop
        # one list a completion: between two of them there is no gap to measure
        self.times: list[list[float]] = []
        self.failed: BaseException | None = None

    def run(self) -> None:
        """Asks until told to stop."""
        try:
            turn = 0
            while not self.stop.is_set():
                self.times.append([])
                for chunk in self.endpoint.stream(f"{self.prompt} ({turn})", 512):
                    if chunk.get("choices"):
                        self.times[-1].append(time.perf_counter())
                    if self.stop.is_set():
                        return
                turn += 1
        except BaseException as error:  # told to whoever waits for the tokens
            self.failed = error

    @property
    def tokens(self) -> int:
        """How many came."""
        return sum(map(len, self.times))


def run_cell(
    endpoint: Endpoint, prompt: str, others: Sequence[str], new_tokens: int, patience: float = 600.0
) -> Cell:
    """The long request among the others, once.

    Raises:
        SettingError: a request failed, or the others were given no token.
    """
    stop = threading.Event()
    users = [_Other(endpoint, text, stop) for text in others]
    try:
        for user in users:
            user.start()
        deadline = time.perf_counter() + patience
        while any(user.tokens < WARM for user in users):
            _raise_failed(users)
            if time.perf_counter() > deadline:
                raise SettingError(
                    f"{len(users)} other users",
                    f"no {WARM} tokens each within {patience:.0f} s",
                    "see the server",
                )
            time.sleep(0.01)
        began, times, tokens = time.perf_counter(), list[float](), 0
        for chunk in endpoint.stream(prompt, new_tokens):
            if chunk.get("choices"):
                times.append(time.perf_counter())
            tokens = (chunk.get("usage") or {}).get("prompt_tokens", tokens)
    finally:
        stop.set()
        for user in users:
            user.join(60)
    _raise_failed(users)
    if not times:
        raise SettingError("the long request", "the server gave no token", "see its log")
    ended, gaps, given = times[-1], list[float](), 0
    for user in users:
        for run in user.times:
            given += sum(began <= t <= ended for t in run)
            gaps += [b - a for a, b in pairwise(run) if b >= began and a <= ended]
    return Cell(tokens, times[0] - began, given / (ended - began) if users else None, gaps)


def _raise_failed(users: Sequence[_Other]) -> None:
    for user in users:
        if user.failed is not None:
            raise user.failed


def measure(
    arms: Mapping[str, Endpoint],
    text: str,
    tokens: int,
    users: Sequence[int],
    repeats: int = 3,
    new_tokens: int = 16,
    tick: Callable[[], None] = lambda: None,
) -> dict[int, dict[str, list[Cell]]]:
    """Every number of users, the arms in turn, the first of them changing with each repetition.

    Args:
        arms: "exact" and "filled".
        text: real text of at least ``tokens`` tokens; each prompt starts with words of its own, so that no prefix
            cache has seen it.
        tokens: of the long prompt, about.
        users: the long request counted.
        new_tokens: of the long request's answer.
        tick: called after each cell.

    Returns:
        users -> arm -> one `Cell` a repetition.

    Raises:
        PromptError: the text is too short.
        SettingError: as `run_cell`.
    """
    length = characters(next(iter(arms.values())), text, tokens)
    if length > len(text):
        raise PromptError(
            f"a prompt of {tokens} tokens",
            f"the text has {len(text)} characters, and about {length} are needed",
            "give more text, or fewer --tokens",
        )
    for name, endpoint in arms.items():  # what compiles, or is loaded at first use
        run_cell(endpoint, f"Warm-up of {name}. {text[:length]}", (), 1)
    found: dict[int, dict[str, list[Cell]]] = {}
    for count in users:
        cells = found[count] = {name: [] for name in arms}
        for repeat in range(repeats):
            order = list(arms) if repeat % 2 == 0 else list(arms)[::-1]
            for name in order:
                prompt = f"Document {count}-{repeat}-{name}. {text[:length]}"
                others = [
                    f"User {i} of {count}, {repeat}-{name}: tell a long story." for i in range(1, count)
                ]
                cells[name].append(run_cell(arms[name], prompt, others, new_tokens))
                tick()
    return found


def characters(endpoint: Endpoint, text: str, tokens: int) -> int:
    """How many characters of ``text`` make about so many tokens, as the server counts them."""
    sample = text[: max(200, min(4000, tokens))]  # in few tokens, where a token is a byte
    usage = [chunk["usage"] for chunk in endpoint.stream(sample, 1) if chunk.get("usage")]
    if not usage:
        raise SettingError(
            f"prompts of {tokens} tokens", "the server does not say how many tokens a prompt has (usage)",
            "use a server that honours stream_options.include_usage",
        )  # fmt: skip
    return int(len(sample) / usage[-1]["prompt_tokens"] * tokens)


def to_json(found: Mapping[int, Mapping[str, Sequence[Cell]]]) -> list[dict[str, Any]]:
    """One object for each number of users: every repetition, medians and their ratios."""
    made = []
    for users, cells in found.items():
        row: dict[str, Any] = {
            "users": users,
            "each": {arm: [c.to_json() for c in own] for arm, own in cells.items()},
        }
        row["median"] = {arm: medians(own) for arm, own in cells.items()}
        if set(ARMS) <= set(cells):
            exact, filled = (row["median"][arm] for arm in ARMS)
            row["exact_over_filled"] = {
                name: exact[name] / filled[name] for name in exact if exact[name] and filled.get(name)
            }
        made.append(row)
    return made


def medians(cells: Sequence[Cell]) -> dict[str, float]:
    """Of every figure over the repetitions; the gaps of all repetitions together."""
    figures = [cell.to_json() for cell in cells]
    names = ("tokens", "ttft_s", "others_tokens_per_s")
    found = {n: statistics.median(f[n] for f in figures) for n in names if figures[0][n] is not None}
    gaps = [gap for cell in cells for gap in cell.gaps]
    return found | (gap_figures(gaps) if gaps else {})


def table(found: Mapping[int, Mapping[str, Sequence[Cell]]]) -> Table:
    """Medians, exact / filled, as the paper's Table 14."""
    made = Table(box=None, pad_edge=False)
    for title in ("users", "TTFT s", "speedup", "others tok/s", "ITL p50 ms", "p99 ms", "max ms"):
        made.add_column(title, justify="right")
    for row in to_json(found):
        exact, filled = (row["median"].get(arm, {}) for arm in ARMS)

        def pair(name: str, digits: int, exact: Any = exact, filled: Any = filled) -> str:
            return " / ".join(f"{m[name]:.{digits}f}" if name in m else "-" for m in (exact, filled))

        ratio = row.get("exact_over_filled", {}).get("ttft_s")
        made.add_row(
            str(row["users"]),
            pair("ttft_s", 2),
            "-" if ratio is None else f"{ratio:.2f}x",
            pair("others_tokens_per_s", 1),
            pair("itl_p50_ms", 0),
            pair("itl_p99_ms", 0),
            pair("itl_max_ms", 0),
        )
    return made
