"""Run folders made by hand, from numbers that stand in the tests."""

from __future__ import annotations

from ridgefill.eval.results import Run


def plan(fill="ridge", split=4, tail=64, leading=16, **more):
    return {"fill": fill, "split": split, "tail": tail, "leading": leading} | more


def about(arms, **more):
    """run.json but for kind and settings; arms: name -> (plan, macs_over_exact)."""
    exact = {"exact": (plan("exact"), 1.0)}
    return {
        "arms": {
            name: {"words": name, "plan": its, "macs_over_exact": macs, "notes": ""}
            for name, (its, macs) in (exact | arms).items()
        },
        "baseline": "exact",
        "tokens": 4096,
        "layers": 8,
        "model": "tiny",
        "maps": "a" * 64,
        "tokenizer": "b" * 64,
        "ledger": None,
        "environment": {"device": "some processor", "date": "2026-11-30T00:00:00+00:00"},
    } | more


def write(folder, kind, arms, results, settings=None, finish=True, **more):
    """results: arm -> {item: (stratum, metrics, facts)}."""
    run = Run.open(folder, kind, settings or {"seed": 0}, about(arms, **more))
    for arm, items in results.items():
        for item, (stratum, metrics, facts) in items.items():
            run.add(arm, item, stratum, metrics, **facts)
    if finish:
        run.finish(resamples=100)
    return folder


def scores(values, filled=True, stratum="niah", fact="filled"):
    """[score] -> items of a needle task at 2 lengths and 5 depths."""
    return {
        f"{stratum}/{i}": (
            stratum,
            {"score": float(v)},
            {
                "length": (1024, 2048)[i % 2],
                "depth": (i % 5) / 4,
                fact: filled,
                "answer": "7",
                "seconds": 2.0,
            },
        )
        for i, v in enumerate(values)
    }


def losses(nll, stratum="prose", **more):
    """[nll] -> documents; more: metric -> [value], None where it does not apply."""
    rows = {"nll": nll} | more
    return {
        f"{stratum}/{i}": (
            stratum,
            {name: float(values[i]) for name, values in rows.items() if values[i] is not None},
            {"tokens": 64},
        )
        for i in range(len(nll))
    }
