from __future__ import annotations

import json
import sys

import pytest

from ridgefill.errors import CorpusError
from ridgefill.fit.corpus import _documents_of, read_sources
from ridgefill.fit.windows import Cutter, draw_windows, plan_windows
from tests.tiny import tiny_tokenizer

CHAT = [{"role": "user", "content": "Is it so? " * 20}, {"role": "assistant", "content": "Yes. " * 40}]


def cutter(length=256, shortest=80, chat_share=0.0, seed=0, chat=True):
    return Cutter(tiny_tokenizer(chat), length=length, shortest=shortest, chat_share=chat_share, seed=seed)


def write(folder, n, size=2000, start=0):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(start, start + n):
        words = f"file {i} says {i * 7919} and nothing else; "
        (folder / f"{i:03d}.txt").write_text((words * (size // len(words) + 1))[:size])
    return folder


def texts(sources):
    return [d.load() for s in sources for d in s.documents]


def test_plain_text_of_any_extension(tmp_path):
    (tmp_path / "notes.rst").write_bytes("\ufeffgrüße".encode())
    (source,) = read_sources([tmp_path / "notes.rst"])
    assert (source.name, source.kind, texts([source])) == ("notes.rst", "text", ["grüße"])


def test_jsonl_fields_and_offsets(tmp_path):
    lines = [{"text": "é one"}, {"content": "two"}, {"messages": CHAT}, {"text": "  "}, {"text": "last"}]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps(x, ensure_ascii=False) for x in lines[:2]) + "\n\r\n", encoding="utf-8"
    )
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(x) for x in lines[2:]))
    assert texts(read_sources([path])) == ["é one", "two", CHAT, "last"]


@pytest.mark.parametrize("line", ['{"text": ', '{"words": "x"}', "[1]", '{"text": 3}', '{"messages": ["x"]}'])
def test_bad_jsonl_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"a\.jsonl line 2"):
        read_sources([tmp_path / "a.jsonl"])


def test_folder_is_sorted_and_skips(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("z")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / "e.jsonl").write_text('{"text": "line"}')
    (source,) = read_sources([tmp_path])
    assert texts([source]) == ["a", "line", "z"]
    assert source.skipped == 2


@pytest.mark.parametrize(
    ("name", "data"), [("x.bin", b"PK\0\1"), ("latin.txt", b"caf\xe9"), ("empty.txt", b" \n")]
)
def test_unusable_file_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=name):
        read_sources([tmp_path / name])


def test_nothing_to_read(tmp_path):
    for given in ([], [tmp_path], [tmp_path / "missing.txt"], ["missing.md"], [""]):
        with pytest.raises(CorpusError):
            read_sources(given)


def test_dataset_name_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install ridgefill\[datasets\]"):
        read_sources(["owner/name"])


def test_dataset_rows_become_documents():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"text": "one", "id": 1}, {"text": "", "id": 2}, {"text": "two", "id": 3}]
    )
    assert [d.load() for d in _documents_of(rows, "owner/name")] == ["one", "two"]


def test_windows_are_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(1000)))
    (source,) = read_sources([tmp_path / "a.txt"])
    found = list(cutter().windows(source.documents[0], 0))
    assert [len(w.ids) for w in found] == [256, 256, 256, 232]
    tokenizer = tiny_tokenizer()
    assert "".join(tokenizer.decode(w.ids.tolist()) for w in found) == source.documents[0].load()


def test_a_long_document_is_cut_into_spans_without_loss(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 5000)
    (source,) = read_sources([tmp_path / "a.txt"])
    found = list(cutter(shortest=1).windows(source.documents[0], 0))
    assert sum(len(w.ids) for w in found) == 25000
    assert max(len(w.ids) for w in found) == 256


