"""The embedded model as the folder of weights that vLLM loads: `python results/vllm/folder.py FOLDER`.

transformers refuses to save a model that it read from a GGUF file; its weights, once they are plain tensors, are
saved like any others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from ridgefill import load_model
from ridgefill.embedded import default_model


def main(folder: Path) -> None:
    """Config, tokenizer and weights in fp32."""
    model, tokenizer = load_model(str(default_model()))
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    weights = {
        name: weight.contiguous().clone()
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
