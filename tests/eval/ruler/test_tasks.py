"""The 13 tasks: official names, parameters and budgets, and prompts in the official words."""

import random
import re
from itertools import pairwise

import pytest

from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.ruler.niah import NEEDLE, NOISE
from ridgefill.eval.ruler.tasks import TASKS, Material, choose, draft
from ridgefill.eval.ruler.words import library

ESSAY = ("The winter road stands under stone. A slow river runs there. " * 40).split()
MATERIAL = Material(library(), ESSAY)
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORD, NUMBER = r"[a-z]+-[a-z]+", r"\d{7}"
# haystack, key, value, needles planted, values asked for: scripts/synthetic.yaml
NIAH = {
    "niah_single_1": ("noise", WORD, NUMBER, 1, 1),
    "niah_single_2": ("essay", WORD, NUMBER, 1, 1),
    "niah_single_3": ("essay", WORD, UUID, 1, 1),
    "niah_multikey_1": ("essay", WORD, NUMBER, 4, 1),
    "niah_multikey_2": ("needle", WORD, NUMBER, 1, 1),
    "niah_multikey_3": ("needle", UUID, UUID, 1, 1),
    "niah_multivalue": ("essay", WORD, NUMBER, 4, 4),
    "niah_multiquery": ("essay", WORD, NUMBER, 4, 4),
}


def make(name, size, seed=0, wanted=4096):
    count = lambda text: len(text.split())  # noqa: E731
    return draft(TASKS[name], random.Random(seed), 0, wanted, wanted, MATERIAL, count).render(size)


def test_names_and_budgets_are_the_official_ones():
    assert list(TASKS) == [*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2"]
    budgets = [task.budget for task in TASKS.values()]
    assert budgets == [128] * 8 + [30, 120, 50, 32, 32]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NIAH)
def test_needle_prompts_have_the_official_form(name, seed):
    haystack, key, value, planted, asked = NIAH[name]
    prompt = make(name, 60, seed)
    kind = "uuid" if value == UUID else "number"
    one = asked == 1
    intro, context = prompt.input.split("\n", 1)
    context, question = context.rsplit("\n", 1)
    assert intro == (
        f"{'A' if one else 'Some'} special magic {kind}{'' if one else 's'} {'is' if one else 'are'} hidden "
        f"within the following text. Make sure to memorize it. I will quiz you about the "
        f"{kind}{'' if one else 's'} afterwards."
    )
    about = question.removesuffix(" mentioned in the provided text?")
    start = f"What {'is' if one else 'are all'} the special magic {kind}{'' if one else 's'} for "
    assert about.startswith(start)
    queried = about.removeprefix(start)
    keys = re.fullmatch(
        rf"({key})" if name != "niah_multiquery" else rf"({key}), ({key}), ({key}), and ({key})", queried
    )
    assert prompt.answer_prefix == (
        f" The special magic {kind}{'' if one else 's'} for {queried} mentioned in the provided text "
        f"{'is' if one else 'are'}"
    )
    found = dict.fromkeys(keys.groups(), ())
    for k, v in re.findall(rf"One of the special magic {kind}s for ({key}) is: ({value})\.", context):
        found[k] = (*found.get(k, ()), v)
    assert len(prompt.outputs) == asked == len(set(prompt.outputs))
    assert {v for k in keys.groups() for v in found[k]} == set(prompt.outputs)
    total = sum(len(v) for v in found.values())
    assert total == (61 if haystack == "needle" else planted)
    if name == "niah_multiquery":
        assert tuple(found[k][0] for k in keys.groups()) == prompt.outputs


