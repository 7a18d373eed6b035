"""The command line on a tiny model's folder, end to end."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

import ridgefill
from ridgefill import check as checking
from ridgefill import cli
from ridgefill.answer import answer, prompt_ids
from ridgefill.load import load_model
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.plan import make_plan
from tests import gguf_maker
from tests.command import call
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
FIT = ("--tokens", "5000", "--length", "256")
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two tiny models' folders, texts, and maps fitted by the command line."""
    root = tmp_path_factory.mktemp("world")
    for name, seed in (("tiny", 0), ("other", 1)):
        tiny_model(seed=seed).save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "the", "of", "and", "42", "x = y\n", "déjà"]
    for name, files, size in (("a", 8, 300), ("b", 8, 300), ("held", 4, 800)):
        (root / name).mkdir()
        for i in range(files):
            (root / name / f"{i}.txt").write_text(" ".join(rng.choices(words, k=size)), encoding="utf-8")
    (root / "prompt.txt").write_text(" ".join(rng.choices(words, k=200)), encoding="utf-8")
    (root / "config.json").write_text(json.dumps(LLAMA_8B))
    w = SimpleNamespace(root=root, **{p.stem: str(p) for p in root.iterdir()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGEFILL_CACHE", str(root / "cache"))
        w.code = call("fit", w.tiny, "--texts", w.a, w.b, "--splits", "0.25,0.5", "-o", root / "maps", *FIT)
    w.maps = str(root / "maps" / "split-03")
    return w


def process(*argv, **settings):
    """The command line in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "ridgefill.cli", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env=env, **settings)


def refused(said, code):
    """The one line of a refusal."""
    assert code not in (0, None)
    assert said.err.endswith("\n") and said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.err and "Instead: " in said.err
    return said.err


def tree(folder):
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*"))


# --- fit ------------------------------------------------------------------------------------------------


def test_fit_writes_a_folder_of_maps_for_every_split(world):
    assert world.code == 0
    assert tree(world.root / "maps") == [
        "split-01",
        "split-01/down.safetensors",
        *(f"split-01/proj.L{i}.safetensors" for i in (2, 3, 4, 5)),
        "split-01/ridgefill.json",
        "split-01/tokens.safetensors",
        "split-03",
        "split-03/down.safetensors",
        *(f"split-03/proj.L{i}.safetensors" for i in (4, 5)),
        "split-03/ridgefill.json",
        "split-03/tokens.safetensors",
    ]
    provenance = RidgeMaps.load(world.maps).provenance
    assert [s["name"] for s in provenance["sources"]] == ["a", "b"]
    assert provenance["settings"]["tokens"] == 5000


def test_texts_may_follow_one_option_or_repeat_it(world, tmp_path, capsys):
    assert (
        call("fit", world.tiny, "--texts", world.a, "--texts", world.b, "--splits", "3", "-o", tmp_path, *FIT)
        == 0
    )
    again, first = RidgeMaps.load(tmp_path / "split-03"), RidgeMaps.load(world.maps)
    assert again.content_hash == first.content_hash
    said = capsys.readouterr()
    assert said.out.split("next: ")[1].strip() == f"ridgefill check {world.tiny} {tmp_path / 'split-03'}"
    assert "Memory at most" in said.err


def test_maps_fitted_for_a_preset_bring_it_along(world, tmp_path, capsys):
    fitting = (
        "fit",
        world.tiny,
        "--texts",
        world.a,
        "-o",
        tmp_path / "m",
        "--tokens",
        "3000",
        "--length",
        "200",
    )
    assert call(*fitting, "--preset", "flash-next") == 0
    maps = RidgeMaps.load(tmp_path / "m")
    assert maps.split == 3 and maps.preset == {"preset": "flash-next"}
    assert make_plan(6, maps).tail == 2048 and make_plan(6, maps, tail=64).tail == 64
    assert call(*fitting, "--preset", "pop") == 2 and "it is the identity fill" in capsys.readouterr().err
    assert call(*fitting, "--preset", "fast") == 2 and "reference+rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rows", "attention(1.5)"), "between 0 and 1"),
        (("--rows", "attentive"), "attention"),
        (("--correct", "terminal_state"), "ridgefill fit"),
        (("--preset", "28b"), "27b"),
    ],
)
def test_rows_and_corrections_that_cannot_be_are_refused(world, options, says, capsys):
    assert call("run", world.tiny, world.maps, "--prompt-file", world.prompt, *options) == 2
    assert says in capsys.readouterr().err


def test_run_says_how_many_rows_were_chosen(world, capsys):
    asked = (
        "run",
        world.tiny,
        world.maps,
        "--prompt-file",
        world.prompt,
        "--tail",
        "64",
        "--max-new-tokens",
        "2",
    )
    assert (
        call(*asked, "--rows", "spans(overlap, 0.5, spans=8) | random(9)", "--correct", "key_rescale(8)") == 0
    )
    assert re.search(r"rows filled, \d+ chosen to run exactly", capsys.readouterr().err)


def test_fit_takes_its_settings(world, tmp_path):
    assert call(
        "fit", world.tiny, "--texts", world.a, "--splits", "4", "-o", tmp_path, "--tokens", "3000",
        "--length", "200", "--holdout", "0.2", "--lambdas", "0.01,0.1", "--leading", "3", "--chat-share", "0",
        "--encoding", "int8", "--seed", "7", "--moments-device", "cpu",
    ) == 0  # fmt: skip
    maps = RidgeMaps.load(tmp_path)
    assert maps.encoding == "int8" and maps.split == 4
    assert maps.provenance["settings"] == {
        "tokens": 3000, "length": 200, "holdout": 0.2, "lambda_grid": [0.01, 0.1], "leading": 3,
        "chat_share": 0.0, "seed": 7, "terminal_every": 2048,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--splits", "0"), "a split at 0"),
        (("--splits", "6"), "from 1 to 5"),
        (("--splits", "0.5,99"), "a split at 99"),
        (("--splits", "half"), "--splits half"),
        (("--splits", "0.5,"), "not a list of numbers"),
        (("--splits", "1e999"), "no number"),
        (("--encoding", "fp4"), "fp32, bf16, int8"),
        (("--device", "nonsense"), "unknown or not here"),
        (("--device", "cuda:99"), "unknown or not here"),
        (("--moments-device", "nonsense"), "unknown or not here"),
        (("--dtype", "float8"), "float32, bfloat16, float16"),
        (("--leading", "-1"), "leading=-1"),
        (("--tokens", "10"), "tokens=10"),
        (("--length", "20"), "length=20"),
        (("--holdout", "0.9"), "holdout=0.9"),
        (("--lambdas", "0.1,x"), "--lambdas"),
        (("--lambdas", "-1"), "positive"),
        (("--chat-share", "2"), "chat_share=2"),
        (("--seed", "x"), "--seed"),
    ],
)
def test_fit_settings_out_of_range(world, tmp_path, capsys, options, named):
    code = call("fit", world.tiny, "--texts", world.a, "-o", tmp_path / "o", *FIT, *options)
    assert named in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == []


def corpus(kind, tmp_path):
    path = tmp_path / "in" / f"{kind}.txt"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "jsonl":
        path = path.with_suffix(".jsonl")
        path.write_text('{"text": "fine"}\n{"text": \n')
    elif kind != "missing":
        path.write_bytes(
            {"empty": b"", "blank": b" \n\n", "binary": b"\x00\xff" * 99, "short": b"too short"}[kind]
        )
    return path


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing", "no such file"),
        ("empty", "no text in it"),
        ("blank", "no text in it"),
        ("folder", "no text in it"),
        ("binary", "binary"),
        ("jsonl", "line 2"),
        ("short", "too short"),
    ],
)
def test_a_bad_corpus_is_one_line_and_leaves_nothing(world, tmp_path, capsys, kind, named):
    path = corpus(kind, tmp_path)
    before = tree(tmp_path)
    code = call("fit", world.tiny, "--texts", path, "--splits", "0.5", "-o", tmp_path / "o" / "p", *FIT)
    assert named in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_corpus(world, tmp_path, capsys):
    (tmp_path / "locked.txt").write_text("secret")
    (tmp_path / "locked.txt").chmod(0)
    code = call("fit", world.tiny, "--texts", tmp_path / "locked.txt", "-o", tmp_path / "o")
    assert "Permission denied" in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == ["locked.txt"]


def test_fit_without_texts(world, tmp_path, capsys):
    code = call("fit", world.tiny, "-o", tmp_path / "o")
    assert "--texts PATH" in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == []


def test_fit_keeps_what_is_no_maps_folder(world, tmp_path, capsys):
    (tmp_path / "split-03").mkdir()
    (tmp_path / "split-03" / "mine.txt").write_text("keep")
    code = call("fit", world.tiny, "--texts", world.a, "-o", tmp_path, *FIT)
    assert "no maps folder" in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == ["split-03", "split-03/mine.txt"]


# --- models ---------------------------------------------------------------------------------------------


def bad_model(kind, tmp_path, world):
    path = tmp_path / ("model.gguf" if "gguf" in kind else "model")
    if kind == "gguf of another family":
        gguf_maker.write(path, "phi3")
    elif kind in ("text as gguf", "text"):
        path.write_text("this is no model\n" * 50)
    elif kind == "cut gguf":
        gguf_maker.write(path)
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "empty folder":
        path.mkdir()
    elif kind == "no tokenizer":
        shutil.copytree(world.tiny, path, ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    elif kind == "cut weights":
        shutil.copytree(world.tiny, path)
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "another family":
        shutil.copytree(world.tiny, path)
        (path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    return path


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gguf of another family", "phi3"),
        ("text as gguf", "GGUF"),
        ("text", "GGUF"),
        ("cut gguf", "truncated"),
        ("missing gguf", "no such file"),
        ("empty folder", "no config.json"),
        ("no tokenizer", "tokenizer"),
        ("cut weights", "model"),
        ("another family", "gpt2"),
    ],
)
def test_a_bad_model_is_one_line_and_leaves_nothing(world, tmp_path, capsys, kind, named):
    path = bad_model(kind, tmp_path, world)
    before = tree(tmp_path)
    code = call("fit", path, "--texts", world.a, "-o", tmp_path / "o", *FIT)
    assert named in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == before


# --- check ----------------------------------------------------------------------------------------------


def test_check_says_in_words_and_json_whether_maps_are_safe(world, tmp_path, capsys, cache):
    options = ("--texts", world.held, "--tail", "64", "--tokens", "300", "--documents", "2")
    assert call("check", world.tiny, world.maps, *options, "--json", tmp_path / "new" / "c.json") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["yes"] * 3
    assert said[3].startswith("SAFE TO USE: ")
    made = json.loads((tmp_path / "new" / "c.json").read_text())
    assert made["safe"] is made["correct"] is True and made["model"] == "tiny"
    assert len(made["documents"]) == 2 and made["tried_tokens"] == 208
    assert made["environment"]["command"].startswith("ridgefill check tiny split-03 --texts held")
    assert str(tmp_path) not in json.dumps(made)
    assert len(list((cache / "break-even").iterdir())) == 1


def test_check_ends_with_1_where_maps_are_not_safe(world, tmp_path, capsys, monkeypatch):
    stock = Decoder.rotate
    monkeypatch.setattr(Decoder, "rotate", lambda self, i, keys, rows: stock(self, i, keys, rows).roll(1, 2))
    options = ("--texts", world.held, "--tail", "64", "--tokens", "300")
    assert call("check", world.tiny, world.maps, *options, "--json", tmp_path / "c.json") == 1
    said = capsys.readouterr().out
    assert "\nNO   a cache filled from true layer inputs" in said and "\nNOT SAFE: " in said
    assert json.loads((tmp_path / "c.json").read_text())["correct"] is False


def test_check_ends_with_1_where_maps_are_not_recommended(world, capsys, monkeypatch):
    monkeypatch.setattr(checking, "LARGE_LOSS", -9.0)
    options = ("--texts", world.held, "--tail", "64", "--tokens", "200", "--documents", "1")
    assert call("check", world.tiny, world.maps, *options) == 1
    assert "NOT RECOMMENDED: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tail", "0"), "a tail of 0"),
        (("--tail", "64", "--leading", "-1"), "leading"),
        (("--tail", "64", "--tokens", "10"), "they need 81"),
        (("--tail", "9999"), "a shorter --tail"),
        (("--tail", "x"), "--tail"),
        (("--tail", "64", "--documents", "0"), "--documents"),
        (("--tail", "64", "--tokens", "4000"), "no such stretch"),
        (("--tail", "64", "--device", "nonsense"), "unknown or not here"),
        (("--tail", "64", "--dtype", "float8"), "float8"),
    ],
)
def test_check_settings_out_of_range(world, tmp_path, capsys, options, named):
    texts = world.root / "prompt.txt"
    code = call("check", world.tiny, world.maps, "--texts", texts, "--json", tmp_path / "c.json", *options)
    assert named in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == []


def test_maps_fitted_on_the_text_are_not_checked_on_it(world, tmp_path, capsys):
    maps = RidgeMaps.load(world.maps)
    shutil.copytree(world.a, tmp_path / "a")
    assert (
        call("check", world.tiny, world.maps, "--texts", tmp_path / "a", "--tail", "64", "--tokens", "300")
        == 0
    )
    capsys.readouterr()
    from ridgefill.eval.documents import digest

    for path in (tmp_path / "a").iterdir():
        if digest(path.read_text()) not in maps.provenance["fitted_documents"]:
            path.unlink()
    code = call("check", world.tiny, world.maps, "--texts", tmp_path / "a", "--tail", "64", "--tokens", "300")
    assert "not fitted on" in refused(capsys.readouterr(), code)


# --- maps -----------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def reword(path):
    path.write_text(path.read_text().replace('"split": 3', '"split": 2'))


@pytest.mark.parametrize("command", ["check", "run", "bench ttft"])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("proj.L4.safetensors", cut),
        ("proj.L5.safetensors", flip),
        ("proj.L5.safetensors", Path.unlink),
        ("ridgefill.json", reword),
        ("ridgefill.json", cut),
    ],
)
def test_damaged_maps_are_named(world, tmp_path, capsys, command, name, damage):
    shutil.copytree(world.maps, tmp_path / "maps")
    damage(tmp_path / "maps" / name)
    code = call(*command.split(), world.tiny, tmp_path / "maps", *given_to(command, world))
    assert name in refused(capsys.readouterr(), code)


@pytest.mark.parametrize("command", ["check", "run", "bench ttft"])
def test_maps_of_another_model_and_no_maps(world, tmp_path, capsys, command):
    given = given_to(command, world)
    code = call(*command.split(), world.other, world.maps, *given)
    assert "not the one they fit" in refused(capsys.readouterr(), code)
    for place, named in ((tmp_path / "gone", "no such folder"), (world.root / "maps", "split-01, split-03")):
        code = call(*command.split(), world.tiny, place, *given)
        assert named in refused(capsys.readouterr(), code)


def given_to(command, world):
    if command == "run":
        return ("--prompt-file", world.prompt)
    return ("--texts", world.held, "--tail", "64")


# --- run ------------------------------------------------------------------------------------------------


def ran(said):
    """The closing line on stderr."""
    return said.err.strip().splitlines()[-1]


def test_run_answers_with_a_filled_prompt_and_says_so(world, capsys):
    options = ("--prompt-file", world.prompt, "--tail", "64", "--max-new-tokens", "6")
    assert call("run", world.tiny, world.maps, *options) == 0
    said = capsys.readouterr()
    model, tokenizer = load_model(world.tiny)
    ids = prompt_ids(tokenizer, Path(world.prompt).read_text())
    with ridgefill.filling(model, RidgeMaps.load(world.maps), tail=64):
        wanted = answer(model, tokenizer, ids, max_new_tokens=6)
    assert said.out.strip() == wanted.text
    n = ids.shape[1]
    assert ran(said).startswith(f"[ridge: {n - 64 - 16:,} of {n:,} rows filled; first token after ")
    assert f"{wanted.tokens} tokens in" in ran(said) and "; lower " in ran(said) and ", tail " in ran(said)


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        (("--fill", "exact"), "[exact: first token"),
        (("--fill", "identity", "--split", "0.5", "--tail", "64"), "[identity: {0} of {n} rows filled"),
        (("--fill", "none", "--split", "3", "--tail", "64"), "[none: {0} of {n} rows filled"),
        (("--fill", "pop"), "[identity: {1} of {n} rows filled"),
        (("--fill", "identity", "--split", "5", "--tail", "64", "--leading", "0"), "[identity: {2} of"),
    ],
)
def test_the_other_arms_need_no_maps(world, capsys, options, starts):
    assert call("run", world.tiny, "--prompt-file", world.prompt, "--max-new-tokens", "3", *options) == 0
    n = prompt_ids(tiny_tokenizer(), Path(world.prompt).read_text()).shape[1]
    counts = [f"{filled:,}" for filled in (n - 64 - 16, n - 1, n - 64)]
    said = capsys.readouterr()
    assert ran(said).startswith(starts.format(*counts, n=f"{n:,}"))
    assert said.out.strip()


def test_streamed_maps_answer_the_same_and_need_maps(world, capsys):
    options = ("--prompt-file", world.prompt, "--tail", "64", "--max-new-tokens", "6")
    assert call("run", world.tiny, world.maps, *options) == 0
    held = capsys.readouterr().out
    assert call("run", world.tiny, world.maps, *options, "--stream-maps") == 0
    assert capsys.readouterr().out == held
    for other in (("--fill", "exact"), ("--fill", "identity", "--split", "3")):
        code = call("run", world.tiny, *options, *other, "--stream-maps")
        assert "nothing here reads maps" in refused(capsys.readouterr(), code)


@pytest.mark.parametrize("form", ["plain", "direct", "rich"])
def test_every_form_is_fitted_checked_and_run(world, tmp_path, capsys, form):
    out = tmp_path / "maps"
    assert call("fit", world.tiny, "--texts", world.a, "-o", out, "--splits", "3", "--form", form, *FIT) == 0
    maps = RidgeMaps.load(out)
    assert maps.reading.is_plain == (form == "plain") and (maps.down is not None) == (form == "rich")
    short = ("--tail", "64", "--documents", "1", "--needles", "0", "--texts", world.held)
    assert call("check", world.tiny, out, *short, "--tokens", "400") in (0, 1)
    assert "bit for bit" in capsys.readouterr().out
    code = call("fit", world.tiny, "--texts", world.a, "-o", out, "--form", "poor", *FIT)
    assert "plain, direct, rich" in refused(capsys.readouterr(), code)


def test_exact_is_the_stock_models_answer(world, capsys):
    assert (
        call("run", world.tiny, "--fill", "exact", "--prompt-file", world.prompt, "--max-new-tokens", "8")
        == 0
    )
    model, tokenizer = load_model(world.tiny)
    ids = prompt_ids(tokenizer, Path(world.prompt).read_text())
    new = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert capsys.readouterr().out.strip() == tokenizer.decode(new, skip_special_tokens=True).strip()


def test_the_prompt_may_come_from_a_file_or_a_pipe_with_a_question_after_it(
    world, tmp_path, capsys, monkeypatch
):
    text = Path(world.prompt).read_text()
    (tmp_path / "both.txt").write_text(f"{text.rstrip()}\n\nwho?", encoding="utf-8")
    options = ("--tail", "64", "--max-new-tokens", "5")
    answers = set()
    for given in (
        ("--prompt-file", tmp_path / "both.txt"),
        ("--prompt-file", world.prompt, "--question", "who?"),
        ("--prompt-file", "-", "--question", "who?"),
        ("--question", "who?"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert call("run", world.tiny, world.maps, *options, *given) == 0
        said = capsys.readouterr()
        answers.add((said.out, ran(said).split(";")[0]))
    assert len(answers) == 1
    assert call("run", world.tiny, world.maps, *options, "--raw", "--prompt-file", tmp_path / "both.txt") == 0
    raw = ran(capsys.readouterr()).split(";")[0]
    assert raw.split(" of ")[1] == f"{len((tmp_path / 'both.txt').read_bytes()):,} rows filled"
    assert raw not in {line for _, line in answers}


@pytest.mark.parametrize("options", [(), ("--tail", "1024"), ("--tail", "64", "--leading", "1500")])
def test_a_prompt_too_short_to_fill_runs_exactly_and_says_so(world, tmp_path, capsys, options):
    call("run", world.tiny, "--fill", "exact", "--prompt-file", world.prompt, "--max-new-tokens", "5")
    wanted = capsys.readouterr().out
    given = ("--prompt-file", world.prompt, "--max-new-tokens", "5")
    assert call("run", world.tiny, world.maps, *given, *options) == 0
    said = capsys.readouterr()
    assert said.out == wanted
    assert re.match(r"\[exact \(a prompt shorter than \d+ tokens does not pay\): first token", ran(said))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("MAPS", "--tail", "0"), "a tail of 0"),
        (("MAPS", "--tail", "x"), "--tail"),
        (("MAPS", "--leading", "-1"), "leading"),
        (("MAPS", "--fill", "magic"), "'magic'"),
        (("MAPS", "--split", "2"), "fitted for split 3"),
        (("MAPS", "--device", "nonsense"), "unknown or not here"),
        (("MAPS", "--dtype", "float8"), "float8"),
        (("MAPS", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("MAPS", "--size", "1"), "--size"),
        ((), "it needs maps"),
        (("--fill", "identity"), "no split was given"),
        (("--fill", "identity", "--split", "0"), "a split at 0"),
        (("--fill", "identity", "--split", "6"), "a split at 6"),
        (("--fill", "none", "--split", "99"), "a split at 99"),
        (("--fill", "none", "--split", "half"), "--split half"),
    ],
)
def test_run_settings_out_of_range(world, capsys, options, named):
    options = [world.maps if o == "MAPS" else o for o in options]
    code = call("run", world.tiny, *options, "--prompt-file", world.prompt)
    said = capsys.readouterr()
    assert named in refused(said, code) and said.out == ""


def test_prompts_that_cannot_be_read(world, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, named in (
        ("empty", "it is empty"),
        ("binary", "UTF-8"),
        ("gone", "No such file"),
        (".", "directory"),
    ):
        code = call("run", world.tiny, world.maps, "--prompt-file", tmp_path / name)
        assert named in refused(capsys.readouterr(), code)  # fmt: skip


# --- bench ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["ridge", "identity"])
def test_bench_writes_a_table_a_picture_and_json(world, tmp_path, capsys, arm):
    given = (world.maps,) if arm == "ridge" else ("--fill", "identity", "--split", "0.5")
    options = ("--lengths", "200,400", "--repeats", "2", "--tail", "64", "--texts", world.held)
    assert call("bench", "ttft", world.tiny, *given, *options, "-o", tmp_path / "new" / "out") == 0
    assert tree(tmp_path / "new" / "out") == ["ttft.json", "ttft.png"]
    assert (tmp_path / "new" / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")
    made = json.loads((tmp_path / "new" / "out" / "ttft.json").read_text())
    assert made["model"] == "tiny" and made["plan"] == {"fill": arm, "split": 3, "tail": 64, "leading": 16}
    said = capsys.readouterr().out
    for row, n in zip(made["lengths"], (200, 400), strict=True):
        assert row["tokens"] == n and len(row["exact_s"]) == len(row["filled_s"]) == 2
        assert row["exact_median_s"] == statistics.median(row["exact_s"])
        assert row["speedup"] == pytest.approx(row["exact_median_s"] / row["filled_median_s"])
        assert row["layer_pass_ceiling"] == pytest.approx(6 * n / ((n - 64) * 3 + 64 * 6))
        assert row["macs_ceiling"] > 1
        assert f"{row['layer_pass_ceiling']:.2f}x" in said and f"{row['speedup']:.2f}x" in said
    assert str(tmp_path) not in json.dumps(made)


def test_bench_alone_prints_only_the_table(world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--lengths", "150", "--repeats", "1", "--tail", "64", "--texts", world.held)
    assert call("bench", "ttft", world.tiny, world.maps, *options) == 0
    said = capsys.readouterr().out
    assert "Time to first token" in said and "Written" not in said
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--lengths", "5000"), "the model's context is 4096"),
        (("--lengths", "200,80"), "nothing of it would be filled"),
        (("--lengths", "abc"), "not a list of numbers"),
        (("--lengths", ""), "not a list of numbers"),
        (("--lengths", "0"), "it counts tokens"),
        (("--lengths", "200.5"), "it counts tokens"),
        (("--lengths", "1e999"), "it counts tokens"),
        (("--tail", "0"), "a tail of 0"),
        (("--leading", "-1"), "leading"),
        (("--repeats", "0"), "--repeats"),
        (("--fill", "magic"), "'magic'"),
        (("--split", "2"), "fitted for split 3"),
        (("--split", "99"), "a split at 99"),
        (("--device", "nonsense"), "unknown or not here"),
        (("--dtype", "float8"), "float8"),
    ],
)
def test_bench_settings_out_of_range(world, tmp_path, capsys, options, named):
    given = ("--tail", "64", "--lengths", "200", "--texts", world.held, "-o", tmp_path / "o")
    code = call("bench", "ttft", world.tiny, world.maps, *given, *options)
    assert named in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == []


def test_text_shorter_than_a_length(world, capsys):
    given = ("--tail", "64", "--lengths", "3000", "--texts", world.prompt)
    code = call("bench", "ttft", world.tiny, world.maps, *given)
    assert "no such stretch" in refused(capsys.readouterr(), code)


# --- cost -----------------------------------------------------------------------------------------------


def cost(capsys, *options):
    assert call("cost", *options, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_cost_gives_the_published_crossing_as_one_json_object(world, capsys):
    options = ("--config", world.config, "--split", "20", "--tail", "4096", "--versus", "pop")
    made = cost(capsys, *options, "--lengths", "16384,65536")
    assert 45_000 < made["crossing_tokens"] < 47_000
    assert [row["tokens"] for row in made["lengths"]] == [16384, 65536]
    for row in made["lengths"]:
        assert set(row) == {"tokens", "macs", "macs_versus", "ratio"}
        assert row["ratio"] == row["macs"] / row["macs_versus"]
    assert made["lengths"][0]["ratio"] > 1 > made["lengths"][1]["ratio"]
    shallow = cost(capsys, *options, "--split", "16")
    assert 13_000 < shallow["crossing_tokens"] < 15_000


def test_cost_options_move_the_count_the_right_way(world, capsys):
    options = ("--config", world.config, "--split", "0.5", "--lengths", "32768")

    def ours(*more):
        row = cost(capsys, *options, *more)["lengths"][0]
        assert row["ratio"] < 1 or "exact" in more
        return row["macs"]

    plain = ours()
    assert ours("--no-map") == ours("--fill", "identity") < plain
    assert ours("--fill", "none") < ours("--no-map")
    assert plain < ours("--leading", "16") < ours("--leading", "1600")
    assert plain < ours("--rows", "0.1") < ours("--rows", "0.5")
    assert ours("--tail", "1024") < plain < ours("--tail", "8192")
    assert ours("--split", "12") < plain < ours("--split", "20")
    assert ours("--form", "direct") < ours("--form", "rich") < plain
    exact = cost(capsys, *options, "--fill", "exact")["lengths"][0]
    assert exact["macs"] == exact["macs_versus"] and exact["ratio"] == 1


def test_cost_of_a_models_folder_and_a_table(world, capsys):
    made = cost(capsys, world.tiny, "--tail", "64", "--lengths", "1000", "--versus", "split=2,tail=64")
    by_config = cost(
        capsys, "--config", Path(world.tiny) / "config.json", "--tail", "64", "--lengths", "1000",
        "--versus", "split=2,tail=64",
    )  # fmt: skip
    assert made == by_config
    assert call("cost", world.tiny, "--tail", "64", "--lengths", "1000") == 0
    said = capsys.readouterr().out
    assert "1,000" in said and "against exact prefill" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "either MODEL or --config"),
        (("TINY", "--config", "CONFIG"), "either MODEL or --config"),
        (("--config", "GONE"), "No such file"),
        (("--config", "PROMPT"), "read "),
        (("GONE",), "no such file"),
        (("--config", "CONFIG", "--tail", "0"), "tail 0"),
        (("--config", "CONFIG", "--leading", "-1"), "leading -1"),
        (("--config", "CONFIG", "--rows", "1.5"), "rows 1.5"),
        (("--config", "CONFIG", "--rows", "nan"), "rows nan"),
        (("--config", "CONFIG", "--split", "0"), "split 0"),
        (("--config", "CONFIG", "--split", "32"), "a split at 32"),
        (("--config", "CONFIG", "--split", "99"), "a split at 99"),
        (("--config", "CONFIG", "--split", "0.001"), "a split at 0.001"),
        (("--config", "CONFIG", "--split", "1e999"), "split inf"),
        (("--config", "CONFIG", "--lengths", "x"), "not a list of numbers"),
        (("--config", "CONFIG", "--lengths", "0"), "it counts tokens"),
        (("--config", "CONFIG", "--lengths", "1e999"), "it counts tokens"),
        (("--config", "CONFIG", "--fill", "magic"), "magic"),
        (("--config", "CONFIG", "--versus", "magic"), "magic"),
        (("--config", "CONFIG", "--versus", "split=99"), "a split at 99"),
    ],
)
def test_cost_settings_out_of_range(world, tmp_path, capsys, options, named):
    names = {"TINY": world.tiny, "CONFIG": world.config, "GONE": tmp_path / "gone", "PROMPT": world.prompt}
    code = call("cost", *(names.get(o, o) for o in options))
    said = capsys.readouterr()
    assert named in refused(said, code) and said.out == ""


# --- doctor, help, misuse -------------------------------------------------------------------------------


def test_doctor_says_what_is_installed_and_ends_with_0(capsys, cache):
    assert call("doctor") == 0
    said = capsys.readouterr().out
    assert torch.__version__.split("+")[0] in said and "self check" in said
    assert not cache.exists()


def test_doctor_ends_with_1_where_something_is_missing(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "file" / "cache"))
    assert call("doctor") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "missing cache folder" in said and "-> set RIDGEFILL_CACHE" in said


def every_command():
    """The words of every command, groups included."""
    found, left = [], [((), typer.main.get_command(cli.app))]
    while left:
        words, command = left.pop()
        found.append(words)
        left += [((*words, name), each) for name, each in getattr(command, "commands", {}).items()]
    return sorted(found)


def test_all_commands_are_there():
    names = {" ".join(words) for words in every_command()}
    assert names >= {"", "fit", "check", "run", "bench", "bench ttft", "cost", "doctor", "demo"}


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_help_teaches_by_example(words, capsys):
    assert call(*words, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Usage:" in said
    if not words:
        assert "ridgefill fit MODEL --texts" in said and "ridgefill check MODEL" in said
    else:
        assert re.search(rf"Examples?: ridgefill {' '.join(words)}\b", said)


@pytest.mark.parametrize("words", [(), ("bench",)])
def test_no_arguments_show_the_help(words, capsys):
    assert call(*words) != 0
    said = capsys.readouterr()
    assert "Usage:" in said.out + said.err and "Traceback" not in said.err


def test_an_unknown_command_is_one_line(capsys):
    code = call("frobnicate")
    assert "frobnicate" in refused(capsys.readouterr(), code)


def test_a_picture_or_json_that_cannot_be_written(world, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = ("--texts", world.held, "--tail", "64")
    few = (*given, "--lengths", "150", "--repeats", "1", "-o", tmp_path / "file")
    short = (*given, "--tokens", "143", "--json", tmp_path / "file" / "c.json")
    for words in (("bench", "ttft", world.tiny, world.maps, *few), ("check", world.tiny, world.maps, *short)):
        code = call(*words)
        assert "file inside a file" in refused(capsys.readouterr(), code)
    assert tree(tmp_path) == ["file"]


# --- as a process of its own ----------------------------------------------------------------------------


def test_json_is_all_that_cost_prints(world):
    done = process("cost", "--config", world.config, "--split", "20", "--versus", "pop", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert 45_000 < json.loads(done.stdout)["crossing_tokens"] < 47_000


def test_a_refusal_from_a_process(world, tmp_path):
    done = process("fit", world.tiny, "--texts", tmp_path / "gone.txt", "-o", tmp_path / "o")
    said = refused(SimpleNamespace(err=done.stderr), done.returncode)
    assert done.returncode == 2 and done.stdout == "" and "no such file" in said
    assert tree(tmp_path) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(world, tmp_path):
    """A limit on the size of files makes the kernel refuse large writes, as a full disk does."""

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    options = ("--texts", world.a, "--splits", "0.5", "-o", tmp_path / "o" / "maps", *FIT)
    done = process("fit", world.tiny, *options, preexec_fn=small_files)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    *remarks, last = done.stderr.splitlines()
    assert "Instead: free" in last and not any("Instead:" in line for line in remarks)
    assert tree(tmp_path) == []
