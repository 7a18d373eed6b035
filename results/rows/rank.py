"""Which score ranks the needle's sentence first? Compares scores on what `collect.py` read.

    python results/rows/collect.py 20 && python results/rows/rank.py

Scores are chosen on the prompts of even number ("development"); the others
("test") are reported. Writes ranking.json
and RANKING.md.
"""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from collect import COUNT, FLOOR, GROUPS, OUT, ROOT, SPLITS, items_of
from page import markdown
from torch import Tensor
from transformers import AutoTokenizer

from ridgefill.embedded import default_model
from ridgefill.eval.haystack import Item
from ridgefill.gguf_file import convert_once
from ridgefill.rows.base import Prompt
from ridgefill.rows.scores import OverlapScore
from ridgefill.rows.segments import prompt_spans

LEADING, PREFIX = 16, 1536
SOURCES = tuple(f"{family}-{s:02d}" for family in ("lower", "upto", "probe", "late") for s in SPLITS)
WINDOWS = (16, 32)
BUDGETS = (0.025, 0.05, 0.1)
POOLS = ("mean", "max", "top4")
HEADS_KEPT = (1, 2, 4, 8, 16)
Scorer = Callable[["Case"], Tensor]  # [spans], more is better


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        cell, index, exact: what it is, and whether the exact model answers it (None: not asked).
        spans: of the prefix, without leading rows.
        needle: places in ``spans`` that hold the asked needle.
        attention: by source and pool: [groups, layers, heads, spans].
        paper, peak: by source: [m] attention of the last rows summed over heads and layers, and the largest that
            any head of any layer pays from any row of the question or after.
        lexical: by pool: [spans] words shared with the question, by their rarity.
    """

    cell: str
    index: int
    exact: bool | None
    spans: list[range]
    needle: list[int]
    needle_rows: range
    attention: dict[tuple[str, str], Tensor]
    paper: dict[str, Tensor]
    peak: dict[str, Tensor]
    lexical: dict[str, Tensor]

    @property
    def dev(self) -> bool:
        """Whether scores may be chosen on it."""
        return self.index % 2 == 0


def load_case(cell: str, index: int, item: Item, tokenizer: Any) -> Case:
    """What `collect.py` read of one prompt, pooled over its sentences."""
    place = OUT / f"{cell}-{index:02d}.json"
    arrays = torch.load(place.with_suffix(".pt"))
    exact = json.loads(place.read_text(encoding="utf-8"))["exact"]
    prompt = Prompt(item.ids[0], PREFIX, LEADING, tokenizer, question=item.question)
    spans = [range(max(s.start, LEADING), s.stop) for s in prompt_spans(prompt, "sentences")]
    spans = [s for s in spans if s]
    first, stop = item.asked[0]
    needle = [i for i, s in enumerate(spans) if s.start < stop and s.stop > first]
    attention, paper, peak = {}, {}, {}
    for array, logs in arrays.items():
        a = logs.float().exp2()
        a[a <= 2 * FLOOR] = 0
        for pool in POOLS:
            attention[array, pool] = pooled(a, spans, pool)
        for source in SOURCES:
            if layers_of(source)[0] == array and has(source, a.shape[1], "probe-07" in arrays):
                of = a[:, layers_of(source)[1]]
                paper[source] = of[GROUPS.index("last64")].sum((0, 1))
                peak[source] = of[GROUPS.index("peak")].amax((0, 1))
    overlap = {pool: pooled(OverlapScore().score(prompt), spans, pool) for pool in ("mean", "max", "sum")}
    overlap["words"] = shared_words(tokenizer, item, spans)
    return Case(cell, index, exact, spans, needle, range(first, stop), attention, paper, peak, overlap)


def shared_words(tokenizer: Any, item: Item, spans: list[range]) -> Tensor:
    """[spans]: each different word shared with the question counts once, by its rarity among the sentences (BM25)."""

    def words(rows: range) -> set[str]:
        return set(re.findall(r"\w+", tokenizer.decode(item.ids[0, rows.start : rows.stop]).lower()))

    held = [words(span) for span in spans]
    worth = {}
    for word in words(range(*item.question)):
        df = sum(word in h for h in held)
        worth[word] = max(0.0, math.log((len(spans) - df + 0.5) / (df + 0.5)))
    return torch.tensor([sum(worth.get(word, 0.0) for word in h) for h in held])


def pooled(a: Tensor, spans: list[range], pool: str) -> Tensor:
    """[..., m] -> [..., spans]."""
    parts = [a[..., s.start : s.stop] for s in spans]
    if pool == "mean":
        return torch.stack([p.mean(-1) for p in parts], -1)
    if pool == "max":
        return torch.stack([p.amax(-1) for p in parts], -1)
    if (
        pool == "distinct"
    ):  # a word's rows all carry its worth, and a word counts once: equal worths are one word
        return torch.stack([p.unique().sum() for p in parts])
    return torch.stack([p.topk(min(4, p.shape[-1]), -1).values.mean(-1) for p in parts], -1)


def z(a: Tensor) -> Tensor:
    """Over spans: less its mean, over its standard deviation."""
    return (a - a.mean(-1, keepdim=True)) / a.std(-1, keepdim=True).clamp_min(1e-12)


def ranks(score: Tensor) -> Tensor:
    """[..., spans] -> rank, 0 for the highest."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def layers_of(source: str) -> tuple[str, slice]:
    """(array, its layers) of "lower-07", "upto-07" (the split layer too), "probe-07" or "late-07" (exact)."""
    name, split = source.split("-")
    if name == "probe":
        return source, slice(None)
    s = int(split)
    return "exact", {"lower": slice(0, s), "upto": slice(0, s + 1), "late": slice(s, None)}[name]


