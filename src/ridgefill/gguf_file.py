"""GGUF files: what they say of themselves, and their weights as a plain model folder, made once.

Reading one through transformers takes 20 to 60 seconds, the folder of float32 safetensors less than two.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import torch
import transformers
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgefill.errors import ModelFileError, UnsupportedModelError
from ridgefill.files import cache_dir, sha256_file, whole_folder, write_json
from ridgefill.models.decoder import GGUF_FAMILIES, refuse_unsupported
from ridgefill.quiet import clear, quiet, refuse_incomplete

_log = logging.getLogger(__name__)

_SOURCE = "ridgefill_source.json"
ARCHITECTURES = {family.removesuffix("_text") for family in GGUF_FAMILIES}  # GGUF files hold text models only


def read_architecture(path: str | Path) -> str:
    """llama.cpp's name of a GGUF file's model family, from the file's first bytes.

    Raises:
        ModelFileError: not a GGUF file, a version this cannot read, or cut off within its header.
        UnsupportedModelError: an architecture that cannot be filled.
    """
    path = Path(path)
    asked = f"load {path.name}"
    try:
        with path.open("rb") as file:
            architecture = _architecture(file, asked)
    except (struct.error, ValueError) as error:  # ValueError: no such kind of value, or no UTF-8
        raise ModelFileError(
            asked, "the GGUF header is cut off or damaged", "fetch the file again"
        ) from error
    except OSError as error:
        raise ModelFileError(asked, error.strerror or str(error), "name a file that can be read") from error
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"fill {path.name} (GGUF architecture {architecture!r})",
            "this architecture is not supported",
            f"use one of {', '.join(sorted(ARCHITECTURES))}",
        )
    return architecture


def quantization(folder: str | Path) -> str | None:
    """The kind of GGUF file ("Q4_1") that a model folder was converted from; None for any other folder."""
    try:
        return json.loads((Path(folder) / _SOURCE).read_text(encoding="utf-8")).get("quantization")
    except FileNotFoundError:
        return None


def is_converted(path: str | Path) -> bool:
    """Whether the converted weights of this GGUF file are there; reads the whole file to hash it."""
    return converted_folder(path).is_dir()


def converted_folder(path: str | Path) -> Path:
    """Where the converted weights of this GGUF file are or will be kept; reads the whole file to hash it."""
    return cache_dir() / "gguf" / sha256_file(path)


_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


def _architecture(file: BinaryIO, asked: str) -> str:
    """The value of general.architecture, which stands first in every file that llama.cpp writes.

    The gguf library's own reader walks every token and tensor, which takes seconds.
    """
    if file.read(4) != b"GGUF":
        raise ModelFileError(asked, "it is not a GGUF file", "name a .gguf file or a model folder")
    version, _, n_fields = _unpack(file, "<IQQ")
    if version not in (2, 3):
        raise ModelFileError(
            asked,
            f"GGUF version {version} cannot be read",
            "convert the model again with a current llama.cpp",
        )
    for _ in range(n_fields):
        key = _string(file)
        value = _value(file, *_unpack(file, "<I"))
        if key == "general.architecture":
            return str(value)
    return "none named"


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == gguf.GGUFValueType.STRING:
        return _string(file)
    if kind == gguf.GGUFValueType.ARRAY:
        element, count = _unpack(file, "<IQ")
        return [_value(file, element) for _ in range(count)]
    return _unpack(file, "<" + _SCALARS[gguf.GGUFValueType(kind)])[0]


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > 1 << 24:  # no name or template is 16 MB: the bytes are not a header
        raise struct.error("string length out of range")
    return _exactly(file, length).decode("utf-8")


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, _exactly(file, struct.calcsize(layout)))


def _exactly(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) < n:
        raise struct.error("end of file")
    return data


def _quantization(reader: Any) -> str | None:
    field = reader.fields.get("general.file_type")
    try:
        return gguf.LlamaFileType(field.contents()).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (AttributeError, ValueError):  # not said, or a kind newer than the library
        return None


def convert_once(path: Path) -> Path:
    """The folder of float32 safetensors of a GGUF file, made on the first call."""
    folder = converted_folder(path)
    if folder.is_dir():  # it got its name only when it was whole
        return folder
    _log.info("converting %s once, to %s", path.name, folder)
    with Console(file=sys.stderr).status(f"reading {path.name} for the first time (about a minute) ..."):
        reader = _read_whole(path)
        with whole_folder(folder, needs=4 * sum(int(t.n_elements) for t in reader.tensors)) as staging:
            _convert(path, reader, staging)
    return folder


def _read_whole(path: Path) -> Any:
    asked = f"load {path.name}"
    with clear(asked, "the file is truncated or damaged; fetch it again"):
        reader = gguf.GGUFReader(path)
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise ModelFileError(
            asked, "it is one part of a split model", "join the parts with llama-gguf-split --merge"
        )
    return reader


def _convert(path: Path, reader: Any, folder: Path) -> None:
    """Dequantizes to float32, checks that no tensor was lost on the way, and saves a plain model folder."""
    file: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    unpacked: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions would keep the weights packed on some machines
        unpacked["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quiet(), clear(f"convert {path.name}"):
        config = AutoConfig.from_pretrained(**file)
        refuse_unsupported(config, path.name)
        tokenizer = AutoTokenizer.from_pretrained(**file)
        both: Any = AutoModelForCausalLM.from_pretrained(
            **file, **unpacked, dtype=torch.float32, device_map={"": "cpu"}, output_loading_info=True
        )
    loaded, info = both
    refuse_incomplete(info, path.name)
    _refuse_lost_tensors(path, reader, loaded)
    _complete_config(path, reader, config)
    with quiet():
        with torch.device(
            "meta"
        ):  # a stock model around the same weights: the loaded one refuses to be saved
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_json(folder / _SOURCE, {"file": path.name, "quantization": _quantization(reader)})


def _refuse_lost_tensors(path: Path, reader: Any, model: Any) -> None:
    """The GGUF loader skips tensors that it has no place for (an attention bias, say) without a word."""
    held = {t.name for t in reader.tensors} - {"rope_freqs.weight"}
    n_weights = len(dict(model.named_parameters()))
    if len(held) != n_weights:
        raise UnsupportedModelError(
            f"load {path.name}",
            f"it holds {len(held)} tensors, of which this model's code would use {n_weights}",
            "load the original model from a folder or the hub",
        )


def _complete_config(path: Path, reader: Any, config: Any) -> None:
    """Sets what the GGUF loader leaves at a default although the file, or llama.cpp, says otherwise."""
    if hasattr(config, "query_pre_attn_scalar") and config.num_hidden_layers in (46, 62):
        # The 27B models alone scale queries by the width per head; llama.cpp knows them by their depth.
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    scaling = [
        f for key, f in reader.fields.items() if key.endswith(("rope.scaling.type", "rope.scale_linear"))
    ]
    if any(field.contents() not in ("none", 1.0) for field in scaling):
        raise UnsupportedModelError(
            f"load {path.name}",
            "it stretches its rotary positions, which is lost in reading a GGUF file",
            "load the original model from a folder or the hub",
        )
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            _stretch_rope(path, torch.tensor(tensor.data.reshape(-1).copy()), config)


def _stretch_rope(path: Path, factors: torch.Tensor, config: Any) -> None:
    """Llama 3's rotary stretch, which a GGUF file holds as one divisor per frequency [head_dim / 2]."""
    plain, _ = ROPE_INIT_FUNCTIONS["llama3"](_with_rope(config, 1.0), torch.device("cpu"))
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](
        _with_rope(config, float(factors.max())), torch.device("cpu")
    )
    if not torch.allclose(plain / factors, stretched, rtol=1e-4, atol=0):
        raise UnsupportedModelError(
            f"load {path.name}",
            "it stretches its rotary positions in a way that is not known here",
            "load the original model from a folder or the hub",
        )


def _with_rope(config: Any, factor: float) -> Any:
    """The config, with Llama 3's rotary setting of this factor in it."""
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return config
