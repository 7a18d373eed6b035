"""Haystack prompts: exact length, parts where they are said to be, and answers told as greedy decoding gives them."""

import dataclasses
import random
import re
from itertools import pairwise

import pytest
import torch

from ridgefill import embedded
from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import CorpusError, PromptError, SettingError
from ridgefill.eval import haystack
from ridgefill.eval.documents import digest
from ridgefill.eval.haystack import NOISE, SYNONYMS, Haystack, answered, prose, retrieved, ruler_score
from tests.tiny import tiny_model, tiny_tokenizer

SIZE = {"tokens": 1500, "tail": 400, "leading": 16}  # the tiny tokenizer has one token a byte
KINDS = [
    {},
    {"hay": "prose"},
    {"hay": "prose", "needles": "multikey"},
    {"needles": "multikey", "values": "words"},
    {"needles": "multivalue"},
    {"hay": "prose", "needles": "multiquery"},
    {"hay": "prose", "wording": "paraphrased"},
    {"needles": "multikey", "wording": "paraphrased", "values": "words"},
    {"values": "uuids", "question_first": True},
]


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ["river", "stone", "and", "the", "winter", "road", "stands", "under"]
    sentences = [" ".join(rng.choices(words, k=rng.randint(4, 9))).capitalize() + "." for _ in range(1200)]
    return [" ".join(sentences[:700]), " ".join(sentences[700:])]


def span_text(tokenizer, item, span):
    return tokenizer.decode(item.ids[0, span[0] : span[1]])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_lengths_are_exact_and_every_part_lies_where_it_is_said_to(texts, kind, chat):
    tokenizer = tiny_tokenizer(chat)
    hay = Haystack(**SIZE, **kind)
    for item in hay.items(tokenizer, 3, texts):
        assert item.ids.shape == (1, 1500)
        assert tokenizer.decode(item.ids[0]) == item.text
        n_needles = 1 if hay.needles == "single" else 4
        assert len(item.needles) == n_needles and list(item.needles) == sorted(set(item.needles))
        for (_, stop), (first, _) in pairwise(item.needles):
            assert first - stop > 10  # a sentence of the hay lies between any two
        for first, stop in item.needles:
            assert 16 <= first < stop <= 1100
            needle = span_text(tokenizer, item, (first, stop))
            assert re.fullmatch(rf"One of the special magic {hay.values} for [a-z -]+ is: [\w-]+\.", needle)
        assert (
            len(item.asked) == len(item.answers) == (4 if hay.needles in ("multivalue", "multiquery") else 1)
        )
        for span, answer in zip(item.asked, item.answers, strict=True):
            assert span in item.needles
            assert span_text(tokenizer, item, span).endswith(f"is: {answer}.")
            assert item.text.count(answer) == 1
        question = span_text(tokenizer, item, item.question)
        assert re.fullmatch(r"Wh[^?]+\?", question) and item.text.count(question) == 1
        assert (item.question[1] < item.needles[0][0]) == hay.question_first
        assert tokenizer.decode(item.answer_ids[0]) == f" {item.answers[0]}"


def test_the_question_asks_for_the_first_needle_in_rulers_words(texts):
    for item in Haystack(**SIZE, needles="multikey").items(tiny_tokenizer(), 3, texts):
        key = re.search(r"numbers for (\S+) is", span_text(tiny_tokenizer(), item, item.asked[0]))[1]
        about = f"special magic number for {key} mentioned in the provided text"
        assert span_text(tiny_tokenizer(), item, item.question) == f"What is the {about}?"
        assert item.text.endswith(f"The {about} is")
        assert item.text.count(key) == 3


