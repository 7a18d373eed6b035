"""Rows in words: ``attention(0.10) | special``, ``spans(overlap + attention, 0.05, spans=lines)``.

The text is read as a Python expression of names, calls, numbers, words and tuples; nothing is evaluated.

    rows   := call | rows "|" rows
    call   := name | name "(" settings ")"          names in `SELECTORS`, settings as in the constructor
    score  := call | number "*" score | score "+" score | "z(" score ")" | "rank(" score ")"
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any, NoReturn

import ridgefill.rows as rows
from ridgefill.errors import SettingError
from ridgefill.rows.base import Score, Selector
from ridgefill.rows.scores import NORMS, Combined

_RULE = re.compile(r"(?<![\w.\"'])27b\b")  # the one word that begins with a digit
_WORDS = {"true": True, "false": False, "none": None}


def parse_rows(text: str) -> Selector:
    """The selector that a text names; ``str(selector)`` gives such a text back.

    Raises:
        SettingError: an unknown name or setting, or one out of range; it says what there is.
    """
    try:
        tree = ast.parse(_RULE.sub("'27b'", text.strip()), mode="eval").body
        return _Reading(text).selector(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, SettingError):
            raise
        _refuse(text, "it cannot be read", "write rows such as attention(0.10) | special")


class _Reading:
    """One text being read; refusals name it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def selector(self, node: ast.expr) -> Selector:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.selector(node.left) | self.selector(node.right)
        return self._call(node, rows.SELECTORS, "rows")

    def score(self, node: ast.expr) -> Score:
        terms = self._terms(node)
        if len(terms) == 1 and terms[0][0] == 1:
            return terms[0][1]
        return self._combined(terms, "z")

    def _terms(self, node: ast.expr) -> list[tuple[float, Score]]:
        """A sum's (weight, score) pairs."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._terms(node.left) + self._terms(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            weight = self._number(node.left)
            return [(weight, self._one_score(node.right))]
        return [(1, self._one_score(node))]

    def _one_score(self, node: ast.expr) -> Score:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NORMS:
            if len(node.args) != 1 or node.keywords:
                _refuse(self.text, f"{node.func.id} takes one sum of scores", "write z(overlap + attention)")
            return self._combined(self._terms(node.args[0]), node.func.id)
        return self._call(node, rows.SCORES, "scores")

    def _combined(self, terms: list[tuple[float, Score]], norm: str) -> Combined:
        weights = tuple(weight for weight, _ in terms)
        return Combined(tuple(s for _, s in terms), () if set(weights) == {1} else weights, norm)

    def _call(self, node: ast.expr, known: dict[str, str], kind: str) -> Any:
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
        if name not in known:
            _refuse(self.text, f"there are no {kind} called {name!r}", f"choose among {', '.join(known)}")
        cls = getattr(rows, known[name])
        settings = {word.arg: word.value for word in call.keywords if word.arg is not None}
        if len(settings) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
            _refuse(self.text, "stars are not read", f"write {_usage(name, cls)}")
        try:
            given = inspect.signature(cls).bind(*call.args, **settings).arguments
        except TypeError as error:
            _refuse(self.text, f"{name}: {error}", f"write {_usage(name, cls)}")
        return cls(**{setting: self._setting(setting, value) for setting, value in given.items()})

    def _setting(self, name: str, node: ast.expr) -> Any:
        if name == "score":
            return self.score(node)
        if name == "within":
            return None if ast.unparse(node).lower() == "none" else self.selector(node)
        return self._value(node)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._value(part) for part in node.elts)
        if isinstance(node, ast.Name):
            return _WORDS.get(node.id, node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
            return node.value
        return self._number(node)

    def _number(self, node: ast.expr) -> float:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        plain = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if not plain:
            _refuse(
                self.text, f"{ast.unparse(node)} is no number", "write settings as plain numbers or words"
            )
        return sign * node.value  # type: ignore[attr-defined]


def _usage(name: str, cls: type) -> str:
    """A call with every setting and its default."""
    parts = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in inspect.signature(cls).parameters.values()
    ]
    return f"{name}({', '.join(parts)})"


def _refuse(text: str, why: str, instead: str) -> NoReturn:
    raise SettingError(f"the rows {text!r}", why, instead)