def has(source: str, n_layers: int, probed: bool) -> bool:
    """Whether a prompt was read so far."""
    return probed or (source.split("-")[0] in ("lower", "upto") and layers_of(source)[1].stop <= n_layers)


def heads_of(case: Case, source: str, pool: str, group: str) -> Tensor:
    """[layers * heads, spans] of one group of query rows; "x over earlier" is the logarithm of a ratio."""
    array, layers = layers_of(source)
    a = case.attention[array, pool][:, layers].flatten(1, 2)
    of = {name: a[i] for i, name in enumerate(GROUPS)}
    of["wide peak"] = torch.maximum(of["peak"], of["earlier peak"])  # from rows before the question too
    if not group.endswith(" over earlier"):
        return of[group]
    top = group.removesuffix(" over earlier")
    base = {"share": "earlier share", "peak": "earlier peak"}.get(top, "earlier")
    floor = 1e-4
    return ((of[top] + floor) / (of[base] + floor)).log()


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda a: a.sum(0),
    "max": lambda a: a.amax(0),
    "z top 4": lambda a: z(a).topk(4, 0).values.sum(0),
    "z cubes": lambda a: z(a).clamp_min(0).pow(3).sum(0),
    "votes": lambda a: (1 / (1 + ranks(a).float())).sum(0),
}
QUERY_GROUPS = (
    *("last64", "question", "after", "last", "peak", "wide peak", "share"),
    *("last64 over earlier", "peak over earlier", "share over earlier"),
)


def make(source: str, pool: str, group: str, reduction: str) -> Scorer:
    """A score of spans from attention."""
    return lambda case: REDUCTIONS[reduction](heads_of(case, source, pool, group))


def of_heads(source: str, pool: str, group: str, heads: list[int]) -> Scorer:
    """The sum over a few heads, each on one scale."""
    return lambda case: z(heads_of(case, source, pool, group)[heads]).sum(0)


def fused(*scorers: Scorer) -> Scorer:
    """Reciprocal rank fusion."""
    return lambda case: sum(1 / (2 + ranks(s(case)).float()) for s in scorers)


def added(*scorers: Scorer) -> Scorer:
    """The sum, each on one scale."""
    return lambda case: sum(z(s(case)) for s in scorers)


def alternating(first: Scorer, second: Scorer) -> Scorer:
    """The best of the first, the best of the second, the next of the first, and so on."""
    return lambda case: -torch.minimum(2 * ranks(first(case)), 2 * ranks(second(case)) + 1).float()


def lexical(case: Case) -> Tensor:
    """Words shared with the question."""
    return case.lexical["words"]


def rank_of(case: Case, score: Tensor) -> int:
    """The rank of the needle's sentence, 0 for the first."""
    return int(ranks(score)[case.needle].max())


