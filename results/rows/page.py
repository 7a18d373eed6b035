"""The page of what `rank.py` found."""

from __future__ import annotations

from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """The table as a page."""
    cells, v = list(result["prompts"]), result["versions"]
    lines = [
        "# Which score ranks the needle's sentence first",
        "",
        f"Made by `{result['command']}`; {result['date']}, torch {v['torch']}, transformers {v['transformers']}.",
        "SmolLM2-135M-Instruct, prompts of 2,048 tokens, tail 512, the asked needle in the filled region, depths",
        "spread evenly. Scores and heads were chosen on the prompts of even number; the others are shown. Each cell:",
        "needles whose sentence is whole among the best sentences that fit into 5 % of the prefix rows, of how many",
        "(median rank, 0 is first). The last column has the 95 % Wilson interval of the share over all test prompts.",
        "`ranking.json` has every rank, and 2.5 % and 10 %.",
        "",
        "- lower: layers below the split. upto: the split layer too; its keys and queries need no late layer, as its",
        "  input is exact for every row. probe: the last 256 rows through the real late layers over the ridge-filled",
        "  cache. late: late layers of the exact model, which no product has (a reference).",
        "- paper's sum: attention of the last 64 rows, summed over rows, layers and heads, mean over the sentence.",
        "- largest over heads: the same rows, the largest layer and head, then mean or max over the sentence.",
        "- peak: the largest attention that any head of any such layer pays from any row of the question or after it",
        "  to any row of the sentence; with 64 rows more before the question as well.",
        "- lexical: words of the question that the sentence holds, by rarity among the sentences.",
        "- paraphrased: the question shares no content word with its needle.",
        "",
        "Limits: one model. A rank says which rows would be kept, not that the answer comes back. The kinds share",
        "their stretches of prose and their depths, so the rows of the tables are not independent. The exact model",
        "itself often misses the answer with four keys or a paraphrased question in prose (last column below, asked",
        "of some prompts only). The probe and the late layers were read for those prompts only. Which layer holds",
        "the head that finds the needle is the model's own affair (last table): the split layer matters here.",
        "",
        "| prompts | development | test | sentences (median) | exact answers of asked |",
        "|---|---|---|---|---|",
    ]
    for cell, p in result["prompts"].items():
        asked = f"{p['exact_answered']} of {p['exact_asked']}"
        lines.append(f"| {cell} | {p['dev']} | {p['test']} | {p['median_spans']:g} | {asked} |")
    for split, table in result["splits"].items():
        lines += ["", f"## Split {split} of 30", "", f"| score | {' | '.join(cells)} | all | 95 % |"]
        lines.append("|---" * (len(cells) + 3) + "|")
        for name, row in table["spans"].items():
            parts = [row[c] for c in (*cells, "all")]
            shown = [f"{p['whole_0.05'][0]}/{p['n']} ({p['median_rank']:g})" if p else "" for p in parts]
            low, high = row["all"]["whole_0.05"][1:]
            chosen = f" [{row['chosen'].replace(' | ', ', ')}]" if row["chosen"] else ""
            lines.append(f"| {name}{chosen} | {' | '.join(shown)} | {low:.2f}-{high:.2f} |")
        lines += [
            "",
            "Rows instead of sentences, all test prompts:",
            "",
            "| rows | whole needles | mean share held |",
        ]
        lines.append("|---|---|---|")
        for name, r in table["rows"].items():
            lines.append(f"| {name} | {r['whole']}/{r['n']} | {r['mean_share']:.2f} |")
    layers = result["by_layer"]
    lines += [
        "",
        "## By layer",
        "",
        f"Share of needles whose sentence has the largest peak of all, {layers['n'][0]} prompts, exact model.",
        "",
        "| layer | in it alone | in it and all below |",
        "|---|---|---|",
    ]
    pairs = zip(layers["alone"], layers["upto"], strict=True)
    lines += [f"| {i} | {alone:.2f} | {upto:.2f} |" for i, (alone, upto) in enumerate(pairs)]
    return "\n".join(lines) + "\n"
