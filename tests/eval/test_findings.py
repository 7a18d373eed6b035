from __future__ import annotations

import pytest

from ridgefill.eval.evaluation import Evaluation
from ridgefill.eval.findings import find, find_across
from ridgefill.eval.limits import limits, limits_across, needed
from tests.eval.made_runs import losses, plan, scores, write

RIDGE = {"ridge": (plan(), 0.6)}


def opened(folder):
    return Evaluation.open(folder, folder)


def one(texts, *words):
    """The only text that holds all the words."""
    texts = [str(text) for text in texts]
    found = [text for text in texts if all(word in text for word in words)]
    assert len(found) == 1, (words, texts)
    return found[0]


def test_retrieval_is_sorted_into_kept_undecided_and_lost(tmp_path):
    arms = {
        name: (plan(fill), 0.6)
        for name, fill in (("ridge", "ridge"), ("identity", "identity"), ("none", "none"))
    }
    items = {
        "exact": scores([1] * 200),
        "ridge": scores([1] * 200),
        "identity": scores([1] * 198 + [0] * 2),
        "none": scores([1] * 50 + [0] * 150),
    }
    found = find(opened(write(tmp_path, "ruler", arms, items)))
    kept = one(found, "Non-inferior")
    # floor of 200 items: 100 * (1 - 0.05 ** (1 / 200)) = 1.487
    assert "exact's 100.0 % in RULER score from filled rows" in kept
    assert "margin of 2.0 points (200 items)" in kept
    assert "ridge 100.0 % (+0.0 [+0.0, +0.0], at worst -1.5)" in kept and "identity" not in kept
    lost = one(found, "Worse than")
    assert "none 25.0 % (-75.0 [" in lost and "ridge" not in lost
    assert "identity 99.0 % (-1.0" in one(found, "Not told from", "margin of 2.0 points is not shown")


def test_losses_are_sorted_by_what_their_intervals_say(tmp_path):
    base = [3.0, 3.1, 2.9, 3.2, 3.0, 2.8, 3.1, 3.3, 2.7, 3.0]
    up = [v + 0.2 + 0.01 * i for i, v in enumerate(base)]
    mixed = [v + (0.1 if i % 2 else -0.1) for i, v in enumerate(base)]
    down = [v - 0.1 - 0.01 * i for i, v in enumerate(base)]
    arms = {name: (plan(), 0.6) for name in ("worse", "even", "split verdict", "less")}
    items = {
        "exact": losses(base, novel_nll=base, key_nll=base),
        "worse": losses(up, novel_nll=up, key_nll=up),
        "even": losses(mixed, novel_nll=mixed, key_nll=mixed),
        "split verdict": losses(up, novel_nll=up, key_nll=mixed),
        "less": losses(down, novel_nll=down, key_nll=down),
    }
    found = find(opened(write(tmp_path, "loss", arms, items)))
    what = "Nats above exact's on novel tokens / key tokens, "
    assert "worse: +0.245 [" in one(found, what + "intervals above 0: worse than exact: ")
    assert "even: +0.000 [" in one(found, what + "intervals hold 0: not told from exact: ")
    assert "less: -0.145 [" in one(found, what + "intervals below 0: better than exact: ")
    one(found, what + "novel tokens worse than exact, key tokens not told from it: split verdict: +0.245 [")
    cheapest = [text.parts[0].split(":")[0] for text in found if text.text.startswith(what)]
    assert cheapest[:2] == ["less", "even"]


def test_a_mean_that_few_documents_make_names_them(tmp_path):
    base = [2.0] * 10
    heavy = [2.001] * 8 + [4.0, 3.0]
    even = [2.1] * 10
    arms = {"heavy": (plan(), 0.6), "even": (plan(), 0.6)}
    items = {"exact": losses(base), "heavy": losses(heavy), "even": losses(even)}
    found = find(opened(write(tmp_path, "loss", arms, items)))
    text = one(found, "make the mean")
    assert "heavy: loss +0.301 nats in the mean, +0.001 in the median" in text and "even" not in text
    assert "1 of 10 carry half of it: prose/8 (+2.000)." in text


