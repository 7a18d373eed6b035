"""vLLM for real, on tiny models, against the transformers engine (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ridgefill
from ridgefill.fit import fit
from ridgefill.load import load_model
from ridgefill.maps import RidgeMaps
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own"),
]

ROOT = Path(__file__).parents[3]
TAIL, LEADING, NEW = 32, 8, 10
CLOSE = 1e-5  # log-probabilities in fp32: the two engines' kernels alone
# what vLLM's CPU kernels of Gated DeltaNet and experts take
SIZES = {
    "qwen3_next": {
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "intermediate_size": 256,
    }
}  # fmt: skip
TEXT = (ROOT / "docs" / "fitting.md").read_text()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(family, form) -> model folder, maps folder; made once."""
    folder, known = tmp_path_factory.mktemp("served"), {}

    def make(family: str, form: str = "rich") -> tuple[Path, Path]:
        at = folder / family
        if not at.exists():
            tiny_model(family, hidden_size=128, head_dim=32, **SIZES.get(family, {})).save_pretrained(at)
            tiny_tokenizer().save_pretrained(at)
        if (family, form) not in known:
            model, tokenizer = load_model(str(at))
            where = folder / f"{family}-{form}"
            fit(model, tokenizer, [ROOT / "docs"], [3], where, form=form, tokens=6000, length=256)
            known[family, form] = where / "split-03"
        return at, known[family, form]

    return make


class Reference:
    """The transformers engine on the same files."""

    def __init__(self, folder: Path, maps: Path) -> None:
        self.model, self.tokenizer = load_model(str(folder))
        self.maps = RidgeMaps.load(maps)

    def ids(self, *characters: int) -> list[list[int]]:
        return [self.tokenizer(TEXT[first * 40 :][:n]).input_ids for first, n in enumerate(characters)]

    def answer(
        self, ids: list[int], filled: bool = True, new: int = NEW, **plan
    ) -> tuple[list[int], torch.Tensor]:
        settings = {"tail": TAIL, "leading": LEADING, "min_tokens": 1, "tokenizer": self.tokenizer, **plan}
        given = torch.tensor([ids])
        wanted = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        wanted |= {"output_logits": True, "return_dict_in_generate": True}
        if filled:
            with ridgefill.filling(self.model, self.maps, **settings):
                out = self.model.generate(given, **wanted)
        else:
            out = self.model.generate(given, **wanted)
        return out.sequences[0, len(ids) :].tolist(), out.logits[0][0].log_softmax(-1)


def request(ids, new=NEW, **extra):
    return {"ids": ids, "params": {"max_tokens": new, "logprobs": 320, "extra_args": extra or None}}


def engine(folder, maps=None, flags=True, **more):
    """Arguments of `vllm.LLM`; ``flags`` are those of `ridgefill vllm-args`."""
    settings = {
        "maps": None if maps is None else str(maps),
        "tail": TAIL,
        "leading": LEADING,
        "min_tokens": 1,
    }
    settings |= more.pop("plan", {})
    made = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_logprobs": 320,
    }
    if flags:
        made |= {
            "worker_cls": "ridgefill.engines.vllm.worker.RidgeWorker",
            "scheduler_cls": "ridgefill.engines.vllm.scheduler.RidgeScheduler",
            "logits_processors": ["ridgefill.engines.vllm.params:RidgeParams"],
            "additional_config": {"ridgefill": settings},
        }
    return made | more


def run(tmp_path, arguments, *batches, environment=None):
    """Every batch's answers, from a process of its own; and what it said."""
    job, answer = tmp_path / "job.json", tmp_path / "answer.json"
    answer.unlink(missing_ok=True)
    job.write_text(json.dumps({"engine": arguments, "batches": batches}))
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.job", job, answer],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    said = done.stdout + done.stderr
    if not answer.exists():
        return None, said
    return json.loads(answer.read_text()), said


def assert_same(answer, wanted, close=CLOSE):
    tokens, logprobs = wanted
    assert answer["tokens"] == tokens
    furthest = max(abs(v - float(logprobs[int(k)])) for k, v in answer["first"].items())
    assert furthest < close, furthest


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "plain"), ("llama", "rich"), ("mistral", "direct"), ("qwen2", "plain"), ("qwen3", "rich"),
     ("qwen3", "plain"), ("gemma3_text", "plain"), ("gemma3_text", "rich")],
)  # fmt: skip
def test_filled_and_exact_in_one_batch_equal_the_transformers_engine(family, form, made, tmp_path):
    folder, maps = made(family, form)
    reference = Reference(folder, maps)
    prompts = reference.ids(600, 400, 120)
    found, said = run(
        tmp_path,
        engine(folder, maps, enable_prefix_caching=False),
        [request(prompts[0]), request(prompts[1], ridgefill=0), request(prompts[2], ridgefill_tail=16)],
    )
    assert found, said
    answers = found["answers"][0]
    filled, exact = reference.answer(prompts[0]), reference.answer(prompts[0], filled=False)
    assert (filled[1] - exact[1]).abs().max() > 100 * CLOSE  # or nothing below could tell them apart
    assert_same(answers[0], filled)
    assert_same(answers[1], reference.answer(prompts[1], filled=False))
    assert_same(answers[2], reference.answer(prompts[2], tail=16))


