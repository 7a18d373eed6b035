"""Word lists."""

import random
import sys
import types

import pytest

from ridgefill.errors import SettingError
from ridgefill.eval.ruler import words

SMALL = words.Library("small", ("red", "icy"), ("cat", "cup", "fan"), ("cat", "cup", "fan", "icy", "red"))


def test_keys_are_an_adjective_and_a_noun():
    keys = {SMALL.key(random.Random(i)) for i in range(60)}
    assert keys == {"red-cat", "red-cup", "red-fan", "icy-cat", "icy-cup", "icy-fan"}


def test_lists_take_longer_words_where_there_are_too_few_short_ones():
    for count, hyphens in ((5, 0), (6, 1), (7, 2), (18, 2)):
        drawn = SMALL.distinct(random.Random(0), count)
        assert len(set(drawn)) == count and {word.count("-") for word in drawn} == {hyphens}
    with pytest.raises(SettingError, match="18"):
        SMALL.distinct(random.Random(0), 19)


def test_own_words_are_named_so_and_make_a_list_for_128k_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)  # as if it were not installed
    words.library.cache_clear()
    library = words.library()
    words.library.cache_clear()
    assert library.name == "ridgefill"
    assert len(set(library.distinct(random.Random(0), 12_000))) == 12_000


def test_wonderwords_are_taken_where_they_are(monkeypatch):
    lists = {"nounlist.txt": ["cat", "fan"], "adjectivelist.txt": ["red"], "verblist.txt": ["fan", "go"]}
    module = types.ModuleType("wonderwords.random_word")
    module._get_words_from_text_file = lists.__getitem__
    monkeypatch.setitem(sys.modules, "wonderwords", types.ModuleType("wonderwords"))
    monkeypatch.setitem(sys.modules, "wonderwords.random_word", module)
    words.library.cache_clear()
    library = words.library()
    words.library.cache_clear()
    assert library == words.Library("wonderwords", ("red",), ("cat", "fan"), ("cat", "fan", "go", "red"))