def test_round_robin_takes_few_windows_a_visit(tmp_path):
    sources = read_sources([write(tmp_path / "t", 3, size=256 * 10)])
    order = [w.document for w in draw_windows(sources, cutter(), 256 * 30)]
    runs = [order[i : i + 4] for i in range(0, 12, 4)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == 3
    assert len(order) == 30


def test_sources_share_equally_and_leftovers_are_used(tmp_path):
    many, few = write(tmp_path / "many", 20), write(tmp_path / "few", 1, start=50)
    used = [0, 0]
    for window in draw_windows(read_sources([many, few]), cutter(), 3000):
        used[window.source] += len(window.ids)
    assert sum(used) == pytest.approx(3000, abs=80)
    assert abs(used[0] - used[1]) <= 256
    used = [0, 0]
    for window in draw_windows(read_sources([many, few]), cutter(), 12000):
        used[window.source] += len(window.ids)
    assert used[1] > 1700
    assert sum(used) == pytest.approx(12000, abs=80)


def test_only_drawn_documents_are_read(tmp_path):
    sources = read_sources([write(tmp_path / "t", 30)])
    for path in sorted((tmp_path / "t").iterdir()):
        path.unlink()
    with pytest.raises(CorpusError, match="cannot be read"):
        list(draw_windows(sources, cutter(), 100))


def test_short_windows_are_dropped(tmp_path):
    write(tmp_path / "t", 1, size=256 + 79)
    assert [len(w.ids) for w in draw_windows(read_sources([tmp_path / "t"]), cutter(), 9999)] == [256]


def test_chat_share(tmp_path):
    sources = read_sources([write(tmp_path / "t", 100)])
    every = list(draw_windows(sources, cutter(chat_share=1.0), 20000))
    text = tiny_tokenizer().decode(every[0].ids.tolist())
    assert text.startswith("<|user|>\nfile")
    assert text.endswith("<|end|>\n<|assistant|>\n")
    assert max(len(w.ids) for w in every) <= 256
    some = list(draw_windows(sources, cutter(chat_share=0.25), 100000))
    assert 0.15 < sum(w.chat for w in some) / len(some) < 0.35
    assert not any(w.chat for w in draw_windows(sources, cutter(chat_share=1.0, chat=False), 20000))


def test_messages_are_rendered_and_not_wrapped_again(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    (window,) = draw_windows(read_sources([tmp_path / "a.jsonl"]), cutter(length=1024, chat_share=1.0), 2000)
    text = tiny_tokenizer().decode(window.ids.tolist())
    assert text == f"<|user|>\n{CHAT[0]['content']}<|end|>\n<|assistant|>\n{CHAT[1]['content']}<|end|>\n"


def test_every_window_starts_as_the_model_expects(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    cut = Cutter(tokenizer, length=256, shortest=80)
    found = list(draw_windows(read_sources([write(tmp_path / "t", 2)]), cut, 3000))
    assert len(found) > 8
    assert all(w.ids[0] == tokenizer.bos_token_id and w.ids[1] < 256 for w in found)
    assert max(len(w.ids) for w in found) == 256


def plan(paths, tokens=12000, holdout=0.1, width=64, seed=0, **kwargs):
    return plan_windows(
        read_sources(paths),
        cutter(seed=seed, **kwargs),
        tokens=tokens,
        holdout=holdout,
        leading=16,
        width=width,
    )


def test_held_out_documents_are_never_fitted(tmp_path):
    found = plan([write(tmp_path / "a", 20), write(tmp_path / "b", 10, start=100)])
    assert {w.source for w in found.heldout} == {0, 1}
    assert not {w.digest for w in found.fit} & {w.digest for w in found.heldout}
    assert len({w.digest for w in found.fit}) > 4
    assert sum(len(w.ids) for w in found.heldout) == pytest.approx(1200, abs=80)
    assert found.rows(16) == sum(len(w.ids) - 16 for w in found.fit)


def test_plan_depends_on_the_seed_alone(tmp_path):
    folder = write(tmp_path / "a", 20)
    assert plan([folder]).tokens_sha256 == plan([folder]).tokens_sha256
    assert plan([folder]).tokens_sha256 != plan([folder], seed=1).tokens_sha256


def test_one_document_is_parted(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i} " for i in range(4000)))
    found = plan([tmp_path / "a.txt"])
    numbers = [
        {int(n) for w in part for n in tiny_tokenizer().decode(w.ids.tolist()).split()[1:-1]}
        for part in (found.fit, found.heldout)
    ]
    assert max(numbers[0]) < min(numbers[1])


def test_short_documents_are_not_the_only_ones_held_out(tmp_path):
    folder = write(tmp_path / "a", 30, size=50)
    write(folder, 4, start=50)
    assert plan([folder], tokens=6000).heldout


def test_too_short_says_how_much_is_needed(tmp_path):
    with pytest.raises(CorpusError, match=r"gives \d+ rows to fit on, and 128 are the least.*name more text"):
        plan([write(tmp_path / "a", 2, size=100)])
    with pytest.raises(CorpusError, match=r"gives \d+ rows.*raise the token budget"):
        plan([write(tmp_path / "b", 20)], tokens=200)


def test_account_names_no_path(tmp_path):
    found = plan([write(tmp_path / "secret" / "a", 20)])
    assert found.sources[0]["name"] == "a"
    assert "secret" not in json.dumps(found.sources)
    assert found.sources[0]["fit"]["tokens"] == sum(len(w.ids) for w in found.fit)
