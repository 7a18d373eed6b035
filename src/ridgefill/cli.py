"""The command line: fit, check, run, bench, cost, eval, report, tune, ledger, serve and more."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgefill.cli_bench import bench, cost
from ridgefill.cli_eval import evaluate
from ridgefill.cli_ledger import ledger
from ridgefill.cli_llamacpp import export_gguf, serve
from ridgefill.cli_suites import report
from ridgefill.cli_tune import tune
from ridgefill.cli_vllm import vllm_args
from ridgefill.console import (
    calibration_texts,
    err,
    guarded,
    held_out_texts,
    load,
    load_maps,
    numbers,
    out,
    read_prompt,
    show_check,
    stream,
    what_ran,
)
from ridgefill.errors import CorpusError
from ridgefill.fit.forms import DEFAULT, FORMS
from ridgefill.options import (
    CORRECT,
    DEVICE,
    DTYPE,
    ENGINE,
    ENGINE_ARGS,
    FILL,
    LEADING,
    MAPS,
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
from ridgefill.presets import fitted_presets

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Make the first token of a long prompt come sooner, with nothing trained.

    The whole way, on a model of your own:

      ridgefill fit MODEL --texts my-texts/ --splits 0.5 -o maps

      ridgefill check MODEL maps

      ridgefill run MODEL maps --prompt-file question.txt

    MODEL is a folder, a GGUF file or a hub name; `embedded` stands for a small model that needs no hub, and
    `ridgefill demo` does all of the above with it.
    To turn it off: `ridgefill run ... --fill exact`, or leave the `with ridgefill.filling(...)` block.""",
)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
app.add_typer(ledger, name="ledger")
for command in (cost, report, tune, serve, export_gguf, vllm_args):
    app.command()(command)


