"""The main job on the real default model (`make test-real`; fetches it once, takes minutes)."""

import pytest
import torch

import ridgefill
from ridgefill import embedded
from ridgefill.check import check, compare_with_stock
from ridgefill.eval.documents import held_out_documents
from ridgefill.models.decoder import Decoder

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def loaded():
    return ridgefill.load_model(embedded.default_model())


@pytest.fixture(scope="module")
def document(loaded):
    return held_out_documents(loaded[1], embedded.held_out(), 2048, 1)[0]


@pytest.fixture(scope="module")
def maps(loaded, tmp_path_factory):
    texts = list(embedded.texts().values())
    out = tmp_path_factory.mktemp("maps")
    return ridgefill.fit(*loaded, texts, [0.5], out, tokens=12288, length=2048, progress=False)[15]


@pytest.mark.parametrize("split", [8, 15, 29])
def test_off_is_exact_and_so_is_writing_from_true_inputs(loaded, document, split):
    assert all(v.holds for v in compare_with_stock(Decoder(loaded[0]), split, document))


def test_maps_are_far_better_than_the_identity_fill(loaded, maps):
    found = check(
        *loaded, maps, embedded.held_out(), tail=512, leading=16, tokens=2048, documents=2, needles=0, timing=False
    )  # fmt: skip
    assert found.correct and found.verdict in ("safe", "care")
    assert found.delta("ridge") < 0.5 * found.delta("identity")


def test_the_leading_rows_hold_what_no_map_predicts(loaded, maps, document):
    with torch.no_grad():
        model = loaded[0]
        cost = {}
        for leading in (0, 16):
            with ridgefill.filling(model, maps, tail=512, leading=leading, min_tokens=1):
                filled = model(input_ids=document, use_cache=True, logits_to_keep=1).logits
            exact = model(input_ids=document, use_cache=True, logits_to_keep=1).logits
            p, q = exact[0, -1].log_softmax(-1), filled[0, -1].log_softmax(-1)
            cost[leading] = float((p.exp() * (p - q)).sum())
    assert cost[16] < cost[0]


def test_the_saved_maps_give_the_same_tokens(loaded, maps, document, tmp_path):
    model = loaded[0]
    again = ridgefill.RidgeMaps.load(maps.save(tmp_path / "maps"))
    out = []
    for each in (maps, again):
        with ridgefill.filling(model, each, tail=512, min_tokens=1, tokenizer=loaded[1]) as f:
            out.append(model.generate(document, max_new_tokens=8, do_sample=False))
        assert f.stats.filled == 2048 - 512 - 16
    assert torch.equal(*out)
