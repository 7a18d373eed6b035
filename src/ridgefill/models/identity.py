"""What tells one model from another, so that maps are never used on a model they were not fitted on."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import PureWindowsPath
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

SAME_WEIGHTS = 0.9  # a 4-bit copy correlates above 0.99 with the original, another model's weights near 0
SKETCH_LAYERS = 8
SKETCH_VALUES = 32  # per weight; 8 layers x 2 weights x 32 values
# Where they are sampled: one weight of the mixer and one after it, the first of each that a layer has.
SKETCHED = (
    ("self_attn.k_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "linear_attn.k_proj"),
    ("mlp.down_proj", "mlp.gate", "mlp.router"),  # of experts their router, which stays unquantized
)

# Fields that must be equal, with the words for them in a refusal.
_MUST_MATCH = {
    "model_type": "architecture",
    "hidden": "hidden width",
    "layers": "number of layers",
    "layer_types": "layer types",
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "head_dim": "head size",
    "vocab": "vocabulary size",
    "tokenizer": "tokenizer",
}
# Fields that may differ: maps carry over from one quantization of a model to another at almost no loss.
_MAY_DIFFER = ("name", "dtype", "quantization")
_TOKENIZERS: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()  # -> length, hash


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model: its shape, its tokenizer and a sample of its weights.

    Attributes:
        name: hub name or folder name, never a whole path.
        model_type: the config's ``model_type``.
        hidden: width d of the hidden state.
        layers: number of layers, L.
        layer_types: kind of each layer, or None where the config names none.
        heads, kv_heads, head_dim: of the attention.
        vocab: rows of the embedding.
        dtype: of the weights, such as "float32".
        quantization: the quantization method's name, or None.
        tokenizer: sha256 of the vocabulary, or None if no tokenizer was given.
        sketch: sampled weights, or None where they cannot be read (packed or offloaded).
    """

    name: str
    model_type: str
    hidden: int
    layers: int
    layer_types: tuple[str, ...] | None
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    quantization: str | None = None
    tokenizer: str | None = None
    sketch: tuple[float, ...] | None = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> ModelIdentity:
        """The identity of a loaded transformers causal LM, and of its tokenizer if one is given."""
        config = model.config.get_text_config(decoder=True)
        heads = _number(config, "num_attention_heads")
        types = getattr(config, "layer_types", None)
        return cls(
            name=public_name(getattr(model.config, "_name_or_path", None) or ""),
            model_type=config.model_type,
            hidden=_number(config, "hidden_size"),
            layers=_number(config, "num_hidden_layers"),
            layer_types=None if types is None else tuple(types),
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads") or heads,
            head_dim=_number(config, "head_dim") or _number(config, "hidden_size") // max(heads, 1),
            vocab=_number(config, "vocab_size"),
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=_quantization(model.config),
            tokenizer=None if tokenizer is None else tokenizer_sha256(tokenizer),
            sketch=sketch_weights(model),
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        fields = asdict(self)
        for name in ("layer_types", "sketch"):
            fields[name] = None if fields[name] is None else list(fields[name])
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelIdentity:
        """Reads `to_json`; fields it does not know are left out.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or of the wrong kind.
        """
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab"):
            known[name] = int(fields[name])
        if known.get("layer_types") is not None:
            known["layer_types"] = tuple(str(kind) for kind in known["layer_types"])
        if known.get("sketch") is not None:
            known["sketch"] = tuple(float(value) for value in known["sketch"])
            if len(known["sketch"]) % SKETCH_VALUES:
                raise ValueError(f"a sketch has {SKETCH_VALUES} values of each weight")
        return cls(**known)

    def differences(self, other: ModelIdentity) -> list[str]:
        """Why ``other`` is not this model, one phrase each; empty if it is (as far as both can be read)."""
        found = []
        for name, words in _MUST_MATCH.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            # What one side does not know is not compared: not every release names the layer types.
            if mine == theirs or mine is None or theirs is None:
                continue
            detail = f"{_brief(theirs)}, not {_brief(mine)}"
            if name == "tokenizer":
                detail = "its vocabulary or added tokens differ"
            elif _brief(theirs) == _brief(mine):
                detail = "in another order"
            found.append(f"another {words} ({detail})")
        if not found and self.sketch and other.sketch:
            likeness = sketch_correlation(self.sketch, other.sketch)
            if not likeness >= SAME_WEIGHTS:
                found.append(f"other weights (correlation {likeness:.2f}; a copy has {SAME_WEIGHTS} or more)")
        return found

    def remarks(self, other: ModelIdentity) -> list[str]:
        """What differs between this model and ``other`` but is known to carry over, one phrase each."""
        found = []
        for name in _MAY_DIFFER:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "name" and (not mine or not theirs or _last(mine) == _last(theirs)):
                continue  # a folder of the same name as on the hub, or a model made in memory
            if mine != theirs:
                found.append(f"another {name} ({theirs or 'none'}, not {mine or 'none'})")
        if not (self.sketch and other.sketch):
            found.append("weights that could not be compared (packed or offloaded), only their shapes were")
        return found


def public_name(path: str) -> str:
    """A hub name as it is, a hub cache's snapshot as its hub name, any other path as its last part.

    >>> public_name("org/name"), public_name("/data/models/name/")
    ('org/name', 'name')
    """
    parts = [part for part in PureWindowsPath(path).parts if part.strip("/\\.")]  # splits at / and \\ alike
    for part in parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    if path.count("/") == 1 and len(parts) == 2 and path[0] != "~" and not os.path.isdir(path):
        return path
    return parts[-1] if parts else ""


def tokenizer_sha256(tokenizer: Any) -> str:
    """sha256 over a tokenizer's vocabulary and its added tokens, the same in every process.

    Which token plays which role (padding, end of text) is left out: roles change no token's id. Kept as long as the
    tokenizer's length stays, for a large vocabulary takes tenths of a second and every prefill asks.
    """
    known = _TOKENIZERS.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        known = _TOKENIZERS[tokenizer] = (len(tokenizer), _vocabulary_sha256(tokenizer))
    return known[1]


def _vocabulary_sha256(tokenizer: Any) -> str:
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{token!r}\n".encode())
    for number, added in sorted(tokenizer.added_tokens_decoder.items()):
        digest.update(f"added {number}\t{str(added)!r}\n".encode())
    return digest.hexdigest()


def sketch_weights(model: Any) -> tuple[float, ...] | None:
    """Evenly spaced values of the key and MLP-down projections of up to 8 layers; None if unreadable.

    Where there is no such projection, those of the recurrent input and of the expert router stand in.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not layers:
        return None
    values: list[float] = []
    for i in _spread(len(layers), min(SKETCH_LAYERS, len(layers))):
        for paths in SKETCHED:
            sample = _sample(layers[i], paths)
            if sample is None:
                return None
            values += sample
    return tuple(values)


def sketch_correlation(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Mean over the sampled weights of their values' correlation; 0 for sketches of different length."""
    if len(a) != len(b):
        return 0.0
    pieces = [torch.tensor(s, dtype=torch.float64).view(-1, SKETCH_VALUES) for s in (a, b)]
    x, y = (p - p.mean(dim=1, keepdim=True) for p in pieces)
    same = (pieces[0] == pieces[1]).all(dim=1)  # a constant weight has no correlation, even with itself
    each = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)).clamp_min(1e-30)
    return float(torch.where(same, torch.ones_like(each), each).mean())


