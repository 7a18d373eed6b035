from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ridgefill.errors import OutputError, SettingError
from ridgefill.eval import report_tables
from ridgefill.eval.evaluation import open_all
from ridgefill.eval.report import write_report
from tests.disk import small_files
from tests.eval.made_runs import losses, plan, scores, write

VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "line", "circle"}
NASTY = 'a <b>& "c" | `d` $e$ *f* [g](http://example.org)'


class Page(HTMLParser):
    """The text, the tags that stay open, and what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.words, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Loss at two splits and a needle task, below one folder."""
    tmp_path = tmp_path_factory.mktemp("study")
    arms = {
        "ridge 2": (plan(split=2), 0.4),
        "ridge 4": (plan(split=4), 0.6),
        "none": (plan("none", split=2), 0.38),
        NASTY: (plan("identity", split=4, rows="random(0.05)"), None),
    }
    base = [2.0 + i / 10 for i in range(12)]
    loss = {"exact": losses(base, novel_nll=base)}
    ruler = {"exact": scores([1] * 20)}
    for k, arm in enumerate(arms, 1):
        more = [v + 0.01 * k * (1 + i % 3) for i, v in enumerate(base)]
        loss[arm] = losses(more, novel_nll=more)
        ruler[arm] = scores([1] * (20 - 4 * k) + [0] * (4 * k))
    write(tmp_path / "deep" / "loss", "loss", arms, loss)
    write(tmp_path / "ruler", "ruler", arms, ruler)
    return tmp_path


@pytest.fixture(scope="module")
def pages(study):
    return write_report(study)


def tables_of(markdown):
    """Lists of consecutive lines that are table rows."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE)]


def test_the_page_is_whole_loads_nothing_and_names_every_arm(study, pages):
    page, markdown = pages
    assert (page, markdown) == (study / "report.html", study / "report.md")
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert all(load.startswith("#") for load in parsed.loads)
    assert not re.search(r"url\((?!#)|@import|<script|<link", text)
    words = "".join(parsed.words)
    assert all(arm in words for arm in ("exact", "ridge 2", "ridge 4", "none", NASTY))
    assert parsed.tags.count("svg") == 6 and "b" not in parsed.tags
    assert words.index("What it found") < words.index("What it cannot tell") < words.index("By document")


def test_markdown_tables_are_rectangular_and_its_pictures_exist(study, pages):
    text = pages[1].read_text()
    tables = tables_of(text)
    assert len(tables) > 8
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    places = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert len(places) == 6
    for place in places:
        assert (study / place).read_text().startswith("<svg")
    assert "[g](http" not in text


def test_the_same_numbers_make_the_same_bytes(study, pages):
    first = [path.read_bytes() for path in pages]
    assert [path.read_bytes() for path in write_report(study)] == first


def test_one_run_and_another_output(study):
    page, markdown = write_report(study / "ruler", study / "out" / "needles.html", title="Needles & more")
    assert page.name == "needles.html" and markdown.name == "needles.md"
    assert (study / "out" / "needles-pictures").is_dir()
    assert "<title>Needles &amp; more</title>" in page.read_text()
    assert "deep" not in page.read_text()


def test_an_unfinished_run_says_so(tmp_path):
    arms = {"ridge": (plan(), 0.6)}
    items = {"exact": losses([2.0] * 3), "ridge": losses([2.1])}
    settings = {"documents": [f"prose/{i}" for i in range(4)]}
    write(tmp_path, "loss", arms, items, settings, finish=False)
    text = write_report(tmp_path)[0].read_text()
    assert "Unfinished: of 4 items these arms miss some: exact 1, ridge 3" in text
    write(tmp_path / "empty", "loss", arms, {}, settings, finish=False)
    assert "No item has run yet." in write_report(tmp_path)[0].read_text()


def test_refusals(tmp_path):
    with pytest.raises(SettingError, match=r"no run\.json in it or below it"):
        write_report(tmp_path)
    with pytest.raises(SettingError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{}")
    with pytest.raises(SettingError, match="its format is None"):
        write_report(tmp_path)
    write(tmp_path / "good", "loss", {}, {"exact": losses([2.0])})
    assert "A run was left out. read the run in" in write_report(tmp_path)[0].read_text()
    (tmp_path / "good" / "summary.json").write_text("{")
    with pytest.raises(SettingError, match="its summary is not JSON"):
        write_report(tmp_path / "good")


def test_worst_documents_stand_below_the_mean_and_the_median(tmp_path):
    base = [2.0] * 12
    worse = [2.0 + (i / 10 if i < 11 else 3.3) for i in range(12)]
    write(tmp_path, "loss", {"ridge": (plan(), 0.6)}, {"exact": losses(base), "ridge": losses(worse)})
    (run,), _ = open_all(tmp_path)
    table = report_tables.by_document(run, "nll")
    assert table.rows[0] == ["mean", "", "+0.733"] and table.rows[1] == ["median", "", "+0.550"]
    assert table.rows[2] == ["prose/11", "prose", "+3.300"] and table.rows[3][0] == "prose/10"
    assert len(table.rows) == 2 + report_tables.WORST


def test_needles_by_length_and_depth(study):
    (run,), _ = open_all(study / "ruler")
    lengths, depths = report_tables.by_length(run), report_tables.by_depth(run)
    assert lengths.head == ("arm", "1,024", "2,048")
    assert depths.head == ("arm", "0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")
    row = next(row for row in lengths.rows if row[0] == "none")  # right on the first 8 of 20
    assert row[1:] == ["40.0 % (n 10)", "40.0 % (n 10)"]
    row = next(row for row in depths.rows if row[0] == "none")  # items 0..7: depth bin i % 5
    assert row[1:] == ["50.0 % (n 4)", "50.0 % (n 4)", "50.0 % (n 4)", "25.0 % (n 4)", "25.0 % (n 4)"]
    assert depths.shades[3, 4] == 0.25


def test_many_lengths_are_rounded_up_to_powers_of_two(tmp_path):
    items = {f"a/{i}": ("a", {"score": 1.0}, {"length": 1000 + 10 * i}) for i in range(10)}
    write(tmp_path, "longbench", {"ridge": (plan(), 0.6)}, {"exact": items, "ridge": items})
    (run,), _ = open_all(tmp_path)
    table = report_tables.by_length(run)
    assert table.head == ("arm", "1,024", "2,048") and "rounded up" in table.caption
    assert table.rows[0] == ["exact", "100.0 % (n 3)", "100.0 % (n 7)"]


def test_a_full_disk_leaves_no_half_page(study):
    with small_files(2048), pytest.raises(OutputError):
        write_report(study, study / "full")
    assert [path for path in (study / "full").rglob("*") if path.is_file()] == []
