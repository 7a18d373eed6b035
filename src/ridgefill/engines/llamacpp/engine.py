"""`RidgeLlama`: llama-cpp-python's `Llama`, whose long prompts are filled.

prompt[:leading]            every layer, in a second context on the same weights
prompt[leading:-tail]       layers below the split there; its graphs are ended at the split (`stopped`)
late keys and values        computed by ggml from the maps (`late_rows`), written into the state (`state`)
the state                   put into the user's own context, which llama.cpp alone has touched until then
prompt[-tail:], answer      llama.cpp, as ever
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgefill.engines.llamacpp import prompt_cache
from ridgefill.engines.llamacpp import settings as checks
from ridgefill.engines.llamacpp.gguf_model import GgufModel
from ridgefill.engines.llamacpp.late_rows import READ, LateRows, Recipe
from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.engines.llamacpp.reader import choose
from ridgefill.engines.llamacpp.self_check import self_check
from ridgefill.engines.llamacpp.sources import Sources
from ridgefill.engines.llamacpp.state import SequenceState
from ridgefill.engines.llamacpp.stopped import StoppedContext, get_state, set_state
from ridgefill.errors import MapsMismatchError, PromptError, SettingError
from ridgefill.fill import Exact, Ridge
from ridgefill.maps import RidgeMaps
from ridgefill.maps_gguf import load_maps
from ridgefill.plan import make_plan
from ridgefill.rows.reader import CAPTURED
from ridgefill.settings_file import with_setting
from ridgefill.stats import PrefillStats

_lib = llama_cpp()  # refused by name where it is missing or of another release
from llama_cpp import Llama  # noqa: E402

log = logging.getLogger("ridgefill")

# Below this many fillable rows a second context costs more than the fill saves.
UNMEASURED_BREAK_EVEN = 256


class RidgeLlama(Llama):
    """`llama_cpp.Llama` with the fill: completions, chat, streaming, caches and sampling are its own.

    ::

        llm = RidgeLlama("model.gguf", maps="maps/split-15", tail=1024, n_ctx=8192, flash_attn=True)
        llm.create_chat_completion(messages=[...], stream=True)
        print(llm.stats)
        with llm.exactly():
            llm("...")

    Args:
        model_path: a GGUF file.
        maps: maps, their folder, hub name or GGUF file; the ridge fill needs them.
        tail, leading, fill, split, preset: as in `ridgefill.filling`; fills are "ridge", "identity" and "exact".
        rows: a selector, or its text: whole spans, not scattered rows: each run of rows is decoded by itself.
        corrections: only none; others are refused.
        setting: a file that `ridgefill tune` wrote; what is named beside it takes precedence.
        min_tokens: shorter prompts run exactly; the tail, the leading rows and 256 more unless named.
        weights: of the fill, in memory: "f32", fast, or "packed", small (`late_rows.LateRows`).
        n_ctx: 0, the default, is the model's own context.
        kwargs: of `llama_cpp.Llama`; ``type_k`` and ``type_v`` also by name, such as "q8_0".

    Attributes:
        plan: what is filled.
        stats: `PrefillStats` of the last prompt, None before the first.
        question: rows [first, stop) of the next prompts' question, for selectors; None: they end with it.

    Raises:
        UnsupportedModelError, ModelFileError, MapsMismatchError, SettingError: by name, before weights are read.
        StateLayoutError: this llama.cpp's state is laid out otherwise; nothing was written.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        maps: RidgeMaps | str | Path | None = None,
        tail: int | None = None,
        leading: int | None = None,
        fill: str | None = None,
        split: int | float | None = None,
        preset: str | None = None,
        rows: Any = None,
        corrections: Any = None,
        setting: str | Path | None = None,
        min_tokens: int | None = None,
        weights: str = "f32",
        n_ctx: int = 0,
        **kwargs: Any,
    ) -> None:
        path = checks.model_file(model_path)
        self._given = {
            "maps": maps, "tail": tail, "leading": leading, "fill": fill, "split": split, "preset": preset,
            "rows": rows, "corrections": corrections, "setting": setting, "min_tokens": min_tokens,
            "weights": weights,
        }  # fmt: skip
        self._gguf = GgufModel(path)
        loaded = maps if isinstance(maps, RidgeMaps) or maps is None else load_maps(maps)
        wanted = {
            "preset": preset, "fill": fill, "split": split, "tail": tail, "leading": leading, "rows": rows,
            "corrections": corrections,
        }  # fmt: skip
        loaded, chosen, tuned = with_setting(setting, loaded, wanted)
        if loaded is not None:
            loaded.check_identity(self._gguf.identity())
        self.plan = make_plan(self._gguf.layers, loaded, **chosen)
        checks.refuse_plan(self.plan, self._gguf)
        checks.refuse_settings(checks.numbered_types(kwargs))
        context = n_ctx or self._gguf.context
        if context < self.plan.shortest and not isinstance(self.plan.fill, Exact):
            raise SettingError(
                f"a context of {context} tokens",
                f"with a tail of {self.plan.tail} and {self.plan.leading} leading rows nothing of it would be filled",
                f"give n_ctx of {self.plan.shortest} or more, a shorter tail, or run exactly (fill='exact')",
            )
        recipes = checks.recipes(self.plan, self._gguf)
        min_tokens = tuned if min_tokens is None else min_tokens
        unmeasured = self.plan.shortest - 1 + UNMEASURED_BREAK_EVEN
        self.min_tokens = max(unmeasured if min_tokens is None else min_tokens, self.plan.shortest)
        self.stats: PrefillStats | None = None
        self.question: tuple[int, int] | None = None
        self._off = isinstance(self.plan.fill, Exact)
        self._late: LateRows | None = None
        super().__init__(model_path=str(path), n_ctx=n_ctx, **checks.numbered_types(kwargs))
        weakref.finalize(self, self._stack.close)  # at exit too, while llama_cpp can still free what it made
        self.n_tokens: int
        self._filled = np.zeros(self.n_ctx(), bool)  # which rows of the cache are filled
        if not self._off:
            self._form = self_check(self)
            self._late = self._late_rows(recipes)

    @contextmanager
    def exactly(self) -> Iterator[RidgeLlama]:
        """Prompts within the block run exactly, and take no filled row of an earlier one."""
        before, self._off = self._off, True
        try:
            yield self
        finally:
            self._off = before

    @contextmanager
    def filled_by(self, fill: str) -> Iterator[RidgeLlama]:
        """Prompts within the block are filled by another arm at the same split: "identity", say."""
        plan, late = self.plan, self._late
        other = replace(plan, fill=make_plan(self._gguf.layers, fill=fill, split=plan.split).fill)
        checks.refuse_plan(other, self._gguf)
        rows = self._late_rows(checks.recipes(other, self._gguf))
        self._forget_filled(0)  # another arm's rows
        self.plan, self._late = other, rows
        try:
            yield self
        finally:
            rows.close()
            self._forget_filled(0)
            self.plan, self._late = plan, late

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As `llama_cpp.Llama.generate`; rows of the last prompt are reused where they may be filled in this one."""
        if kwargs.get("reset", True):
            self._forget_filled(len(tokens))
        return super().generate(tokens, *args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """As `llama_cpp.Llama.eval`, which gets the tail of a prompt that can be filled and all of any other.

        Raises:
            PromptError: more tokens than the context holds.
        """
        past = self.n_tokens
        if past + len(tokens) > self.n_ctx():
            raise PromptError(
                f"{len(tokens)} tokens after {past}",
                f"the context holds {self.n_ctx()}",
                "make it larger (n_ctx), or give a shorter prompt",
            )
        if len(tokens) > 1 or past == 0:  # else a token of the answer
            reason = self._why_exact(len(tokens))
            self.stats = PrefillStats(len(tokens), 0, len(tokens), reason=reason)
            if reason is None:
                tokens = self._fill(tokens, self.plan.tail)
                began = time.perf_counter()
                super().eval(tokens)
                self._wait()
                self.stats.seconds["tail"] = time.perf_counter() - began
                return
            level = logging.INFO if reason.endswith("pay") else logging.WARNING
            log.log(logging.DEBUG if self._off else level, "this prompt runs exactly: %s", reason)
        self._filled[past : past + len(tokens)] = False
        super().eval(tokens)

    def save_state(self) -> Any:
        """As `llama_cpp.Llama.save_state`; the state knows which of its rows are filled, and by which maps."""
        state = super().save_state()
        state.ridgefill = self.fill_key(), self._filled[: self.n_tokens].copy()
        return state

    def load_state(self, state: Any) -> None:
        """As `llama_cpp.Llama.load_state`.

        Raises:
            MapsMismatchError: its rows were filled by other maps.
        """
        key, filled = getattr(state, "ridgefill", (None, np.zeros(0, bool)))
        if filled.any() and key != self.fill_key():
            raise MapsMismatchError(
                "load a saved state", "its rows were filled by other maps", "drop it, or load those maps"
            )
        super().load_state(state)
        self._filled[:] = False
        self._filled[: len(filled)] = filled

    def close(self) -> None:
        """Frees the model."""
        late: LateRows | None = getattr(self, "_late", None)  # none yet where __init__ refused
        if late is not None:
            late.close()
            self._late = None
        if hasattr(self, "_stack"):
            super().close()

    def fill_key(self) -> str:
        """What two fills must share for their rows to be interchangeable; rows of another tail are."""
        fill = self.plan.fill
        maps = fill.maps.content_hash if isinstance(fill, Ridge) else fill.name
        return f"{self.plan.split} {self.plan.leading} {maps} {self.plan.rows or ''}".rstrip()

    def save_prompt(self, path: str | Path) -> Path:
        """Writes what the context holds to a prompt cache file, whole or not at all; its path (`prompt_cache`).

        Raises:
            OutputError: it cannot be written.
            PromptError: the context is empty.
        """
        return prompt_cache.save(self, path)

    def load_prompt(self, path: str | Path) -> int:
        """Puts a saved prompt into the context; the number of its tokens.

        A prompt that begins with them then runs from there.

        Raises:
            PromptCacheError: no such file, damaged, or of another model, other maps or another cache; nothing was
                touched.
        """
        return prompt_cache.load(self, path)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | self._given

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def rope_type(self) -> int:
        """llama.cpp's number of the model's rotary embedding."""
        return int(_lib.llama_model_rope_type(self._model.model))

    def _late_rows(self, recipes: Mapping[int, Recipe]) -> LateRows:
        threads, weights = self.n_threads_batch, self._given["weights"]
        return LateRows(self._gguf, recipes, self._form, self.rope_type, threads, weights)

    def _why_exact(self, count: int) -> str | None:
        """Why ``count`` tokens after what the cache holds must run exactly, or None."""
        total = self.n_tokens + count
        if self._off:
            return "the fill is off"
        if self._logits_all:
            return "logits of every prompt token were asked for, and filled rows have none"
        if total < self.min_tokens:
            return f"a prompt shorter than {self.min_tokens} tokens does not pay"
        if self._rows_to_fill(count) < min(UNMEASURED_BREAK_EVEN, self.min_tokens - self.plan.shortest + 1):
            return "filling the rows that are not cached yet would not pay"
        return None

    def _rows_to_fill(self, count: int) -> int:
        past = self.n_tokens
        return past + count - self.plan.tail - max(past, self.plan.leading)

    def eval_prefix(self, tokens: Sequence[int]) -> None:
        """Fills the context with all of ``tokens`` but the leading rows; there is no tail yet."""
        self._fill(tokens, 0)

    def _fill(self, tokens: Sequence[int], tail: int) -> Sequence[int]:
        """Puts the state of all but the last ``tail`` tokens into the context; returns those.

        Args:
            tokens: follow the ``n_tokens`` rows that the context holds.
        """
        plan, late = self.plan, self._late
        past = int(self.n_tokens)
        if late is None:
            raise SettingError(
                "a fill", "the fill is off for good, or this model was closed", "make a new one"
            )
        stop = past + len(tokens) - tail
        first = max(past, plan.leading)
        ids = [*self.input_ids[:past].tolist(), *tokens]
        began = time.perf_counter()
        chooses = plan.rows is not None and tail > 0
        # rows that are run anew stand beside the old ones for a moment
        room = len(ids) + int(self.context_params.n_ubatch) if chooses else stop
        with StoppedContext(
            self._model.model, self.context_params, room, self._gguf.width, 2 if chooses else 1
        ) as context:
            if past:
                self._ctx.kv_cache_seq_rm(-1, past, -1)
                context.set_state(get_state(self._ctx.ctx))
            sources = self._sources
            before = sources.lead(context, tokens[: first - past], past)
            states, asked = self._lower(context, ids, first, stop, chooses)
            if sources.reads:
                states[READ] = sources.read(states, before, ids, first)
            lower = time.perf_counter()
            data = context.state()
            state = SequenceState(data, self._gguf.caches)
            late.write(state, states, np.arange(first, stop, dtype=np.int32))
            filled = time.perf_counter()
            chosen = np.empty(0, np.int32)
            if chooses:
                chosen = choose(self, state, ids, asked, stop)
                chosen = chosen[chosen >= first]
                context.set_state(data)
                context.replace_rows(ids[:stop], chosen)
                data = context.state()
        selected = time.perf_counter()
        set_state(self._ctx.ctx, data)
        self.input_ids[past:stop] = tokens[: stop - past]
        self._filled[past:first] = False
        self._filled[first:stop] = True
        self._filled[stop:] = False
        self.n_tokens = stop
        self._filled[chosen] = False
        count = stop - first - len(chosen)
        self.stats = PrefillStats(len(tokens), count, len(tokens) - count, len(chosen), plan.fill.name)
        self.stats.seconds.update(lower=lower - began, fill=filled - lower + time.perf_counter() - selected)
        if chooses:
            self.stats.seconds["select"] = selected - filled
        return tokens[stop - past :]

    def _lower(
        self, context: StoppedContext, ids: Sequence[int], first: int, stop: int, chooses: bool
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Layers below the split for rows ``first`` to ``stop``, and for the tail too where its attention is read.

        Returns:
            The split states, and what entered the lower layers of the last rows (`reader.choose`).
        """
        sources = self._sources.layers
        if not (chooses and self.plan.rows is not None and self.plan.rows.attends):
            return context.inputs_of(sources, ids[first:stop], first), {}
        read = range(1, self.plan.split + 1)
        ask = min(stop, max(first, len(ids) - CAPTURED))
        parts = [
            context.inputs_of(wanted, ids[a:b], a)
            for wanted, a, b in (
                (sources, first, ask),
                (sources | set(read), ask, stop),
                (set(read), stop, len(ids)),
            )
            if a < b
        ]
        split = {s: np.concatenate([p[s] for p in parts])[: stop - first] for s in sources}
        return split, {i: np.concatenate([p[i] for p in parts if set(read) <= set(p)]) for i in read}

    @property
    def _sources(self) -> Sources:
        return Sources(self._gguf, self.plan, self._late)

    def _forget_filled(self, count: int) -> None:
        """Gives up cached rows from the first that is filled and must be exact in a prompt of ``count`` tokens."""
        tail = 0 if self._off else max(0, count - self.plan.tail)
        held = np.flatnonzero(self._filled[tail : self.n_tokens])
        if len(held):
            self.n_tokens = tail + int(held[0])
            self._requires_eval = True

    def _wait(self) -> None:
        """Until llama.cpp is done: it computes asynchronously on a GPU."""
        _lib.llama_synchronize(self._ctx.ctx)
