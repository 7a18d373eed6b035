from __future__ import annotations

import re
import subprocess
import sys

import pytest

import ridgefill.rows
from ridgefill.errors import SettingError
from ridgefill.rows import (
    SCORES,
    SELECTORS,
    AttentionRows,
    AttentionScore,
    Combined,
    DigitRows,
    LeadingRows,
    LexicalRows,
    LongerTail,
    OverlapScore,
    PooledAttentionRows,
    ProbeRows,
    ProbeScore,
    ProtectedRows,
    RandomRows,
    SpanRows,
    SpecialRows,
    parse_rows,
)

READ = {
    "attention": AttentionRows(),
    "attention(0.2)": AttentionRows(0.2),
    "attention(12, window=8, layers=(3, 7), hidden=True)": AttentionRows(12, 8, (3, 7), True),
    "attention(layers=(3,))": AttentionRows(layers=(3,)),
    "leading(4)": LeadingRows(4),
    "tail(0.3)": LongerTail(0.3),
    "snapkv": PooledAttentionRows(),
    "snapkv(12, window=8, kernel=5, pool=avg, layer=3)": PooledAttentionRows(12, 8, 5, "avg", 3),
    "random(0.2, seed=7)": RandomRows(0.2, 7),
    "random(seed=7)": RandomRows(seed=7),
    "special": SpecialRows(),
    "protected(0.5)": ProtectedRows(0.5),
    "digits": DigitRows(),
    "probe": ProbeRows(),
    "probe(0.1, queries=64)": ProbeRows(0.1, 64),
    "probe(factor=1.5, within=lexical(run=3) | digits)": ProbeRows(
        factor=1.5, within=LexicalRows(run=3) | DigitRows()
    ),
    "lexical(cap=0.1)": LexicalRows(cap=0.1),
    "spans(attention)": SpanRows(AttentionScore()),
    "spans(overlap(hidden=True), budget=0.1, spans=16, pool=mean)": SpanRows(
        OverlapScore(hidden=True), 0.1, 16, "mean"
    ),
    "spans(z(overlap + attention(heads=max)), spans=lines)": SpanRows(
        Combined((OverlapScore(), AttentionScore(heads="max"))), spans="lines"
    ),
    "spans(rank(0.5*overlap + probe))": SpanRows(Combined((OverlapScore(), ProbeScore()), (0.5, 1), "rank")),
    "spans(z(overlap + -2*rank(probe + attention)))": SpanRows(
        Combined((OverlapScore(), Combined((ProbeScore(), AttentionScore()), (), "rank")), (1, -2))
    ),
    "probe(within=lexical) | special | attention(0.05)": ProbeRows(within=LexicalRows())
    | SpecialRows()
    | AttentionRows(0.05),
}


@pytest.mark.parametrize("text", READ)
def test_written_and_read_back(text):
    assert parse_rows(text) == READ[text]
    assert str(READ[text]) == text
    assert parse_rows(str(parse_rows(text))) == READ[text]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (" attention( 0.10 )|special ", "attention | special"),
        ("random(0.2, 7)", "random(0.2, seed=7)"),
        ("probe(27b)", "probe"),
        ("probe('27b', 256)", "probe"),
        ("spans(overlap+attention, 0.05, spans=lines)", "spans(z(overlap + attention), spans=lines)"),
        ("spans(score=2*overlap)", "spans(z(2*overlap))"),
        ("attention(hidden=true, layers=[3, 7])", "attention(layers=(3, 7), hidden=True)"),
        ("attention(layers=none) | (digits | special)", "attention | digits | special"),
        ("probe(within=none)", "probe"),
        ("probe(within=None)", "probe"),
    ],
)
def test_other_ways_to_write_it(text, same):
    assert str(parse_rows(text)) == same


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("atention", "no rows called 'atention'.*attention, digits, leading"),
        ("overlap", "no rows called 'overlap'"),
        ("spans(digits)", "no scores called 'digits'.*attention, overlap, peak, probe"),
        ("attention(0.1, windw=3)", r"windw.*attention\(budget=0.1, window=64"),
        ("attention(1, 2, None, True, 5)", "too many positional"),
        ("attention(0.1, budget=0.2)", "multiple values"),
        ("attention(1.5)", "between 0 and 1"),
        ("attention(lots)", "between 0 and 1"),
        ("attention(window=x)", "it is a count"),
        ("attention(*[1])", "stars"),
        ("attention(**{'budget': 1})", "stars"),
        ("attention(1 + 1)", "no number"),
        ("attention(__import__('os'))", "no number"),
        ("os.system", "no rows called 'os.system'"),
        ("(lambda: 1)()", "no rows called"),
        ("3", "no rows called '3'"),
        ("special()()", "no rows called"),
        ("attention & special", "no rows called"),
        ("spans(overlap * 2)", "no number"),
        ("spans(z(overlap, probe))", "one sum"),
        ("spans(overlap, spans=words)", "auto, sentences, lines"),
        ("probe(9b)", "cannot be read"),
        ("", "cannot be read"),
        ("attention(", "cannot be read"),
        ("attention\0", "cannot be read"),
        ("\ud800", "cannot be read"),
        ("(" * 5000 + ")" * 5000, "cannot be read"),
        ("special" + " | special" * 30_000, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text, says):
    with pytest.raises(SettingError) as refused:
        parse_rows(text)
    assert re.search(says, str(refused.value), re.DOTALL), str(refused.value)


def test_every_name_leads_to_its_class():
    for name, cls in (SELECTORS | SCORES).items():
        found = getattr(ridgefill.rows, cls)
        assert found.__name__ == cls
        assert str(found(OverlapScore()) if name == "spans" else found()).split("(")[0] == (
            "probe" if cls == "ProbeScore" else name
        )
    assert set(ridgefill.rows.__all__) == {*ridgefill.rows._HOME, "SELECTORS", "SCORES"}
    with pytest.raises(AttributeError):
        _ = ridgefill.rows.Nothing


def test_naming_rows_does_not_wait_for_torch():
    code = "import sys, ridgefill.rows as r; assert len(r.SELECTORS) == 11; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
