"""Exact prefix rows (paper 2.4): one selector a file; ``a | b`` chooses what either does; `parse_rows` reads them.

>>> str(parse_rows("attention(0.10) | special"))
'attention | special'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill.rows.attention import AttentionRows
    from ridgefill.rows.base import Prompt, Reader, Score, Selector, Union
    from ridgefill.rows.digits import DigitRows
    from ridgefill.rows.leading import LeadingRows
    from ridgefill.rows.lexical import LexicalRows
    from ridgefill.rows.parse import parse_rows
    from ridgefill.rows.probe import ProbeRows
    from ridgefill.rows.protected import ProtectedRows
    from ridgefill.rows.random import RandomRows
    from ridgefill.rows.scores import AttentionScore, Combined, OverlapScore, PeakScore, ProbeScore
    from ridgefill.rows.snapkv import PooledAttentionRows
    from ridgefill.rows.spans import SpanRows
    from ridgefill.rows.special import SpecialRows
    from ridgefill.rows.tail import LongerTail

# Imported on first use: naming a selector must not wait for torch.
_HOME = {
    "AttentionRows": "attention",
    "AttentionScore": "scores",
    "Combined": "scores",
    "DigitRows": "digits",
    "LeadingRows": "leading",
    "LexicalRows": "lexical",
    "LongerTail": "tail",
    "OverlapScore": "scores",
    "PeakScore": "scores",
    "PooledAttentionRows": "snapkv",
    "ProbeRows": "probe",
    "ProbeScore": "scores",
    "Prompt": "base",
    "ProtectedRows": "protected",
    "RandomRows": "random",
    "Reader": "base",
    "Score": "base",
    "Selector": "base",
    "SpanRows": "spans",
    "SpecialRows": "special",
    "Union": "base",
    "parse_rows": "parse",
}
SELECTORS = {  # how `parse_rows` calls them
    "attention": "AttentionRows",
    "digits": "DigitRows",
    "leading": "LeadingRows",
    "lexical": "LexicalRows",
    "probe": "ProbeRows",
    "protected": "ProtectedRows",
    "random": "RandomRows",
    "snapkv": "PooledAttentionRows",
    "spans": "SpanRows",
    "special": "SpecialRows",
    "tail": "LongerTail",
}
SCORES = {
    "attention": "AttentionScore",
    "overlap": "OverlapScore",
    "peak": "PeakScore",
    "probe": "ProbeScore",
}

__all__ = [
    "SCORES",
    "SELECTORS",
    "AttentionRows",
    "AttentionScore",
    "Combined",
    "DigitRows",
    "LeadingRows",
    "LexicalRows",
    "LongerTail",
    "OverlapScore",
    "PeakScore",
    "PooledAttentionRows",
    "ProbeRows",
    "ProbeScore",
    "Prompt",
    "ProtectedRows",
    "RandomRows",
    "Reader",
    "Score",
    "Selector",
    "SpanRows",
    "SpecialRows",
    "Union",
    "parse_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ridgefill.rows' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ridgefill.rows.{_HOME[name]}"), name)
    globals()[name] = value
    return value