def test_what_mean_loss_hides_within_a_run_and_across_runs(tmp_path):
    base, small = [2.0, 2.1, 2.2, 2.3, 2.4], [2.02, 2.13, 2.21, 2.34, 2.42]
    key = [v + 1.5 + v / 10 for v in base]
    arms = RIDGE | {"identity": (plan("identity"), 0.5)}
    loss = {
        "exact": losses(base, key_nll=base),
        "ridge": losses(small, key_nll=key),
        "identity": losses([v + 0.9 for v in base], key_nll=key),
    }
    ruler = {"exact": scores([1] * 20), "ridge": scores([0] * 15 + [1] * 5), "identity": scores([0] * 20)}
    runs = [
        opened(write(tmp_path / "loss", "loss", arms, loss)),
        opened(write(tmp_path / "ruler", "ruler", arms, ruler)),
    ]
    text = one(find(runs[0]), "Mean loss hides")
    assert "ridge: +0.024 [" in text and "on key tokens" in text and "identity" not in text
    text = one(find_across(runs), "Mean loss (loss) hides what these arms do to tiny's RULER score")
    assert "ridge: +0.024 [" in text and "yet 25.0 % against exact's 100.0 %" in text
    assert "identity" not in text  # its loss shows what it does
    other = opened(
        write(tmp_path / "other", "ruler", {"ridge": (plan(split=2), 0.4)}, ruler | {"identity": {}})
    )
    assert find_across([runs[0], other]) == []  # of another split: not the same arm


def test_the_first_scored_tokens_beside_the_last(tmp_path):
    base = [2.0] * 6
    first, last = [2.5] * 6, [2.2] * 6
    items = {
        "exact": losses(base, nll_first=base, nll_last=base),
        "ridge": losses(last, nll_first=first, nll_last=last),
        "late": losses(last, nll_first=last, nll_last=first),
    }
    arms = RIDGE | {"late": (plan(), 0.6)}
    found = find(opened(write(tmp_path, "loss", arms, items, {"scored": 512})))
    text = one(found, "lose more than the last")
    assert "first 512 tokens" in text and "ridge: +0.500 against +0.200 nats, 2.5 times" in text
    assert "late" not in text


@pytest.mark.parametrize(
    ("chosen", "random", "longer", "expected"),
    [
        (
            [1] * 20,
            [0] * 20,
            [0] * 20,
            ("counts: chosen does better than random rows at equal compute (random)",),
        ),
        ([1] * 20, [1] * 20, [0] * 20, ("chosen cannot be told from random rows at equal compute (random)",)),
        ([0] * 20, [0] * 20, [1] * 20, ("chosen does worse than a longer tail at equal compute (longer)",)),
    ],
)
def test_chosen_rows_beside_their_controls(tmp_path, chosen, random, longer, expected):
    arms = {
        "chosen": (plan(rows="spans(peak, 0.05)"), 0.61),
        "random": (plan(rows="random(0.05)"), 0.61),
        "longer": (plan(tail=260), 0.62),
        "much longer": (plan(tail=2000), 0.9),
        "other split": (plan(split=2, rows="random(0.05)"), 0.61),
    }
    items = {
        "exact": scores([1] * 20),
        "chosen": scores(chosen),
        "random": scores(random),
        "longer": scores(longer),
    }
    items |= {"much longer": scores([1] * 20), "other split": scores([1] * 20)}
    found = find(opened(write(tmp_path, "ruler", arms, items)))
    for words in expected:
        one(found, words)
    text = [str(t) for t in found if "equal compute" in str(t)]
    assert len(text) == 2 and not any("much" in t or "other" in t for t in text)


def test_a_selector_with_lower_loss_is_the_better_one(tmp_path):
    arms = {"chosen": (plan(rows="attention(0.1)"), None), "random": (plan(rows="random(0.1)"), None)}
    items = {"exact": losses([2.0] * 8), "chosen": losses([2.1] * 8), "random": losses([2.5] * 8)}
    text = one(find(opened(write(tmp_path, "loss", arms, items))), "random rows")
    assert "chosen does better than random rows (compute not compared)" in text
    assert "2.100 against 2.500 nats (-0.400" in text and "better on 8, worse on 0 of 8 items" in text


def test_too_few_items_for_the_margin(tmp_path):
    assert needed(2.0) == 149 and needed(3.0) == 99  # 100 * (1 - 0.05 ** (1 / 149)) = 1.99
    items = {"exact": scores([1] * 40), "ridge": scores([1] * 40)}
    run = opened(write(tmp_path, "ruler", RIDGE, items))
    text = one(limits(run), "binomial floor")
    assert "40 items cannot show non-inferiority at a margin of 2.0 points" in text
    assert "7.2 points" in text and "149 would be needed" in text
    assert not any("Non-inferior" in str(t) for t in find(run))
    enough = {"exact": scores([1] * 149), "ridge": scores([1] * 149)}
    assert not any("floor" in t for t in limits(opened(write(tmp_path / "more", "ruler", RIDGE, enough))))