@pytest.mark.parametrize("name", NIAH)
def test_haystacks_are_what_they_are_called(name):
    haystack, key, value, planted, _ = NIAH[name]
    prompt = make(name, 60)
    context = prompt.input.split("\n", 1)[1].rsplit("\n", 1)[0]
    if haystack == "essay":
        hay = re.sub(rf"One of the special magic \w+ for {key} is: {value}\. ?", "", context).strip()
        assert hay == " ".join(ESSAY[:60])
        for before, after in re.findall(r"(\S+) One of .*? is: \S+( \S|$)", context):
            assert before[-1] == "." and after.strip() in ("", "T", "A", "O")  # between sentences
        return
    lines = context.split("\n")
    assert len(lines) == 60 + planted
    if haystack == "noise":
        assert lines.count(NOISE) == 60
        assert NOISE == (
            "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        )
    else:
        pattern = NEEDLE.format(kind=r"\w+", key=f"({key})", value=value).replace(".", r"\.")
        keys = [re.fullmatch(pattern.replace(r"\.\d", ".d"), line)[1] for line in lines]
        asked = re.search(rf"for ({key}) mentioned", prompt.answer_prefix)[1]
        assert keys.count(asked) == 1  # the question has one answer


def test_needles_lie_at_different_places_and_sizes_keep_the_draws():
    places = {make("niah_single_1", 60, seed).input.index("One of") for seed in range(8)}
    assert len(places) > 5
    assert make("niah_multiquery", 30).outputs == make("niah_multiquery", 60).outputs
    assert make("niah_multiquery", 60).input == make("niah_multiquery", 60).input


def test_an_essay_that_is_too_short_is_repeated():
    prompt = make("niah_single_2", 1000)
    assert prompt.input.count("winter road") == 91  # of 11 words each: 90 whole ones, and one of 10 words


def test_variable_tracking_has_the_official_form():
    prompt = make("vt", 12)
    example, problem = prompt.input.split("\n\nMemorize")
    template = (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*)\n"
        r"Question: Find all variables that are assigned the value (\d{5}) in the text above\."
    )
    prefix = (
        r" Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are "
        r"assigned the value (\d{5}), they are: "
    )
    shown = re.fullmatch(template + prefix + r" ((?:[A-Z]{3} ?){5})", example, re.S)
    assert shown and shown[2] == shown[3]
    assert chain_of(shown[1], shown[2], shown[4].split())
    asked = re.fullmatch(template, "Memorize" + problem, re.S)
    assert chain_of(asked[1], asked[2], list(prompt.outputs), noise=12)
    assert re.fullmatch(prefix, prompt.answer_prefix)[1] == asked[2] != shown[2]
    assert all(re.fullmatch("[A-Z]{5}", name) for name in prompt.outputs)


def chain_of(context, value, names, noise=None):
    lines = context.split("\n")
    steps = [line for line in lines if line != NOISE]
    expected = [f"VAR {names[0]} = {value}"]
    expected += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
    assert noise is None or lines.count(NOISE) == noise
    return steps == expected and len(set(names)) == 5


@pytest.mark.parametrize(
    ("wanted", "repeats", "example"), [(4096, (30, 3), (40, 10, 3)), (2048, (6, 1), (20, 3, 1))]
)
def test_common_words_have_the_official_form_and_counts(wanted, repeats, example):
    prompt = make("cwe", 70, wanted=wanted)
    template = (
        r"Below is a numbered list of words\. In these words, some appear more often than others\. Memorize the "
        r"ones that appear most often\.\n(.*?)\nQuestion: What are the 10 most common words in the above list\?"
    )
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    assert prompt.answer_prefix == prefix
    match = re.fullmatch(template + re.escape(prefix) + r" (.*)\n" + template, prompt.input)
    check_list(match[3], list(prompt.outputs), 70, *repeats)
    check_list(match[1], numbered(match[2]), *example)


def numbered(text):
    words = re.findall(r"\d+\. (\S+)", text)
    assert text == " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return words


def check_list(text, common, different, often, seldom):
    words = numbered(text)
    assert len(common) == 10 and len(set(words)) == different
    assert {words.count(word) for word in common} == {often}
    assert {words.count(word) for word in set(words) - set(common)} == {seldom}
    assert words[:10] != common


def test_frequent_words_have_the_official_form_and_counts():
    prompt = make("fwe", 500, wanted=5000)
    match = re.fullmatch(
        r"Read the following coded text and track the frequency of each coded word\. Find the three most "
        r"frequently appeared coded words\. (.*)\nQuestion: Do not provide any explanation\. Please ignore the "
        r"dots '\.\.\.\.'\. What are the three most frequently appeared words in the above coded text\?",
        prompt.input,
    )
    assert prompt.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    words = match[1].split(" ")
    # 500 * rank^-2 / zeta(2): 303.96, 75.99, 33.77, 18.99, 12.16 words
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert [words.count(word) for word in ranked[:5]] == [303, 75, 33, 18, 12]
    assert ranked[0] == "..." and tuple(ranked[1:4]) == prompt.outputs
    assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])


@pytest.mark.parametrize(
    ("name", "needed"), [("niah_single_2", "essays="), ("qa_1", "squad="), ("qa_2", "hotpotqa=")]
)
def test_what_is_missing_is_named(name, needed):
    with pytest.raises(CorpusError, match=needed):
        choose(["vt", name], Material(library()))


def test_without_names_all_that_can_be_made_are_taken():
    made = [task.name for task in choose(None, Material(library()))]
    assert made == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert len(choose(None, MATERIAL)) == 11
    with pytest.raises(SettingError, match="niah_single_9"):
        choose(["niah_single_9"], MATERIAL)