def whole(case: Case, score: Tensor, share: float) -> bool:
    """Whether all of the needle is among the best spans that fit into the budget."""
    left, kept = round(share * PREFIX), set()
    for i in score.argsort(descending=True, stable=True).tolist():
        if len(case.spans[i]) <= left:
            kept.add(i)
            left -= len(case.spans[i])
    return set(case.needle) <= kept


def merit(cases: list[Case], scorer: Scorer) -> float:
    """What scores are chosen by: the mean reciprocal rank of the needle's sentence."""
    return statistics.fmean(1 / (1 + rank_of(case, scorer(case))) for case in cases)


def choose_heads(cases: list[Case], source: str, pool: str, group: str) -> list[int]:
    """All heads, best first, by the mean reciprocal rank of the needle's sentence."""
    merits = [1 / (1 + ranks(heads_of(c, source, pool, group))[:, c.needle].amax(1).float()) for c in cases]
    return torch.stack(merits).mean(0).argsort(descending=True).tolist()


def wilson(found: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    t, p = 1.96, found / n
    middle = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n)) / (1 + t * t / n)
    return round(max(0.0, middle - half), 3), round(min(1.0, middle + half), 3)


def report(cases: list[Case], scorer: Scorer) -> dict[str, Any]:
    """Ranks and shares of one cell."""
    scores = [scorer(case) for case in cases]
    found_ranks = [rank_of(case, score) for case, score in zip(cases, scores, strict=True)]
    out: dict[str, Any] = {
        "n": len(cases),
        "median_rank": statistics.median(found_ranks),
        "ranks": found_ranks,
    }
    for share in BUDGETS:
        found = sum(whole(case, score, share) for case, score in zip(cases, scores, strict=True))
        out[f"whole_{share:g}"] = [found, *wilson(found, len(cases))]
    return out


def row_report(cases: list[Case], of: Callable[[Case], Tensor], share: float) -> dict[str, Any]:
    """Single rows, as the paper takes them: how much of the needle they hold."""
    held = []
    for case in cases:
        score = of(case).clone()
        score[:LEADING] = -torch.inf
        top = set(score.topk(round(share * PREFIX)).indices.tolist())
        held.append(len(top & set(case.needle_rows)) / len(case.needle_rows))
    return {
        "n": len(held),
        "whole": sum(h == 1 for h in held),
        "mean_share": round(statistics.fmean(held), 3),
    }


def windows(score: Tensor, width: int) -> Tensor:
    """[m]: every row gets the best of its fixed window; ties stay together, as a window is taken whole."""
    best = score.unflatten(0, (-1, width)).amax(1)
    return (len(best) - ranks(best).float()).repeat_interleave(width)


def by_layer(cases: list[Case]) -> dict[str, list[float]]:
    """Per layer: the share of needles whose sentence has the largest peak in it, alone and with all layers below."""
    full = [c for c in cases if c.attention["exact", "max"].shape[1] > max(SPLITS) + 1]
    found: dict[str, list[float]] = {"n": [len(full)], "alone": [], "upto": []}
    for i in range(full[0].attention["exact", "max"].shape[1]):
        for name, layers in (("alone", slice(i, i + 1)), ("upto", slice(0, i + 1))):
            peaks = [c.attention["exact", "max"][GROUPS.index("peak"), layers].amax((0, 1)) for c in full]
            first = [rank_of(c, p) == 0 for c, p in zip(full, peaks, strict=True)]
            found[name].append(round(statistics.fmean(first), 3))
    return found


