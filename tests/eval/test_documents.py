from __future__ import annotations

import hashlib
import json

import pytest
import torch

from ridgefill.errors import CorpusError
from ridgefill.eval.documents import digest, held_out_documents
from ridgefill.fit import fit
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def folder(tmp_path, name, letters, size=100):
    made = tmp_path / name
    made.mkdir()
    for letter in letters:
        (made / f"{letter}.txt").write_text(f"{letter}{'.' * (size - 2)}{letter}")
    return made


def read(tokenizer, documents):
    return [tokenizer.decode(ids[0]) for ids in documents]


def test_documents_have_the_length_asked_and_are_the_text(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(500)))
    (ids,) = held_out_documents(tokenizer, [path], 120, 5)
    assert ids.shape == (1, 120) and ids.dtype == torch.long
    assert read(tokenizer, [ids]) == [path.read_text()[:120]]


def test_no_more_than_asked_and_one_document_is_drawn_once(tokenizer, tmp_path):
    texts = folder(tmp_path, "t", "abcdef")
    assert len(held_out_documents(tokenizer, [texts], 50, 3)) == 3
    found = read(tokenizer, held_out_documents(tokenizer, [texts], 50, 99))
    assert sorted(text[0] for text in found) == list("abcdef")


def test_each_text_has_its_turn(tokenizer, tmp_path):
    texts = [folder(tmp_path, "one", "abcd"), folder(tmp_path, "two", "wxyz"), folder(tmp_path, "three", "m")]
    found = [text[0] for text in read(tokenizer, held_out_documents(tokenizer, texts, 50, 6))]
    assert [c in "abcd" for c in found] == [True, False, False, True, False, True]
    assert found[2] == "m" and set(found[1::3] + found[4:5]) <= set("wxyz")


def test_short_documents_are_joined_in_their_order_of_drawing(tokenizer, tmp_path):
    texts = folder(tmp_path, "t", "abcdefgh", size=20)
    (text,) = read(tokenizer, held_out_documents(tokenizer, [texts], 60, 1))
    pieces = text.split("\n\n")
    assert len(pieces) == 3 and all(len(piece) == 20 for piece in pieces[:2])
    assert len({piece[0] for piece in pieces}) == 3


def test_the_seed_decides_the_draw(tokenizer, tmp_path):
    texts = folder(tmp_path, "t", "abcdefghijkl")
    drawn = {
        seed: "".join(
            t[0] for t in read(tokenizer, held_out_documents(tokenizer, [texts], 50, 12, seed=seed))
        )
        for seed in (0, 1)
    }
    assert drawn[0] != drawn[1] and sorted(drawn[0]) == sorted(drawn[1])
    again = read(tokenizer, held_out_documents(tokenizer, [texts], 50, 12, seed=0))
    assert "".join(t[0] for t in again) == drawn[0]


def test_fitted_documents_are_left_out(tokenizer, tmp_path):
    texts = folder(tmp_path, "t", "abcd")
    fitted = {digest((texts / f"{letter}.txt").read_text()) for letter in "abd"}
    found = read(tokenizer, held_out_documents(tokenizer, [texts], 50, 9, fitted=fitted))
    assert [text[0] for text in found] == ["c"]
    fitted.add(digest((texts / "c.txt").read_text()))
    with pytest.raises(CorpusError, match="that the maps were not fitted on"):
        held_out_documents(tokenizer, [texts], 50, 9, fitted=fitted)


@pytest.mark.parametrize("template", [True, False])
def test_what_a_fit_names_as_fitted_is_left_out_plain_or_chat(tmp_path, template):
    """End to end with the fit's own record, which reads chats through the model's template."""
    tokenizer = tiny_tokenizer(chat=template)
    chats, plain = tmp_path / "chats.jsonl", tmp_path / "plain"
    chats.write_text(
        "\n".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"question {i}: " + "why so? " * 40},
                        {"role": "assistant", "content": f"answer {i}: " + "for this. " * 40},
                    ]
                }
            )
            for i in range(6)
        )
    )
    plain.mkdir()
    for i in range(6):
        (plain / f"{i}.txt").write_text(f"plain {i}: " + "and so on " * 40)
    maps = fit(
        tiny_model(), tokenizer, [chats, plain], [4], tmp_path / "o", tokens=9000, length=256, progress=False
    )
    fitted = maps[4].provenance["fitted_documents"]
    assert len(fitted) == 10  # one of each held out
    for texts in ([chats], [plain]):
        assert len(held_out_documents(tokenizer, texts, 150, 9)) == 6
        assert len(held_out_documents(tokenizer, texts, 150, 9, fitted=fitted)) == 1


def test_too_little_text_is_named_with_its_length(tokenizer, tmp_path):
    texts = folder(tmp_path, "t", "ab")
    with pytest.raises(
        CorpusError, match=r"a document of 999 tokens: the text has no such stretch\. Instead"
    ):
        held_out_documents(tokenizer, [texts], 999, 1)
    with pytest.raises(CorpusError, match="no such file"):
        held_out_documents(tokenizer, [tmp_path / "missing.txt"], 10, 1)


def test_a_digest_is_the_first_half_of_sha256():
    assert digest("déjà") == hashlib.sha256("déjà".encode()).hexdigest()[:16]
    assert digest("a") != digest("b")
    assert len(digest("\ud800")) == 16  # JSON may hold half of a surrogate pair
