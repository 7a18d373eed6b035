"""Maps on the hub: their download, and the card of a pushed folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download

from ridgefill.errors import MapsFileError
from ridgefill.maps_files import OTHER_FILES
from ridgefill.maps_folder import MANIFEST

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # "org/name"; "./name" is a folder
# Not all safetensors: a name may turn out to be a model's, with many gigabytes of weights.
_HUB_FILES = [
    f"{where}{name}" for name in (MANIFEST, "proj*.L*.safetensors", *OTHER_FILES) for where in ("", "*/")
]

_CARD = """---
{header}
---

# Fill maps for {model}, split {split}

{number} affine maps, one for each layer {layers}, fitted by ridge regression on the hidden states of {model}.
With them, the Python package `ridgefill` runs most rows of a long prompt only up to layer {split}: the later
layers' inputs are predicted from the state there (h_l = A h_S + b), and only their cache entries are written.
The first token comes sooner; nothing was trained, and the model's weights are untouched. The last rows of the
prompt and every generated token run all layers.

Base model: {model}. The maps fit no other model, and ridgefill refuses to use them on one.

## Use

```python
import ridgefill
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{model}")
maps = ridgefill.RidgeMaps.from_pretrained("{repo_id}")
with ridgefill.filling(model, maps):
    model.generate(...)
```

`ridgefill check {model} {repo_id}` says whether they are safe to use on your machine, and from which prompt
length they pay.
"""


def maps_card(
    model: str, split: int, layers: Sequence[int] | Iterable[int], repo_id: str, **data: Any
) -> ModelCard:
    """The README of a pushed folder.

    Args:
        model: name of the model that the maps fit.
        layers: that have a map.
        data: further fields of the card's header, such as ``tags``.
    """
    layers = list(layers)
    base = model if HUB_NAME.fullmatch(model) else None
    header = ModelCardData(base_model=base, library_name="ridgefill", **data).to_yaml()
    return ModelCard(
        _CARD.format(
            header=header,
            model=model,
            split=split,
            number=len(layers),
            layers=ranges(layers),
            repo_id=repo_id,
        )
    )


def download(name: str, **settings: Any) -> Path:
    """The snapshot of a hub repository of maps.

    Args:
        name: such as ``org/name``.
        settings: of huggingface_hub's ``snapshot_download``.

    Raises:
        MapsFileError: it is not there, cannot be had, or holds no maps.
    """
    asked, instead = f"load maps from {name}", "name a maps folder, or a hub repository that has maps"
    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES, **settings))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are all of these kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"there is no such folder, and the hub did not give it ({lines[0].rstrip('.')})"
        raise MapsFileError(
            asked, why, f"{instead} and that you may read; the first time needs a network"
        ) from error
    if not path.is_dir():
        raise MapsFileError(asked, f"that hub repository holds no {MANIFEST}", instead)
    return path


def ranges(layers: Iterable[int]) -> str:
    """16, 17, 18, 20 -> "16-18, 20"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