@pytest.mark.parametrize(
    ("family", "form", "plan"),
    [
        ("llama", "rich", {}),
        ("llama", "plain", {"rows": "protected(0.25)"}),
        ("llama", "rich", {"rows": "attention(0.1)", "corrections": "value_rescale(16)"}),
        ("qwen3", "plain", {"rows": "spans(peak, 0.1)"}),
        ("qwen3", "plain", {"fill": "identity", "split": 3, "corrections": "value_rescale(16)"}),
        ("gemma3_text", "rich", {"rows": "random(0.1)"}),
    ],
)
def test_chunks_change_nothing(family, form, plan, made, tmp_path):
    folder, maps = made(family, form)
    reference = Reference(folder, maps)
    prompts = reference.ids(600, 400, 300)
    arguments = engine(
        folder, maps, plan=plan, max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=False
    )
    batch = [request(p) for p in prompts[:2]] + [request(prompts[2], ridgefill=0)]
    found, said = run(tmp_path, arguments, batch)
    assert found, said
    for answer, ids in zip(found["answers"][0][:2], prompts, strict=False):
        assert_same(answer, reference.answer(ids, **plan))
    assert_same(found["answers"][0][2], reference.answer(prompts[2], filled=False))


@pytest.mark.parametrize("chunk", [2048, 64])
def test_hybrids_carry_their_state_over_filled_rows(chunk, made, tmp_path):
    """vLLM's CPU kernels of recurrent layers take bf16 alone; the fill brings the engines no further apart."""
    folder, maps = made("qwen3_next", "plain")
    reference = Reference(folder, maps)
    reference.model = reference.model.to(torch.bfloat16)
    prompts = reference.ids(900, 700, 500)
    plan = {
        "fill": "identity",
        "split": 3,
        "rows": "random(0.05)",
    }  # the coarsest fill, so that it shows above the rounding
    arguments = engine(
        folder,
        maps,
        plan=plan,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
    )
    batches = [[request(p) for p in prompts], [request(p, ridgefill=0) for p in prompts]]
    found, said = run(tmp_path, arguments, *batches)
    assert found, said

    def kl(a, b):
        return float((a.exp() * (a - b)).sum())

    def logprobs(answer):
        return torch.tensor([answer["first"][str(k)] for k in range(len(answer["first"]))])

    sizes = {"engines": 0.0, "filled": 0.0, "fill": 0.0}
    for filled, exact, ids in zip(*found["answers"], prompts, strict=True):
        with pytest.warns(ridgefill.errors.RidgeFillWarning, match="dtype"):
            wanted = reference.answer(ids, **plan)[1].float()
        stock = reference.answer(ids, filled=False)[1].float()
        sizes["engines"] += kl(stock, logprobs(exact))
        sizes["filled"] += kl(wanted, logprobs(filled))
        sizes["fill"] += kl(stock, wanted)
    assert sizes["fill"] > 5 * sizes["engines"] and sizes["filled"] < 3 * sizes["engines"], sizes


def test_the_prefix_cache_hands_no_filled_row_to_who_wants_it_exact(made, tmp_path):
    """The branch hazard: a shorter prompt that branches off a filled one has its own tail among the filled rows."""
    folder, maps = made("llama", "plain")
    reference = Reference(folder, maps)
    (long,) = reference.ids(1200)
    branch = long[:400] + reference.ids(40)[0][::-1]
    again = [request(long), request(branch), request(long, ridgefill=0), request(branch, ridgefill=0)]
    found, said = run(tmp_path, engine(folder, maps), *[[r] for r in (*again, *again)])
    assert found, said
    wanted = [reference.answer(long), reference.answer(branch)]
    wanted += [reference.answer(long, filled=False), reference.answer(branch, filled=False)]
    answers = [batch[0] for batch in found["answers"]]
    for answer, want in zip(answers, wanted * 2, strict=True):
        assert_same(answer, want)
    block = 128  # the CPU build's
    assert [a["cached"] for a in answers[:4]] == [
        0,
        (len(branch) - TAIL) // block * block,
        0,
        400 // block * block,
    ]
    assert all(a["cached"] for a in answers[4:])