def test_several_values_are_asked_for_at_once(texts):
    (item,) = Haystack(**SIZE, needles="multiquery").items(tiny_tokenizer(), 1, texts)
    keys = [re.search(r"for (\S+) is", span_text(tiny_tokenizer(), item, span))[1] for span in item.asked]
    assert len(set(keys)) == 4
    asked = f"{keys[0]}, {keys[1]}, {keys[2]}, and {keys[3]} mentioned in the provided text"
    assert item.text.endswith(f"The special magic numbers for {asked} are")
    (item,) = Haystack(**SIZE, needles="multivalue").items(tiny_tokenizer(), 1, texts)
    keys = {re.search(r"for (\S+) is", span_text(tiny_tokenizer(), item, span))[1] for span in item.asked}
    assert len(keys) == 1 and len(set(item.answers)) == 4


def test_noise_is_rulers_and_nothing_else(texts):
    (item,) = Haystack(**SIZE).items(tiny_tokenizer(), 1)
    start, stop = item.asked[0]
    body = item.text[item.text.index("The grass") : item.text.index("\nWhat is the special")]
    needle = item.text[start : stop + 1]  # one character a token
    assert needle.endswith(".\n")
    assert (NOISE * 20).startswith(body.replace(needle, ""))


def test_prose_is_the_given_text_and_needles_stand_between_its_sentences(texts):
    items = Haystack(**SIZE, hay="prose").items(tiny_tokenizer(), 2, texts)
    for item in items:
        start, stop = item.asked[0]
        assert re.search(r"(\. |\n)$", item.text[:start]) and re.match(r" [A-Z]", item.text[stop:])
        body = item.text[item.text.index("afterwards.\n") + 12 : item.text.index("\nWhat is")]
        hay = body.replace(item.text[start : stop + 1], "")
        assert any(hay in text for text in (*texts, "\n\n".join(texts), "\n\n".join(texts[::-1])))
    assert items[0].text[200:500] != items[1].text[200:500]


def test_depths_are_spread_over_the_rows_that_can_be_filled():
    items = Haystack(**SIZE).items(tiny_tokenizer(), 8)
    starts = [item.asked[0][0] for item in items]
    assert [item.depth for item in items] == [(i + 0.5) / 8 for i in range(8)]
    assert starts == sorted(starts)
    assert starts[0] < 350 and starts[-1] > 900


def test_the_seed_decides():
    make = lambda seed: Haystack(**SIZE, seed=seed).items(tiny_tokenizer(), 2)  # noqa: E731
    assert [i.text for i in make(1)] == [i.text for i in make(1)]
    assert not {i.answers for i in make(1)} & {i.answers for i in make(2)}
    assert make(1)[0].answers != make(1)[1].answers


@pytest.mark.parametrize("values", haystack.VALUES)
def test_a_paraphrased_question_shares_no_content_word_with_its_needle(values):
    common = {"the", "for", "is", "of", "with", "one"}
    words = lambda text: set(re.findall(r"[a-z]+", text.lower()))  # noqa: E731
    for item in Haystack(**SIZE, wording="paraphrased", values=values).items(tiny_tokenizer(), 6):
        needle, answer = span_text(tiny_tokenizer(), item, item.asked[0]), item.answers[0]
        asking = item.text[item.question[0] :]
        assert not words(needle.replace(answer, "")) & words(asking) - common
        key = re.search(r"for the (\w+) is", needle)[1]
        assert f"with the {dict(SYNONYMS)[key]}?" in asking


def test_synonyms_differ_and_none_is_used_twice():
    flat = [word for pair in SYNONYMS for word in pair]
    assert len(flat) == len(set(flat))
    assert not any(a in b or b in a for a, b in SYNONYMS)