@app.command()
def fit(
    model: MODEL,
    more_texts: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Further texts, after --texts PATH.")
    ] = None,
    texts: TEXTS = None,
    splits: Annotated[
        str | None,
        typer.Option(
            help="Layers (15) or depths (0.5), separated by commas; the preset's or 0.5 unless named."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help=f"A deployment of the paper that the maps are for: {', '.join(fitted_presets())}."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="What maps read and give: "
            + "; ".join(f"{name}, {each.about}" for name, each in FORMS.items())
            + f". {DEFAULT} unless named; plain with a preset."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder; one maps folder per split in it.")
    ] = Path("maps"),
    tokens: Annotated[
        int, typer.Option(help="Calibration tokens; ten rows per column of a map are plenty.")
    ] = 65536,
    length: Annotated[int, typer.Option(help="Tokens of one calibration window, at most.")] = 4096,
    holdout: Annotated[float, typer.Option(help="Share of documents kept to choose the penalty on.")] = 0.1,
    lambdas: Annotated[str | None, typer.Option(help="Grid of lambda_rel, separated by commas.")] = None,
    leading: Annotated[int, typer.Option(help="First rows of each window left out of the fit.")] = 16,
    chat_share: Annotated[float, typer.Option(help="Share of windows put in the model's chat form.")] = 0.25,
    encoding: Annotated[
        str, typer.Option(help="fp32, bf16 or int8 (one scale per 128 weights of a row).")
    ] = "fp32",
    seed: int = 0,
    moments_device: Annotated[str | None, typer.Option(help="Where the moments rest, such as cpu.")] = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Fit one affine map per late layer: one pass over text, closed form, nothing trained (paper 2.2).

    Example: ridgefill fit model.gguf --texts docs/ src/ chats.jsonl --splits 0.25,0.5 -o maps

    Text like your prompts is best: mix prose, code and chat as you use them. A run that was stopped goes on where
    it was when the same command is given again.
    """
    given = [*(texts or []), *(more_texts or [])]
    if not given:
        raise CorpusError(
            "fit maps", "no text was named", "add --texts PATH (files, folders or data set names)"
        )
    from ridgefill.devices import usable_device
    from ridgefill.fit import fit as run_fit
    from ridgefill.fit.run import LAMBDA_GRID

    named = None if splits is None else numbers(splits, "--splits")
    grid = LAMBDA_GRID if lambdas is None else tuple(float(v) for v in numbers(lambdas, "--lambdas"))
    if moments_device is not None:
        usable_device(moments_device, "--moments-device")  # before the model is loaded
    loaded, tokenizer = load(model, device, dtype)
    maps = run_fit(
        loaded,
        tokenizer,
        calibration_texts(given),
        named,
        output,
        preset=preset,
        form=form,
        tokens=tokens,
        length=length,
        holdout=holdout,
        lambda_grid=grid,
        leading=leading,
        chat_share=chat_share,
        encoding=encoding,
        seed=seed,
        moments_device=moments_device,
    )
    for split in maps:
        folder = output / f"split-{split:02d}"
        out.print(
            f"{folder}   next: ridgefill check {model} {folder}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


@app.command()
def check(
    model: MODEL,
    maps: MAPS,
    texts: TEXTS = None,
    preset: PRESET = None,
    tail: TAIL = None,
    leading: LEADING = None,
    rows: ROWS = None,
    correct: CORRECT = None,
    tokens: Annotated[
        int | None, typer.Option(help="Length of the documents; 2048 beyond the tail unless given.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents whose loss is measured, at most.")] = 4,
    needles: Annotated[
        int, typer.Option(min=0, help="Facts planted in filled rows and asked for; 0 leaves that out.")
    ] = 8,
    timing: Annotated[bool, typer.Option(help="Measure from which prompt length filling pays here.")] = True,
    seed: int = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the findings to this file as well.")
    ] = None,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    engine: ENGINE = "transformers",
    engine_args: ENGINE_ARGS = None,
) -> None:
    """Say in plain words whether these maps are safe to use with this model, and from which prompt length they pay.

    Compares with the stock model bit for bit, measures the loss on held-out text against exact and the identity
    fill, asks for facts planted in filled rows, and times both arms. Without --texts the text is Python's own
    library and documentation. Ends with 0 if the maps are safe or usable with care, 1 if not.

    Example: ridgefill check model.gguf maps/split-15 --texts held-out/ --tail 1024
    """
    from ridgefill import cli_llamacpp
    from ridgefill.check import check as run_check

    if cli_llamacpp.is_llamacpp(engine, engine_args):
        plan = {"preset": preset, "tail": tail, "leading": leading, "rows": rows, "corrections": correct}
        llm = cli_llamacpp.load_llama(model, maps, None, engine_args, device, dtype, **plan)
        measured = {"tokens": tokens, "documents": documents, "needles": needles, "seed": seed}
        return cli_llamacpp.check_llamacpp(llm, texts, as_json, **measured)
    loaded, tokenizer = load(model, device, dtype)
    fitted = load_maps(maps)
    with err.status("checking") as status:
        found = run_check(
            loaded,
            tokenizer,
            fitted,
            held_out_texts(texts),
            preset=preset,
            tail=tail,
            leading=leading,
            rows=rows,
            corrections=correct,
            tokens=tokens,
            documents=documents,
            needles=needles,
            timing=timing,
            seed=seed,
            tick=lambda stage: status.update(f"checking: {stage}"),
        )
    show_check(found, loaded, as_json)


@app.command()
def run(
    model: MODEL,
    maps: MAYBE_MAPS = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The prompt; - or nothing reads standard input.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="A question to put after the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    preset: PRESET = None,
    tail: TAIL = None,
    leading: LEADING = None,
    rows: ROWS = None,
    correct: CORRECT = None,
    fill: FILL = None,
    split: SPLIT = None,
    setting: SETTING = None,
    stream_maps: STREAM = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put the prompt in the model's chat form.")
    ] = False,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    engine: ENGINE = "transformers",
    engine_args: ENGINE_ARGS = None,
) -> None:
    """Answer a prompt, filled where it pays; say on stderr what was filled and what it took.

    Examples:

      ridgefill run model.gguf maps --prompt-file report.txt --question "Who signed it?"

      ridgefill run model.gguf --fill exact --prompt-file report.txt     (the same, off)

      ridgefill run model.gguf --setting tuned/ridgefill-setting.json --prompt-file report.txt

      ridgefill run model.gguf maps --rows "spans(peak, 0.05)" --prompt-file report.txt --question "Who signed it?"
    """
    from contextlib import nullcontext

    from ridgefill import cli_llamacpp
    from ridgefill.answer import answer, prompt_ids
    from ridgefill.engines.transformers import filling

    text = read_prompt(prompt_file, question)
    if cli_llamacpp.is_llamacpp(engine, engine_args, stream_maps):
        plan = {"preset": preset, "tail": tail, "leading": leading, "rows": rows, "corrections": correct}
        more = {"fill": fill, "setting": setting}
        llm = cli_llamacpp.load_llama(model, maps, split, engine_args, device, dtype, **plan, **more)
        return cli_llamacpp.run_llamacpp(llm, text, max_new_tokens, raw)
    loaded, tokenizer = load(model, device, dtype)
    fitted = None if maps is None else load_maps(maps)
    at = None if split is None else numbers(split, "--split")[0]
    context: Any = nullcontext()
    if fill != "exact":
        context = filling(
            loaded,
            fitted,
            preset=preset,
            tail=tail,
            leading=leading,
            rows=rows,
            corrections=correct,
            fill=fill,
            split=at,
            tokenizer=tokenizer,
            setting=setting,
        )
    if stream_maps:
        stream(None if fill == "exact" else context.plan)
    with context as active:
        given = answer(
            loaded,
            tokenizer,
            prompt_ids(tokenizer, text, chat=not raw),
            max_new_tokens=max_new_tokens,
            stream=True,
        )
    err.print(what_ran(active, given), soft_wrap=True, markup=False, highlight=False)


@app.command()
def doctor() -> None:
    """Say what is installed, what works on this machine, and what to do about what does not.

    Example: ridgefill doctor
    """
    from ridgefill.doctor import examine, report

    with err.status("looking"):
        findings = examine()
    out.print(report(findings))
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the maps, demo.json and demo.png.")
    ] = Path("demo-out"),
) -> None:
    """The whole main job on a small real model that needs no hub: fit, run a long prompt both ways, compare.

    Example: ridgefill demo -o demo-out
    """
    from ridgefill.demo import run as run_demo

    run_demo(output, out)


def main() -> None:
    """The entry point: a refusal is one line on stderr and a non-zero exit, never a traceback."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("ridgefill").setLevel(logging.INFO)
    logging.getLogger("ridgefill.fit").setLevel(logging.WARNING)  # the fit prints its own remarks
    warnings.showwarning = lambda message, *_, **__: err.print(
        f"Note: {message}", soft_wrap=True, markup=False
    )
    sys.exit(guarded(app))


if __name__ == "__main__":
    main()