def test_maps_that_read_the_row_before_run_one_row_exactly_after_a_hit(made, tmp_path):
    folder, maps = made("llama", "rich")
    reference = Reference(folder, maps)
    (long,) = reference.ids(1200)
    found, said = run(tmp_path, engine(folder, maps), [request(long)], [request(long)])
    assert found, said
    cold, warm = (batch[0] for batch in found["answers"])
    assert_same(cold, reference.answer(long))
    assert warm["cached"] and warm["tokens"] == cold["tokens"]
    assert_same(warm, reference.answer(long), close=0.02)  # nearer to exact by that one row


def test_a_conversation_goes_on_from_the_cache(made, tmp_path):
    folder, maps = made("llama", "plain")
    reference = Reference(folder, maps)
    (first,) = reference.ids(500)
    found, said = run(tmp_path, engine(folder, maps), [request(first, new=40)])
    assert found, said
    answer = found["answers"][0][0]["tokens"]
    second = first + answer + reference.ids(300)[0]
    found, said = run(tmp_path, engine(folder, maps), [request(first, new=40)], [request(second)])
    assert found, said
    later = found["answers"][1][0]
    assert later["cached"] > len(first) - TAIL - 128
    with ridgefill.filling(reference.model, reference.maps, tail=TAIL, leading=LEADING, min_tokens=1):
        cache = reference.model.generate(
            torch.tensor([first]),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            return_dict_in_generate=True,
        ).past_key_values
        cache.crop(later["cached"])
        out = reference.model.generate(
            torch.tensor([second]), past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    assert_same(later, (out.sequences[0, len(second) :].tolist(), out.logits[0][0].log_softmax(-1)))


@pytest.mark.parametrize("plan", [{}, {"rows": "attention(0.1)"}])
def test_a_preempted_request_starts_anew(plan, made, tmp_path):
    folder, maps = made("llama", "rich")
    reference = Reference(folder, maps)
    prompts = reference.ids(500, 500, 500)
    arguments = engine(
        folder, maps, plan=plan, num_gpu_blocks_override=14, max_num_batched_tokens=256, max_num_seqs=4,
        max_model_len=1024, enable_prefix_caching=False,
    )  # fmt: skip
    found, said = run(tmp_path, arguments, [request(p, new=100) for p in prompts])
    assert found, said
    assert found["preempted"] > 0
    for answer, ids in zip(found["answers"][0], prompts, strict=True):
        assert_same(answer, reference.answer(ids, new=100, **plan))


@pytest.mark.parametrize(
    ("form", "plan"),
    [("plain", {}), ("rich", {"rows": "attention(0.1)", "corrections": "value_rescale(16)"})],
)
def test_two_ranks_give_what_one_does(form, plan, made, tmp_path):
    folder, maps = made("llama", form)
    reference = Reference(folder, maps)
    prompts = reference.ids(600, 400)
    arguments = engine(folder, maps, plan=plan, tensor_parallel_size=2, max_num_batched_tokens=256)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    batch = [request(prompts[0]), request(prompts[1], ridgefill=0)]
    found, said = run(tmp_path, arguments, batch, environment=environment)
    assert found, said
    assert_same(found["answers"][0][0], reference.answer(prompts[0], **plan))
    assert_same(found["answers"][0][1], reference.answer(prompts[1], filled=False))


def test_compiled_decoding_and_streamed_maps_change_nothing(made, tmp_path):
    folder, maps = made("llama", "rich")
    reference = Reference(folder, maps)
    (ids,) = reference.ids(600)
    arguments = engine(folder, maps, enforce_eager=False, plan={"stream": True})
    found, said = run(tmp_path, arguments, [request(ids)], [request(ids, ridgefill=0)])
    assert found, said
    assert_same(found["answers"][0][0], reference.answer(ids))
    assert_same(found["answers"][1][0], reference.answer(ids, filled=False))


def test_off_is_stock_vllm_bit_for_bit(made, tmp_path):
    folder, maps = made("qwen3", "rich")
    reference = Reference(folder, maps)
    prompts = reference.ids(600, 400, 100)
    batch = [request(p, new=30) for p in prompts]
    off = [request(p, new=30, ridgefill=0) for p in prompts]
    stock, said = run(tmp_path, engine(folder, flags=False), batch)
    assert stock, said
    requested, said = run(tmp_path, engine(folder, maps), off)
    assert requested, said
    exact, said = run(tmp_path, engine(folder, plan={"fill": "exact", "split": 3}), batch)
    assert exact, said
    assert requested["answers"] == stock["answers"]
    assert exact["answers"] == stock["answers"]


def test_prompt_logprobs_and_drafts_run_exactly_and_the_log_says_so(made, tmp_path):
    folder, maps = made("llama", "plain")
    reference = Reference(folder, maps)
    (ids,) = reference.ids(600)
    asked = request(ids)
    asked["params"]["prompt_logprobs"] = 1
    found, said = run(tmp_path, engine(folder, maps), [asked])
    assert found, said
    assert "runs exactly: log-probabilities" in said
    exact = reference.answer(ids, filled=False)
    assert_same(found["answers"][0][0], exact)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    arguments = engine(folder, maps, speculative_config=drafts)
    del arguments["logits_processors"]  # vLLM itself refuses them beside drafts
    found, said = run(tmp_path, arguments, [request(ids)])
    assert found, said
    assert "runs exactly: speculative decoding" in said
    assert_same(found["answers"][0][0], exact)


def test_what_cannot_be_served_is_refused_before_the_server_is_up(made, tmp_path):
    folder, maps = made("llama", "plain")
    other, _ = made("qwen3", "rich")
    for arguments, words in (
        (engine(other, maps), "another architecture"),
        (engine(folder, tmp_path / "nothing"), "nothing"),
        (engine(folder, maps, plan={"rows": "probe(0.1)"}), "paged attention"),
        (engine(folder, maps, plan={"tial": 3}), "no setting is named tial"),
        (engine(folder, maps, kv_cache_dtype="fp8"), "fp8"),
    ):
        found, said = run(tmp_path, arguments, [request([1, 2, 3])])
        assert found is None and words in said, said[-2000:]


def test_other_weights_of_the_same_shape_are_refused(made, tmp_path):
    _, maps = made("llama", "plain")
    other = tmp_path / "other"
    tiny_model("llama", seed=1, hidden_size=128, head_dim=32).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    found, said = run(tmp_path, engine(other, maps), [request([1, 2, 3])])
    assert found is None and "other weights" in said, said[-2000:]


@pytest.fixture
def server(made, tmp_path):
    """A live server's address and its log; with the flags that `ridgefill vllm-args` prints."""
    folder, maps = made("llama", "plain")
    counters = tmp_path / "counters"
    counters.mkdir()
    flags = subprocess.run(
        [sys.executable, "-m", "ridgefill.cli", "vllm-args", maps, "--tail", "32", "--leading", "8",
         "--min-tokens", "64"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout.split()  # fmt: skip
    settings = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
                "PROMETHEUS_MULTIPROC_DIR": str(counters)}  # fmt: skip
    log = tmp_path / "server.log"
    port = 8000 + os.getpid() % 1000
    with log.open("w") as to:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
             "--served-model-name", "tiny",
             "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--port", str(port), *flags],
            env={**os.environ, **settings}, stdout=to, stderr=to, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield address, log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ask(address, **body):
    """(status, answer) of a completion."""
    said = {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0.0,
        "prompt": TEXT[:300],
        "ignore_eos": True,
        **body,
    }
    wanted = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(wanted, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_over_http_a_request_chooses_and_a_wrong_one_is_refused(server, tmp_path, capsys):
    address, _ = server

    def rows():
        lines = urllib.request.urlopen(f"{address}/metrics").read().decode().splitlines()
        return {k: float(line.split()[-1]) for line in lines for k in ("filled", "exact")
                if line.startswith(f'ridgefill_prompt_rows_total{{kind="{k}"}}')}  # fmt: skip

    assert ask(address)[0] == 200
    tokens = ask(address)[1]["usage"]["prompt_tokens"]
    before = rows()
    assert before["filled"] >= tokens - 40
    assert ask(address, prompt=TEXT[500:800], vllm_xargs={"ridgefill": 0})[0] == 200
    after = rows()
    assert after["filled"] == before["filled"] and after["exact"] > before["exact"] + 200
    for wrong in ({"ridgefill": "maybe"}, {"ridgefill_tail": 0}, {"ridgefill_tale": 8}):
        status, said = ask(address, vllm_xargs=wrong)
        assert status == 400 and "in a request" in json.dumps(said)
    assert ask(address)[0] == 200  # the server is still up

    from tests.command import call

    out = tmp_path / "serve.json"
    given = ("bench", "serve", address, "--model", "tiny", "--tokens", "600", "--users", "1,3", "--repeats", "2",
             "--texts", ROOT / "docs", "-o", out)  # fmt: skip
    assert call(*given) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())["users"]
    assert [row["users"] for row in found] == [1, 3]
    assert all(400 < cell["tokens"] < 900 for row in found for arm in row["each"].values() for cell in arm)
    assert found[1]["median"]["filled"]["itl_max_ms"] >= found[1]["median"]["filled"]["itl_p50_ms"] > 0
    assert call("bench", "serve", address, "--model", "other", "--tokens", "600", "--users", "1") == 2
    assert "other" in capsys.readouterr().err
