"""`ridgefill eval ruler`, `ridgefill eval longbench` and `ridgefill report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgefill.cli_eval import (
    ARMS,
    CHAT,
    DEFAULT_ARMS,
    ENTRY,
    LEDGER,
    MARGIN,
    OUTPUT,
    TAIL,
    evaluate,
    prepare,
    progress,
    show,
)
from ridgefill.console import json_object, numbers, out, whole_number
from ridgefill.files import cache_dir
from ridgefill.options import DEVICE, DTYPE, LEADING, MAYBE_MAPS, MODEL, SPLIT


@evaluate.command("ruler")
def ruler(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    tasks: Annotated[
        str | None, typer.Option(help="Official names, separated by commas; all that can be made by default.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "4096",
    count: Annotated[int, typer.Option(min=1, help="Samples of each task and length.")] = 25,
    essays: Annotated[
        list[str] | None,
        typer.Option("--essays", help="Text files for the essay haystacks, or: embedded; may be repeated."),
    ] = None,
    squad: Annotated[Path | None, typer.Option(help="SQuAD's JSON file, for qa_1.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's JSON file, for qa_2.")] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Folder of <task>/validation.jsonl made by the official scripts, instead of making any."
        ),
    ] = None,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="End prompts with the answer's prefix.")
    ] = True,
    chat: CHAT = None,
    chat_args: Annotated[
        str | None, typer.Option(help="JSON for the chat template, such as '{\"enable_thinking\": false}'.")
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(help='JSON of further settings of lm-eval, such as \'{"system_instruction": "..."}\'.'),
    ] = None,
    tail: TAIL = 1024,
    leading: LEADING = None,
    split: SPLIT = None,
    seed: int = 42,
    margin: MARGIN = 2.0,
    output: OUTPUT = Path("eval/ruler"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """RULER's 13 official tasks through lm-eval; score_filled counts samples whose needles lie in filled rows.

    Needs: pip install "ridgefill[eval]". Sets are made once and kept; all arms see the same.

    Example: ridgefill eval ruler model.gguf maps/split-15 --essays essays/ --lengths 4096,8192 -o results/ruler
    """
    from ridgefill.eval.ruler.jsonl import read_jsonl
    from ridgefill.eval.ruler.run import measure_ruler
    from ridgefill.eval.ruler.suite import EMBEDDED, make_suite
    from ridgefill.models.identity import tokenizer_sha256
    from ridgefill.plan import DEFAULT_LEADING

    wanted = [whole_number(n, "--lengths") for n in numbers(lengths, "--lengths")]
    template, lm_eval = json_object(chat_args, "--chat-args"), json_object(harness, "--harness")
    names = None if tasks is None else [name.strip() for name in tasks.split(",")]
    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    first = DEFAULT_LEADING if leading is None else leading
    if samples is not None:
        found = read_jsonl(samples, names, tokenizer=tokenizer_sha256(bench.tokenizer))
        settings: dict[str, Any] = {"samples": samples.name}
    else:
        with progress("making samples", count * len(wanted) * len(names or range(13))) as tick:
            suite = make_suite(
                bench.tokenizer,
                cache_dir() / "ruler",
                lengths=wanted,
                count=count,
                names=names,
                seed=seed,
                essays=EMBEDDED if essays == [EMBEDDED] else essays,
                squad=squad,
                hotpotqa=hotpotqa,
                fitted=bench.fitted,
                tick=tick,
            )
        found, settings = list(suite.samples), {**suite.settings}
    settings |= {"tail": tail, "leading": first, "prefix": prefix, "chat": chat, "margin": margin}
    settings |= {"chat_args": template, "harness": lm_eval}
    run = bench.open(output, "ruler", max(sample.wanted for sample in found), settings)
    with progress("ruler", len(found) * len(bench.arms)) as tick:
        measure_ruler(
            bench.model,
            bench.tokenizer,
            bench.arms,
            found,
            run,
            tail=tail,
            leading=first,
            prefix=prefix,
            chat=chat,
            tick=tick,
            chat_args=template,
            harness=lm_eval,
        )
    show(run, margin)


@evaluate.command("longbench")
def longbench(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    arms: ARMS = DEFAULT_ARMS,
    version: Annotated[int, typer.Option(min=1, max=2, help="LongBench 1 or 2.")] = 2,
    data: Annotated[
        Path | None, typer.Option(help="The official files, or a folder of them; from the hub by default.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of version 1, separated by commas.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many samples of each task.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Cut prompts in their middle to this many tokens.")
    ] = None,
    cot: Annotated[bool, typer.Option("--cot", help="Version 2: reason first.")] = False,
    chat: CHAT = None,
    tail: TAIL = 1024,
    leading: LEADING = None,
    split: SPLIT = None,
    margin: MARGIN = 2.0,
    output: OUTPUT = Path("eval/longbench"),
    ledger: LEDGER = None,
    entry: ENTRY = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """LongBench 1 or 2 with the official prompts, truncation, extraction and scorers.

    Example: ridgefill eval longbench model maps --version 2 --data data.json --max-length 32000 -o results/lb2
    """
    from ridgefill.eval.longbench import measure_longbench, read_longbench, read_longbench_v2

    names = () if tasks is None else [name.strip() for name in tasks.split(",")]
    found = (
        read_longbench(data, tasks=names, limit=limit)
        if version == 1
        else read_longbench_v2(data, cot=cot, limit=limit)
    )
    bench = prepare(model, maps, arms, split, tail, leading, ledger, entry, device, dtype)
    settings = {
        "version": version,
        "tail": tail,
        "max_length": max_length,
        "chat": chat,
        "cot": cot,
        "margin": margin,
        "items": [sample.item for sample in found],
    }
    run = bench.open(output, "longbench", max_length or 16384, settings)
    with progress("longbench", len(found) * len(bench.arms)) as tick:
        measure_longbench(
            bench.model, bench.tokenizer, bench.arms, found, run, max_length=max_length, chat=chat, tick=tick
        )
    show(run, margin)


def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one with several runs below it.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The page, or its folder; beside the runs by default."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
) -> None:
    """One self-contained HTML page, and a Markdown page, of what evaluations found and what they cannot tell.

    Example: ridgefill report results/
    """
    from ridgefill.eval.report import write_report

    page, markdown = write_report(folder, output, title=title)
    out.print(f"Written: {page}, {markdown}", soft_wrap=True, markup=False)