def contenders(dev: list[Case], split: int) -> dict[str, tuple[str, str, Scorer]]:
    """name -> (source, how it was chosen, score): the paper's, the best on development, combinations."""
    none = f"lower-{split:02d}"
    found: dict[str, tuple[str, str, Scorer]] = {"lexical, each word once": (none, "", lexical)}
    for pool in ("mean", "max", "sum"):
        found[f"lexical, OverlapScore, {pool}"] = (none, "", lambda case, pool=pool: case.lexical[pool])
    for family in ("lower", "upto", "probe", "late"):
        source = f"{family}-{split:02d}"
        read = [case for case in dev if source in case.peak]
        peak = make(source, "max", "peak", "max")
        wide = make(source, "max", "wide peak", "max")
        found[f"{source}: paper's sum, mean of sentence"] = (
            source,
            "",
            make(source, "mean", "last64", "sum"),
        )
        found[f"{source}: largest over heads, mean"] = (source, "", make(source, "mean", "last64", "max"))
        found[f"{source}: largest over heads, max"] = (source, "", make(source, "max", "last64", "max"))
        found[f"{source}: peak"] = (source, "", peak)
        found[f"{source}: peak, 64 rows more"] = (source, "", wide)
        grid = {
            f"{pool} | {group} | {reduction}": make(source, pool, group, reduction)
            for pool in POOLS
            for group in QUERY_GROUPS
            for reduction in REDUCTIONS
        }
        merits = {name: merit(read, scorer) for name, scorer in grid.items()}
        for place, name in enumerate(sorted(merits, key=merits.__getitem__, reverse=True)[:3]):
            chosen = f"{name} ({merits[name]:.3f})"
            found[f"{source}: best {place + 1} on development"] = (source, chosen, grid[name])
        picks: dict[str, tuple[float, Scorer]] = {}
        for group in ("last64", "peak", "last64 over earlier"):
            heads = choose_heads(read, source, "max", group)
            for k in HEADS_KEPT:
                scorer = of_heads(source, "max", group, heads[:k])
                shown = [
                    f"{h // 9 + (split if family in ('probe', 'late') else 0)}.{h % 9}" for h in heads[:k]
                ]
                picks[f"{group} | {' '.join(shown)}"] = (merit(read, scorer), scorer)
        name = max(picks, key=lambda p: picks[p][0])
        found[f"{source}: chosen heads"] = (source, f"{name} ({picks[name][0]:.3f})", picks[name][1])
        found[f"{source}: peak fused with lexical"] = (source, "", fused(peak, lexical))
        found[f"{source}: peak + lexical"] = (source, "", added(peak, lexical))
        found[f"{source}: peak, lexical in turn"] = (source, "", alternating(peak, lexical))
    return found


def main() -> None:
    """All splits and cells."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(convert_once(default_model()))
    cases = []
    for cell, count in COUNT.items():
        items = items_of(cell, tokenizer)
        there = [i for i in range(count) if (OUT / f"{cell}-{i:02d}.json").exists()]
        cases += [load_case(cell, i, items[i], tokenizer) for i in there]
    cells = list(dict.fromkeys(case.cell for case in cases))
    dev = [c for c in cases if c.dev]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "python results/rows/collect.py 20 && python results/rows/rank.py",
        "prompts": {
            cell: {
                "dev": sum(c.dev and c.cell == cell for c in cases),
                "test": sum(not c.dev and c.cell == cell for c in cases),
                "exact_asked": sum(c.exact is not None for c in cases if c.cell == cell),
                "exact_answered": sum(bool(c.exact) for c in cases if c.cell == cell),
                "median_spans": statistics.median(len(c.spans) for c in cases if c.cell == cell),
            }
            for cell in cells
        },
        "splits": {},
    }
    result["by_layer"] = by_layer(cases)
    for split in SPLITS:
        table = {}
        for name, (source, chosen, scorer) in contenders(dev, split).items():
            table[name] = {"chosen": chosen}
            for cell in ("all", *cells):
                read = [c for c in cases if not c.dev and source in c.peak and cell in ("all", c.cell)]
                table[name][cell] = report(read, scorer) if read else None
        rows = {}
        for source in (f"lower-{split:02d}", f"upto-{split:02d}", f"probe-{split:02d}"):
            for share in (0.05, 0.1, 0.2):
                read = [c for c in cases if not c.dev and source in c.peak]
                rows[f"{source}, paper's sum, {share:g}"] = row_report(read, lambda c: c.paper[source], share)  # noqa: B023
                rows[f"{source}, peak, {share:g}"] = row_report(read, lambda c: c.peak[source], share)  # noqa: B023
                for width in WINDOWS:
                    of = lambda c: windows(c.peak[source], width)  # noqa: B023, E731
                    rows[f"{source}, peak, windows of {width}, {share:g}"] = row_report(read, of, share)
        result["splits"][str(split)] = {"spans": table, "rows": rows}
    (ROOT / "results" / "rows" / "ranking.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    page = markdown(result)
    (ROOT / "results" / "rows" / "RANKING.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
