"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgefill.presets import PRESETS

MODEL = Annotated[
    str, typer.Argument(help="A model folder, a GGUF file, a hub name, or: embedded.", show_default=False)
]
MAPS = Annotated[
    str, typer.Argument(help="A maps folder made by `ridgefill fit`, or a hub name.", show_default=False)
]
MAYBE_MAPS = Annotated[
    str | None, typer.Argument(help="A maps folder or hub name; arms other than ridge need none.")
]
STREAM = Annotated[
    bool,
    typer.Option("--stream-maps", help="Keep the maps in host memory and copy each layer's when it is used."),
]
DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DTYPE = Annotated[
    str, typer.Option(help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16, float16.")
]
PRESET = Annotated[
    str | None,
    typer.Option(
        help=f"A deployment of the paper: {', '.join(PRESETS)}. Options named beside it take precedence."
    ),
]
TAIL = Annotated[
    int | None,
    typer.Option(help="Last prompt tokens that run every layer; 2048 unless the preset or the maps say."),
]
LEADING = Annotated[
    int | None,
    typer.Option(help="First prompt tokens that run every layer (the attention sink); 16 unless named."),
]
ROWS = Annotated[
    str | None,
    typer.Option(
        help="Further prompt rows that run every layer, such as 'attention(0.10) | special'; none for none."
    ),
]
CORRECT = Annotated[
    str | None,
    typer.Option(help="Corrections of the filled rows, such as 'value_rescale(512) | terminal_state'."),
]
FILL = Annotated[
    str | None,
    typer.Option(
        help="ridge (the default), identity, none, exact (off) or pop; all but ridge are baselines."
    ),
]
SPLIT = Annotated[str | None, typer.Option(help="For arms without maps: a layer or a depth.")]
SETTING = Annotated[
    Path | None,
    typer.Option(help="A setting file that `ridgefill tune` wrote; options named beside it take precedence."),
]
TEXTS = Annotated[
    list[str] | None,
    typer.Option(
        "--texts", help="Text files, JSONL, folders, data set names, or: embedded; may be repeated."
    ),
]
ENGINE = Annotated[str, typer.Option(help="transformers, or llamacpp: a GGUF file on llama.cpp.")]
ENGINE_ARGS = Annotated[
    str | None,
    typer.Option(help='For llamacpp: settings of llama_cpp.Llama as JSON, such as \'{"type_k": "q8_0"}\'.'),
]
