"""llama.cpp's tokenizer under the few names of a transformers tokenizer that ridgefill's texts and prompts use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AddedToken

from ridgefill.engines.llamacpp.native import llama_cpp

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama


class GgufTokenizer:
    """A GGUF model's tokenizer and chat form.

    Attributes:
        chat_template: the model's Jinja template, or None.
    """

    def __init__(self, llm: RidgeLlama) -> None:
        self._llm = llm
        self.chat_template: str | None = llm.metadata.get("tokenizer.chat_template")

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Control, unknown and user-defined tokens by id."""
        lib, model = llama_cpp(), self._llm._model
        vocab = lib.llama_model_get_vocab(model.model)
        control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        found = {}
        for i in range(self._llm.n_vocab()):
            kind = lib.llama_vocab_get_attr(vocab, i)
            if kind & (control | lib.LLAMA_TOKEN_ATTR_USER_DEFINED):
                found[i] = AddedToken(model.token_get_text(i), special=bool(kind & control))
        return found

    @property
    def all_special_ids(self) -> list[int]:
        """Control and unknown tokens."""
        return [i for i, token in self.added_tokens_decoder.items() if token.special]

    def __call__(
        self,
        text: str,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """{"input_ids": a list, or [1, n] int64 for ``return_tensors="pt"``}."""
        ids = self._llm.tokenize(text.encode(), add_bos=add_special_tokens, special=True)
        ids = ids[:max_length] if truncation else ids
        return {"input_ids": ids if return_tensors is None else torch.tensor([ids])}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return list(self(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True, **_: Any) -> str:
        """The text of token ids; bytes that are none show as U+FFFD."""
        whole = [int(i) for i in ids]
        return str(self._llm.detokenize(whole, special=not skip_special_tokens).decode("utf-8", "replace"))

    def batch_decode(self, many: Sequence[Sequence[int]], **given: Any) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, **given) for ids in many]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [self._llm._model.token_get_text(int(i)) for i in ids]

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        """Messages in the model's chat form, as text."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        llm = self._llm
        bos, eos = (
            llm._model.token_get_text(i) if i != -1 else "" for i in (llm.token_bos(), llm.token_eos())
        )
        form = Jinja2ChatFormatter(self.chat_template or "", eos, bos, add_generation_prompt)
        return str(form(messages=list(messages)).prompt)
