"""`run`, `check` and `bench ttft` with ``--engine llamacpp``; `serve`, `export-gguf`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgefill.console import (
    EMBEDDED,
    err,
    held_out_texts,
    json_object,
    numbers,
    out,
    show_check,
    show_ttft,
    what_ran,
)
from ridgefill.errors import SettingError
from ridgefill.options import (
    ENGINE_ARGS,
    FILL,
    LEADING,
    MAPS,
    MAYBE_MAPS,
    MODEL,
    PRESET,
    SETTING,
    SPLIT,
    TAIL,
)

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp import RidgeLlama


def is_llamacpp(engine: str, engine_args: str | None, stream_maps: bool = False) -> bool:
    """Whether the engine named is llama.cpp.

    Raises:
        SettingError: there is no such engine, or a setting that the engine named does not have.
    """
    if engine not in ("transformers", "llamacpp"):
        raise SettingError(f"--engine {engine}", "there is no such engine", "use transformers or llamacpp")
    if engine == "transformers" and engine_args is not None:
        raise SettingError("--engine-args", "the transformers engine takes none", "add --engine llamacpp")
    if engine == "llamacpp" and stream_maps:
        raise SettingError(
            "--stream-maps with --engine llamacpp",
            "it computes late keys and values on the CPU, where the maps are already",
            "leave it out",
        )
    return engine == "llamacpp"


def load_llama(
    model: str,
    maps: str | None,
    split: str | None,
    engine_args: str | None,
    device: str,
    dtype: str,
    **plan: Any,
) -> RidgeLlama:
    """A GGUF model with its maps; ``plan`` holds the settings of `RidgeLlama`."""
    if (device, dtype) != ("auto", "auto"):
        raise SettingError(
            "--device or --dtype with --engine llamacpp",
            "llama.cpp has settings of its own",
            "use --engine-args '{\"n_gpu_layers\": -1}'",
        )
    own = {"verbose": False, "flash_attn": True, **json_object(engine_args, "--engine-args")}
    from ridgefill.engines.llamacpp import RidgeLlama

    if model == EMBEDDED:
        from ridgefill.embedded import default_model

        model = str(default_model())
    at = None if split is None else numbers(split, "--split")[0]
    with err.status(f"loading {Path(model).name}"):
        try:
            return RidgeLlama(model, maps=maps, split=at, **plan, **own)
        except TypeError as error:  # a setting that llama_cpp.Llama does not have
            raise SettingError(f"--engine-args {engine_args}", str(error), "see llama_cpp.Llama") from error


def run_llamacpp(llm: RidgeLlama, text: str, max_new_tokens: int, raw: bool) -> None:
    """Answers a prompt greedily, streaming; says on stderr what was filled and what it took."""
    from ridgefill.answer import Answer

    began, first, count = time.perf_counter(), None, 0
    pieces: list[str] = []
    with suppress(BrokenPipeError):
        for piece in _pieces(llm, text, max_new_tokens, raw):
            first = time.perf_counter() - began if first is None else first
            count += 1
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    total = time.perf_counter() - began
    given = Answer("".join(pieces).strip(), count, total if first is None else first, total)
    err.print(what_ran(llm, given), soft_wrap=True, markup=False, highlight=False)


def _pieces(llm: RidgeLlama, text: str, max_new_tokens: int, raw: bool) -> Iterator[str]:
    settings: dict[str, Any] = {
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "repeat_penalty": 1.0,
        "stream": True,
    }
    if raw or "tokenizer.chat_template" not in llm.metadata:
        for chunk in llm.create_completion(text, **settings):
            yield chunk["choices"][0]["text"]
        return
    for chunk in llm.create_chat_completion(messages=[{"role": "user", "content": text}], **settings):
        if piece := chunk["choices"][0]["delta"].get("content"):
            yield piece


def check_llamacpp(llm: RidgeLlama, texts: list[str] | None, as_json: Path | None, **settings: Any) -> None:
    """Prints what the check found; ends with 1 unless the maps are safe or usable with care."""
    from ridgefill.engines.llamacpp.check import check

    with err.status("checking") as status:
        found = check(
            llm, held_out_texts(texts), tick=lambda stage: status.update(f"checking: {stage}"), **settings
        )
    show_check(found, llm, as_json)


def bench_llamacpp(
    llm: RidgeLlama, texts: list[str] | None, lengths: list[int], repeats: int, output: Path | None
) -> None:
    """Times stock and filled first tokens, prints the table, and writes it where asked."""
    from rich.progress import Progress

    from ridgefill.engines.llamacpp import bench
    from ridgefill.engines.llamacpp.tokenizer import GgufTokenizer
    from ridgefill.eval.documents import held_out_documents

    ids = held_out_documents(GgufTokenizer(llm), held_out_texts(texts), max(lengths), 1)[0][0].tolist()
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("timing both arms", total=len(lengths) * (repeats + 1))
        timed = bench.measure(llm, ids, lengths, repeats, tick=lambda: progress.advance(task))
    show_ttft(
        timed,
        lambda: bench.to_json(llm, timed),
        f"llama.cpp, split {llm.plan.split}, tail {llm.plan.tail}",
        output,
    )


def serve(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="Refuse requests without this key.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; its file's unless named.")
    ] = None,
    preset: PRESET = None,
    tail: TAIL = None,
    leading: LEADING = None,
    fill: FILL = None,
    split: SPLIT = None,
    setting: SETTING = None,
    engine_args: ENGINE_ARGS = None,
) -> None:
    """An OpenAI-compatible endpoint on llama.cpp: llama-cpp-python's own server, with long prompts filled.

    Example: ridgefill serve model.gguf maps --tail 1024

    What the last prompt's prefill did: GET /ridgefill.
    """
    from ridgefill.errors import EngineMissingError

    plan = {"preset": preset, "tail": tail, "leading": leading}
    llm = load_llama(model, maps, split, engine_args, "auto", "auto", fill=fill, setting=setting, **plan)
    from ridgefill.engines.llamacpp.server import create_app

    application = create_app(llm, name or llm._gguf.name, api_key=api_key)
    try:
        import uvicorn
    except ImportError as error:
        raise EngineMissingError(
            "serve a GGUF", "uvicorn is missing", 'pip install "ridgefill[server]"'
        ) from error
    uvicorn.run(application, host=host, port=port)


def export_gguf(
    maps: MAPS,
    output: Annotated[Path, typer.Option("-o", "--output", help="The GGUF file to write.")] = Path(
        "maps.gguf"
    ),
) -> None:
    """Write maps as one GGUF file in Q8_0, a quarter of their size in fp32; --engine llamacpp reads it like a folder.

    Example: ridgefill export-gguf maps/split-15 -o maps-15.gguf
    """
    from ridgefill.maps_gguf import load_maps, save_gguf

    written = save_gguf(load_maps(maps), output)
    out.print(
        f"{written}   {written.stat().st_size / 1e6:.1f} MB", soft_wrap=True, markup=False, highlight=False
    )
