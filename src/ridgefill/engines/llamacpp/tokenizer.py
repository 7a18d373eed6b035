"""llama.cpp's tokenizer under the few names of a transformers tokenizer that ridgefill's texts and prompts use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of token ids; half a character at an end is left out."""
        whole = [int(i) for i in ids]
        return str(self._llm.detokenize(whole, special=not skip_special_tokens).decode("utf-8", "ignore"))

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
