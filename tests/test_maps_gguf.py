"""Maps as one GGUF file: what comes back, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from ridgefill.errors import MapsFileError, SettingError
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.maps_gguf import load_gguf, load_maps, save_gguf
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Reading

from .command import call

IDENTITY = ModelIdentity("tiny", "llama", 64, 4, None, 4, 2, 16, 260, "float32", sketch=(0.5,) * 32)


def maps(width=64):
    torch.manual_seed(0)
    each = {i: AffineMap(torch.randn(width, width), torch.randn(width)) for i in (2, 3)}
    return RidgeMaps(1, each, IDENTITY, {"lambda_rel": 0.01, "fitted_documents": ["a"]}, preset={"tail": 32})


def test_a_file_gives_back_the_maps_to_q8_0s_error(tmp_path):
    ours = maps()
    found = load_gguf(save_gguf(ours, tmp_path / "maps.gguf"))
    assert found.split == 1 and found.identity == IDENTITY and found.preset == {"tail": 32}
    assert found.provenance == ours.provenance and found.content_hash.startswith(ours.content_hash)
    for layer, m in ours.maps.items():
        gap = (found.maps[layer].weight - m.weight).abs().reshape(-1, 32)
        # half a step of the block's scale, and up to 127 times the rounding of that scale to f16
        assert (gap.amax(1) <= m.weight.reshape(-1, 32).abs().amax(1) / 127 * 0.57).all()
        assert torch.equal(found.maps[layer].bias, m.bias)


def test_what_rich_maps_read_and_share_comes_back(tmp_path):
    reading, g = Reading((0, 1), (1,), True, "writes"), torch.Generator().manual_seed(0)
    each = {2: AffineMap(torch.randn(32, 64, generator=g), torch.randn(32, generator=g))}
    ours = RidgeMaps(1, each, IDENTITY, reading=reading, down=torch.randn(64, 192, generator=g))
    found = load_gguf(save_gguf(ours, tmp_path / "m.gguf"))
    assert found.reading == reading and found.maps.keys() == {2}
    assert torch.allclose(found.down, ours.down, atol=0.02)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["ridgefill.format"].contents() == 2  # older versions refuse it
    assert load_gguf(save_gguf(maps(), tmp_path / "plain.gguf")).reading.is_plain


def test_writing_it_again_changes_nothing(tmp_path):
    first = load_gguf(save_gguf(maps(), tmp_path / "a.gguf"))
    second = load_gguf(save_gguf(first, tmp_path / "b.gguf"))
    assert all(torch.equal(first.maps[i].weight, second.maps[i].weight) for i in first.maps)


def test_an_odd_width_stays_fp32(tmp_path):
    ours = RidgeMaps(1, {2: AffineMap(torch.randn(20, 20), torch.randn(20))})
    assert torch.equal(load_maps(save_gguf(ours, tmp_path / "m.gguf")).maps[2].weight, ours.maps[2].weight)


def test_the_metadata_names_model_split_and_hashes(tmp_path):
    ours = maps()
    fields = gguf.GGUFReader(save_gguf(ours, tmp_path / "m.gguf")).fields
    read = {key: field.contents() for key, field in fields.items()}
    assert read["ridgefill.split"] == 1 and read["ridgefill.maps_hash"] == ours.content_hash
    assert '"name": "tiny"' in read["ridgefill.model"] and len(read["ridgefill.tensors_sha256"]) == 64


def test_an_altered_file_is_refused(tmp_path):
    path = save_gguf(maps(), tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    with pytest.raises(MapsFileError, match="altered"):
        load_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf at all, but longer than a header" * 9])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(MapsFileError, match="damaged"):
        load_gguf(tmp_path / "m.gguf")


def test_a_models_file_is_no_maps(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(MapsFileError, match="'llama', not maps"):
        load_gguf(tmp_path / "m.gguf")


def test_maps_that_are_not_finite_are_refused(tmp_path):
    bad = RidgeMaps(1, {2: AffineMap(torch.full((32, 32), torch.inf), torch.zeros(32))})
    with pytest.raises(SettingError, match="not finite"):
        save_gguf(bad, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_the_command_writes_it(tmp_path, capsys):
    folder = maps().save(tmp_path / "maps")
    assert call("export-gguf", folder, "-o", tmp_path / "m.gguf") == 0
    assert load_gguf(tmp_path / "m.gguf").split == 1
    assert call("export-gguf", tmp_path / "nothing", "-o", tmp_path / "n.gguf") == 2