def test_limits_of_needles_in_exact_rows_and_of_a_model_that_cannot(tmp_path):
    items = {"exact": scores([0] * 19 + [1], filled=False), "ridge": scores([0] * 20, filled=False)}
    found = limits(opened(write(tmp_path, "ruler", RIDGE, items)))
    one(found, "No item has its needles in filled rows")
    assert "exact itself scores 5.0 %" in one(found, "hardly does this task")


def test_longbench_says_for_each_arm_which_prompts_it_filled(tmp_path):
    items = {
        "exact": scores([1] * 6, False, fact="fills") | scores([1] * 4, False, "short", "fills"),
        "ridge": scores([1] * 6, fact="fills") | scores([0] * 4, False, "short", "fills"),
    }
    run = opened(write(tmp_path, "longbench", RIDGE, items))
    one(limits(run), "ridge filled no row of 4 of 10 prompts")
    assert not any("says nothing" in text or "exact rows" in text for text in limits(run))
    assert "ridge 60.0 % (-40.0 [" in one(
        find(run), "exact's 100.0 % in LongBench score, the interval below 0"
    )


def test_limits_of_loss_runs(tmp_path):
    few = losses([2.0, 2.1]) | losses([2.2], "code")
    found = limits(opened(write(tmp_path, "loss", RIDGE, {"exact": few, "ridge": few})))
    one(found, "No document has key tokens")
    one(found, "Strata of one item", "code")
    one(found, "3 items are few")
    one(found, "Not declared in a ledger")
    keyed = losses([2.0] * 12, novel_nll=[2.0] * 12, key_nll=[None] * 9 + [2.0] * 3)
    declared = write(tmp_path / "keyed", "loss", RIDGE, {"exact": keyed, "ridge": keyed}, ledger="c" * 64)
    assert limits(opened(declared)) == ["Only 3 of 12 documents have key tokens."]


def test_unfinished_runs_say_what_is_missing(tmp_path):
    names = [f"prose/{i}" for i in range(4)]
    items = {"exact": losses([2.0] * 3), "ridge": losses([2.1])}
    run = opened(write(tmp_path, "loss", RIDGE, items, {"documents": names}, finish=False))
    assert not run.finished
    assert "of 4 items these arms miss some: exact 1, ridge 3" in one(limits(run), "Unfinished")
    nothing = opened(write(tmp_path / "empty", "loss", RIDGE, {}, finish=False))
    assert find(nothing) == [] and "No item has run yet." in limits(nothing)


def test_a_summary_older_than_the_items_is_made_anew(tmp_path):
    items = {"exact": losses([2.0] * 4), "ridge": losses([2.1] * 4)}
    write(tmp_path, "loss", RIDGE, items)
    assert opened(tmp_path).finished
    write(tmp_path, "loss", RIDGE, {"ridge": {"prose/9": ("prose", {"nll": 9.0}, {})}}, finish=False)
    run = opened(tmp_path)
    assert not run.finished and run.row("ridge", "nll")["n"] == 5


def test_agreement_reads_kl_beside_its_median(tmp_path):
    same, kl = {"top1": [1.0] * 6, "kl": [0.0] * 6}, [0.01, 0.01, 0.02, 0.01, 0.01, 1.0]
    items = {"exact": losses([2.0] * 6, **same), "ridge": losses([2.1] * 6, top1=[0.9] * 5 + [0.6], kl=kl)}
    found = find(opened(write(tmp_path, "agreement", RIDGE, items)))
    assert "ridge: 85.0 % of steps, KL mean 0.177, median 0.010 nats" in one(found, "Most likely token")
    assert "ridge: KL +0.177 nats in the mean, +0.010 in the median" in one(found, "make the mean")


def test_many_arms_are_many_looks(tmp_path):
    arms = {f"arm {i}": (plan(tail=64 + i), 0.6) for i in range(5)}
    items = {name: losses([2.0] * 4) for name in ("exact", *arms)}
    one(limits(opened(write(tmp_path, "loss", arms, items))), "5 arms are compared")


def test_one_model_one_seed_and_no_retrieval_are_said(tmp_path):
    items = {"exact": losses([2.0] * 4), "ridge": losses([2.1] * 4)}
    one_run = opened(write(tmp_path / "a", "loss", RIDGE, items))
    found = limits_across([one_run])
    one(found, "One model only (tiny)")
    one(found, "one seed")
    one(found, "No retrieval was measured")
    needles = {"exact": scores([1] * 4), "ridge": scores([1] * 4)}
    other = opened(write(tmp_path / "b", "ruler", RIDGE, needles, {"seed": 1}, model="other"))
    assert limits_across([one_run, other]) == []