@pytest.mark.parametrize("cached", [None, 1100, 1499])
def test_retrieved_is_what_greedy_decoding_starts_with(cached):
    model = tiny_model()
    (item,) = Haystack(**SIZE).items(tiny_tokenizer(), 1)
    out = model.generate(item.ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    greedy = dataclasses.replace(item, answer_ids=out[:, 1500:])

    def cache():
        if cached is None:
            return None
        found = new_cache(model)
        model(item.ids[:, :cached], **cache_kwarg(found))
        return found

    assert retrieved(model, greedy, cache())
    assert not retrieved(model, item, cache())
    for place in range(5):
        other = greedy.answer_ids.clone()
        other[0, place] = (other[0, place] + 1) % 256
        assert not retrieved(model, dataclasses.replace(greedy, answer_ids=other), cache())


def test_answered_reads_the_last_rows_of_any_logits():
    (item,) = Haystack(**SIZE).items(tiny_tokenizer(), 1)
    k = item.answer_ids.shape[1]
    logits = torch.zeros(1, k + 3, 320)
    logits[0, torch.arange(3, k + 3), item.answer_ids[0]] = 1.0
    assert answered(logits, item)
    assert not answered(logits[:, :-1], item)


def test_rulers_score_is_the_share_found():
    assert ruler_score("It is 12 and BIG-cat.", ["12", "big-CAT", "77", "78"]) == 0.5


def test_prose_leaves_out_what_maps_were_fitted_on(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("first speech \n")
    (tmp_path / "b.txt").write_text("second speech")
    (tmp_path / "held.txt").write_text("held out")
    apart = tmp_path / "speeches"
    apart.mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(apart / name)
    monkeypatch.setattr(embedded, "texts", lambda: {"speeches": apart})
    monkeypatch.setattr(embedded, "held_out", lambda: [tmp_path / "held.txt"] * 3 + [tmp_path / "a play"])
    assert prose() == ["held out"] * 3 + ["first speech", "second speech"]
    # the fit names a document by its text as read, blanks at its ends included
    assert prose({digest("first speech \n")}) == ["held out"] * 3 + ["second speech"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hay": "straw"}, "hay 'straw'"),
        ({"needles": "many"}, "needles 'many'"),
        ({"values": "dates"}, "values 'dates'"),
        ({"wording": "french"}, "wording 'french'"),
        ({"tokens": 500, "tail": 500}, "no row"),
        ({"tail": 0}, "tail"),
        ({"leading": -1}, "leading"),
        ({"wording": "paraphrased", "needles": "multivalue"}, "one value"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, named):
    with pytest.raises(SettingError, match=named):
        Haystack(**{**SIZE, **settings})


def test_what_cannot_be_made_is_refused_by_name(texts):
    with pytest.raises(CorpusError, match="more prose"):
        Haystack(**SIZE, hay="prose").items(tiny_tokenizer(), 1, ["Too short. And so it is."])
    with pytest.raises(CorpusError):
        Haystack(**SIZE, hay="prose").items(tiny_tokenizer(), 1)
    with pytest.raises(PromptError, match="do not fit"):
        Haystack(tokens=600, tail=300, needles="multikey").items(tiny_tokenizer(), 1)
    with pytest.raises(SettingError, match="offsets"):
        Haystack(**SIZE).items(object(), 1)


@pytest.mark.parametrize("place", [0, 1000])
def test_a_needle_outside_the_rows_that_can_be_filled_makes_no_prompt(monkeypatch, place):
    """Places are counted in tokens of the parts; should a tokenizer join them otherwise, the whole is checked."""
    monkeypatch.setattr(haystack._Draft, "_places", lambda self, tokenizer: [place])
    with pytest.raises(PromptError, match="do not fit"):
        Haystack(tokens=1500, tail=400, leading=400).items(tiny_tokenizer(), 1)


def test_what_cannot_be_answered_in_one_pass_is_refused_by_name():
    model = tiny_model()
    (item,) = Haystack(**SIZE, needles="multivalue").items(tiny_tokenizer(), 1)
    with pytest.raises(SettingError, match="ruler_score"):
        retrieved(model, item)
    (item,) = Haystack(**SIZE).items(tiny_tokenizer(), 1)
    cache = new_cache(model)
    model(item.ids, **cache_kwarg(cache))
    with pytest.raises(PromptError, match="without its tail"):
        retrieved(model, item, cache)
