"""`ridgefill tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgefill.console import err, held_out_texts, load, numbers, out, whole_number
from ridgefill.errors import CorpusError
from ridgefill.options import DEVICE, DTYPE, MODEL, TEXTS


def tune(
    model: MODEL,
    texts: TEXTS = None,
    max_key_nll: Annotated[
        float | None,
        typer.Option(
            help="Nats per key token above exact that are allowed; 0.05 is strict. Key tokens are those that the "
            "far context helps, where a fill's damage shows first."
        ),
    ] = None,
    max_novel_nll: Annotated[
        float | None,
        typer.Option(help="The same of novel tokens, those not copied from the text; it hides more."),
    ] = None,
    min_retrieval: Annotated[
        float | None,
        typer.Option(
            help="Share of the facts planted in filled rows that exact finds and the fill must find; 0.95."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for maps, measurements and the setting file.")
    ] = Path("tuned"),
    maps: Annotated[
        list[str] | None,
        typer.Option("--maps", help="Fitted maps to try; may be repeated. Without them they are fitted."),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option(help="Layers or depths; 0.25,0.375,0.5,0.625 unless named or given as maps."),
    ] = None,
    tails: Annotated[
        str, typer.Option(help="Last prompt tokens that run every layer, to try.")
    ] = "512,1024,2048",
    rows: Annotated[
        str,
        typer.Option(help="Selectors to try, separated by semicolons; none for none."),
    ] = "none; spans(peak, 0.05); attention(0.10)",
    seconds: Annotated[
        float, typer.Option(help="Time of this call; nothing is begun that would not end in it.")
    ] = 3600,
    tokens: Annotated[
        int, typer.Option(help="Length of prompts and documents: as long as yours, if time allows.")
    ] = 4096,
    documents: Annotated[int, typer.Option(help="Documents whose loss is measured, at most.")] = 8,
    needles: Annotated[int, typer.Option(help="Facts planted and asked for.")] = 24,
    fit_tokens: Annotated[int, typer.Option(help="Calibration tokens, where maps are fitted.")] = 65536,
    seed: int = 0,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
) -> None:
    """Find the fastest setting that keeps to your limits on your texts, and write its setting file.

    Splits, tails and row selectors are tried in order of their compute, the fastest first. Each is measured on a
    third of the items, and on all where that does not rule it out; the first that holds is the answer, and every
    other one is listed with the reason. The same command again goes on where it stopped: with more --seconds, other
    limits or further settings. Ends with 1 if no setting holds.

    Name text like your prompts. Where maps are fitted, half of it is fitted on and the other half judges.

    Examples:

      ridgefill tune MODEL --texts my-texts/ --max-key-nll 0.05 --min-retrieval 0.95 -o tuned

      ridgefill tune MODEL --texts my-texts/ --maps maps/split-15 --min-retrieval 0.9 --tails 512,1024

      ridgefill run MODEL --setting tuned/ridgefill-setting.json --prompt-file report.txt
    """
    from ridgefill.tune import Limits
    from ridgefill.tune import tune as run_tune

    if not texts:
        raise CorpusError("tune", "no text was named", "add --texts PATH: files or folders like your prompts")
    Limits(max_key_nll, max_novel_nll, min_retrieval)  # before the model is loaded
    wanted = [whole_number(n, "--tails") for n in numbers(tails, "--tails")]
    chosen = [None if name in ("", "none") else name for name in (part.strip() for part in rows.split(";"))]
    at = None if splits is None else numbers(splits, "--splits")
    loaded, tokenizer = load(model, device, dtype)
    with err.status("tuning") as status:
        found = run_tune(
            loaded,
            tokenizer,
            held_out_texts(texts),
            output,
            maps=maps or (),
            max_key_nll=max_key_nll,
            max_novel_nll=max_novel_nll,
            min_retrieval=min_retrieval,
            seconds=seconds,
            tokens=tokens,
            splits=at,
            tails=wanted,
            rows=chosen,
            documents=documents,
            needles=needles,
            fit_tokens=fit_tokens,
            seed=seed,
            tick=lambda stage: status.update(f"tuning: {stage}"),
        )
    out.print(found.table())
    for line in found.words():
        out.print(line, soft_wrap=True, markup=False, highlight=False)
    if found.setting is None:
        raise typer.Exit(1)
    out.print(
        f"Written: {found.setting}   next: ridgefill run {model} --setting {found.setting}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
