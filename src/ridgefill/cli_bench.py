"""`ridgefill bench` and `ridgefill cost`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgefill.console import (
    err,
    held_out_texts,
    json_object,
    load,
    load_config,
    numbers,
    out,
    plan_of,
    show_ttft,
    stream,
    whole_number,
)
from ridgefill.errors import SettingError
from ridgefill.fit.forms import FORMS
from ridgefill.options import (
    CORRECT,
    DEVICE,
    DTYPE,
    ENGINE,
    ENGINE_ARGS,
    FILL,
    LEADING,
    MAYBE_MAPS,
    MODEL,
    PRESET,
    ROWS,
    SETTING,
    SPLIT,
    STREAM,
    TAIL,
    TEXTS,
)

if TYPE_CHECKING:
    from ridgefill.bench.shape import ModelShape

bench = typer.Typer(
    no_args_is_help=True,
    help="""Measure speed on this machine, exact and filled interleaved.

    Example: ridgefill bench ttft model.gguf maps/split-15 --lengths 2048,8192""",
)


@bench.command("ttft")
def bench_ttft(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "4096,8192",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each arm, after one to warm up.")] = 3,
    preset: PRESET = None,
    tail: TAIL = None,
    leading: LEADING = None,
    rows: ROWS = None,
    correct: CORRECT = None,
    fill: FILL = None,
    split: SPLIT = None,
    setting: SETTING = None,
    stream_maps: STREAM = False,
    texts: TEXTS = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for ttft.json and ttft.png.")
    ] = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    engine: ENGINE = "transformers",
    engine_args: ENGINE_ARGS = None,
) -> None:
    """Time to first token, exact and filled interleaved in one run: medians, ratio, and the ceilings of paper 2.5.

    Example: ridgefill bench ttft model.gguf maps/split-15 --lengths 2048,8192 --tail 1024 -o results/
    """
    from rich.progress import Progress

    from ridgefill import cli_llamacpp
    from ridgefill.bench import ttft
    from ridgefill.eval.documents import held_out_documents

    wanted = [whole_number(n, "--lengths") for n in numbers(lengths, "--lengths")]
    if cli_llamacpp.is_llamacpp(engine, engine_args, stream_maps):
        given = {"preset": preset, "tail": tail, "leading": leading, "rows": rows, "corrections": correct}
        more = {"fill": fill, "setting": setting}
        llm = cli_llamacpp.load_llama(model, maps, split, engine_args, device, dtype, **given, **more)
        return cli_llamacpp.bench_llamacpp(llm, texts, wanted, repeats, output)
    loaded, tokenizer = load(model, device, dtype)
    plan = plan_of(
        loaded,
        maps,
        split,
        setting,
        preset=preset,
        tail=tail,
        leading=leading,
        rows=rows,
        corrections=correct,
        fill=fill,
    )
    if stream_maps:
        stream(plan)
    ids = held_out_documents(tokenizer, held_out_texts(texts), max(wanted), 1)[0].to(loaded.device)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("timing both arms", total=len(wanted) * (repeats + 1))
        timed = ttft.measure(
            loaded, plan, ids, wanted, repeats, tick=lambda: progress.advance(task), tokenizer=tokenizer
        )
    show_ttft(
        timed, lambda: ttft.to_json(loaded, plan, timed), f"split {plan.split}, tail {plan.tail}", output
    )


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, such as http://localhost:8000.")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    against: Annotated[
        str | None, typer.Option(help="Another server that runs exactly; the same one unless named.")
    ] = None,
    exact_body: Annotated[
        str, typer.Option(help="What the exact arm's requests say further, as JSON.")
    ] = '{"vllm_xargs": {"ridgefill": 0}}',
    filled_body: Annotated[
        str, typer.Option(help="What the filled arm's requests say further, as JSON.")
    ] = '{"vllm_xargs": {"ridgefill": 1}}',
    users: Annotated[str, typer.Option(help="Numbers of users, the long request's counted.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="Tokens of the long prompt, about.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of its answer.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each arm.")] = 3,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of both servers.")] = None,
    texts: TEXTS = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A JSON file for every figure.")
    ] = None,
) -> None:
    """One long request arrives while other users decode: its first token, and what the others feel (paper 4.8).

    The arms run in turn. Time to first token, the other users' tokens a second and their inter-token latency while
    the long request prefills and answers.

    Example: ridgefill bench serve http://localhost:8000 --model MODEL --tokens 8192 -o results/serve.json

    With two servers: --against http://localhost:8001 --exact-body '{}' --filled-body '{}'
    """
    import torch
    from rich.progress import Progress

    from ridgefill.bench import serve
    from ridgefill.bench.environment import environment
    from ridgefill.files import write_json
    from ridgefill.fit.corpus import read_sources

    wanted = [whole_number(n, "--users") for n in numbers(users, "--users")]
    arms = {
        "exact": serve.Endpoint(against or url, model, json_object(exact_body, "--exact-body"), api_key),
        "filled": serve.Endpoint(url, model, json_object(filled_body, "--filled-body"), api_key),
    }
    text = "\n\n".join(
        str(document.load())
        for source in read_sources(held_out_texts(texts))
        for document in source.documents
    )
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("both arms", total=len(wanted) * repeats * len(arms))
        found = serve.measure(
            arms, text, tokens, wanted, repeats, new_tokens, tick=lambda: progress.advance(task)
        )
    out.print(f"exact / filled, medians of {repeats}")
    out.print(serve.table(found))
    if output is not None:
        said = {
            "exact_body": arms["exact"].body,
            "filled_body": arms["filled"].body,
            "model": Path(model).name,
        }
        write_json(
            output, {**said, "users": serve.to_json(found), "environment": environment(torch.device("cpu"))}
        )
        out.print(f"Written: {output}", soft_wrap=True, markup=False)


def cost(
    model: Annotated[str | None, typer.Argument(help="A model; its config alone is read.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, in place of MODEL.")] = None,
    split: Annotated[str, typer.Option(help="A layer, or a depth.")] = "0.5",
    tail: Annotated[int, typer.Option(help="Last prompt tokens that run every layer.")] = 4096,
    rows: Annotated[
        str, typer.Option(help="Prefix rows that run every layer: a share (0.1) or a count.")
    ] = "0.0",
    leading: Annotated[int, typer.Option(help="First prompt tokens that run every layer.")] = 0,
    fill: Annotated[str, typer.Option(help="ridge, identity, none or exact.")] = "ridge",
    form: Annotated[str, typer.Option(help=f"What the maps are: {', '.join(FORMS)}.")] = "plain",
    probe: Annotated[
        int, typer.Option(help="Last rows that probe the filled late layers; 256 on the 27B.")
    ] = 0,
    score_rows: Annotated[
        int, typer.Option(help="Last rows whose lower-layer attention ranks the prefix.")
    ] = 0,
    score_layers: Annotated[int, typer.Option(help="Lower attention layers that are scored; 0 for all.")] = 0,
    value_rescale: Annotated[int, typer.Option(help="Tail rows that the value rescale measures.")] = 0,
    key_rescale: Annotated[int, typer.Option(help="Tail rows that the key rescale measures.")] = 0,
    no_map: Annotated[bool, typer.Option("--no-map", help="Do not count the maps.")] = False,
    versus: Annotated[
        str, typer.Option(help="exact, pop, or a setting: split=16,tail=4096,rows=0.1.")
    ] = "exact",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths, separated by commas.")
    ] = "8192,16384,32768,65536",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the multiply-accumulates of a prefill, against exact, POP or another setting (paper 2.5).

    Example: ridgefill cost --config config.json --split 20 --tail 4096 --versus pop --lengths 16384,32768
    """
    from ridgefill.bench import cost as counting

    if (model is None) == (config is None):
        raise SettingError(
            "count the cost", "it needs a model or a config", "name either MODEL or --config FILE"
        )
    shape = counting.ModelShape.from_config(config if config is not None else load_config(str(model)))
    at = numbers(split, "--split")[0]
    ours = counting.Setting(
        split=at,
        **_form(form, shape, at),
        tail=tail,
        rows=_rows(rows),
        leading=leading,
        fill=fill,
        probe=probe,
        score_rows=score_rows,
        score_layers=score_layers,
        value_rescale=value_rescale,
        key_rescale=key_rescale,
        map="none" if no_map else "full",
    )
    theirs = counting.parse_versus(versus, shape, ours)
    found = counting.report(
        shape, [whole_number(n, "--lengths") for n in numbers(lengths, "--lengths")], ours, theirs
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        out.print(counting.table(found))


def _form(name: str, shape: ModelShape, split: int | float) -> dict[str, Any]:
    """What the maps of a form cost, as fields of a setting."""
    from ridgefill.plan import layer_of

    if name not in FORMS:
        raise SettingError(f"--form {name}", "there is none of that name", f"use {', '.join(FORMS)}")
    form = FORMS[name]
    if form == FORMS["plain"]:
        return {}
    layer = layer_of(split, shape.layers)
    reduced = form.columns(layer, shape.map // shape.hidden)
    return {"blocks": form.reading(layer).blocks, "rank": reduced or 0, "gives": form.gives}


def _rows(text: str) -> int | float:
    from ridgefill.bench.cost import count_or_share

    try:
        return count_or_share(text)
    except ValueError:
        raise SettingError(
            f"--rows {text}", "it is neither a share nor a count", "write it as --rows 0.1 or --rows 800"
        ) from None
