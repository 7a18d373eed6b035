"""Questions over documents, from data sets of the user's."""

import json
import random

import pytest

from ridgefill.errors import CorpusError
from ridgefill.eval.ruler import qa


def squad(tmp_path, **more):
    paragraphs = [
        {
            "context": f"Town {t} paragraph {p} {{braces}}.",
            "qas": [
                {
                    "question": f"Who rules {t}{p}?",
                    "answers": [{"text": f"Mayor {t}{p}"}, {"text": "the mayor"}],
                    **more,
                },
                {"question": "?", "answers": [], "is_impossible": True},
            ],
        }
        for t in "AB"
        for p in range(3)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs[:3]}, {"paragraphs": paragraphs[3:]}]}))
    return path


def hotpot(tmp_path):
    entries = [
        {
            "question": f"Which {i}?",
            "answer": f"yes{i}",
            "context": [[f"T{i}{j}", [f"One {i}{j}.", " Two."]] for j in range(3)],
            "supporting_facts": [[f"T{i}1", 0], [f"T{i}2", 1]],
        }
        for i in range(4)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(entries))
    return path


def documents(prompt):
    context = prompt.input.split("given documents.\n\n")[1].split("\n\nAnswer the")[0]
    parts = context.split("\n\n")
    assert [part.split(":\n")[0] for part in parts] == [f"Document {i + 1}" for i in range(len(parts))]
    return [part.split(":\n", 1)[1] for part in parts]


def test_squad_prompts_have_the_official_form(tmp_path):
    bank = qa.read_squad(squad(tmp_path))
    assert len(bank.questions) == 6 and len(bank.documents) == 6
    prompt = qa.draft(random.Random(0), bank, 4).render(2)
    ask = "Answer the question based on the given documents. "
    ask += "Only give me the answer and do not output any other words."
    assert prompt.input.startswith(f"{ask}\n\nThe following are given documents.\n\nDocument 1:\nTown ")
    assert prompt.input.endswith(f"\n\n{ask}\n\nQuestion: Who rules B1?")
    assert prompt.answer_prefix == " Answer:" and prompt.outputs == ("Mayor B1", "the mayor")
    ((first, stop),) = prompt.gold
    assert prompt.input[first:stop].endswith("Town B paragraph 1 {braces}.")
    assert prompt.input[first:stop].startswith("Document ")


def test_the_articles_own_documents_come_first_and_all_are_repeated_at_need(tmp_path):
    bank = qa.read_squad(squad(tmp_path))
    for seed in range(5):
        make = qa.draft(random.Random(seed), bank, 4)
        three = documents(make.render(3))
        assert sorted(three) == [f"Town B paragraph {p} {{braces}}." for p in range(3)]
        assert sorted(documents(make.render(6))) == list(bank.documents)
        assert set(documents(make.render(9))) == set(bank.documents)
    orders = {tuple(documents(qa.draft(random.Random(s), bank, 4).render(3))) for s in range(9)}
    assert len(orders) > 3


def test_hotpotqa_keeps_all_of_a_questions_documents_and_knows_the_gold_ones(tmp_path):
    bank = qa.read_hotpotqa(hotpot(tmp_path))
    draft = qa.draft(random.Random(0), bank, 2)
    prompt = draft.render(5)
    assert draft.least == 3 and prompt.outputs == ("yes2",)
    assert {"T20\nOne 20. Two.", "T21\nOne 21. Two.", "T22\nOne 22. Two."} < set(documents(prompt))
    gold = sorted(prompt.input[a:b].split("\n", 1)[1] for a, b in prompt.gold)
    assert gold == ["T21\nOne 21. Two.", "T22\nOne 22. Two."]


def test_version_1_files_without_is_impossible_are_read(tmp_path):
    assert qa.read_squad(squad(tmp_path)).questions[0].query == "Who rules A0?"


@pytest.mark.parametrize("read", [qa.read_squad, qa.read_hotpotqa])
@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("{", "not JSON"), ('{"a": 1}', "form"), ("[3]", "form")]
)
def test_other_files_are_refused_by_name(tmp_path, read, text, why):
    path = tmp_path / f"{read.__name__}{abs(hash(text))}.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CorpusError, match=why):
        read(path)


def test_too_many_questions_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="it has 6"):
        qa.draft(random.Random(0), qa.read_squad(squad(tmp_path)), 6)