def _number(config: Any, name: str) -> int:
    """A size from the config; 0 where the architecture has no such thing, which then matches nothing."""
    return getattr(config, name, None) or 0


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _spread(n: int, k: int) -> list[int]:
    """k indices from 0 to n - 1, evenly spaced."""
    return [i * (n - 1) // max(k - 1, 1) for i in range(k)]


def _sample(layer: Any, paths: tuple[str, ...]) -> list[float] | None:
    weight = next((w for path in paths if (w := _weight(layer, path)) is not None), None)
    if (
        not isinstance(weight, Tensor)
        or weight.is_meta
        or not weight.is_floating_point()
        or weight.itemsize < 2
    ):
        return None  # offloaded, or codes that mean nothing without their scales
    where = [divmod(at, weight.shape[-1]) for at in _spread(weight.numel(), SKETCH_VALUES)]
    rows, columns = torch.tensor(where, device=weight.device).unbind(1)
    try:
        sample = weight.detach()[rows, columns].float().cpu()
    except (RuntimeError, NotImplementedError, TypeError):  # a packed tensor that looks like a plain one
        return None
    if not torch.isfinite(sample).all():
        return None
    return [float(f"{value:.6g}") for value in sample.tolist()]  # six digits are plenty, and a short file


def _weight(layer: Any, path: str) -> Any:
    try:
        return layer.get_submodule(path).weight
    except AttributeError:
        return None


def _quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    name = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(name, "value", name) or type(found).__name__)


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{value.count(kind)} {kind}" for kind in sorted(set(value)))
    return str(value)
