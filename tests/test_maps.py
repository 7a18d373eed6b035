from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from ridgefill.errors import MapsFileError, MapsMismatchError, OutputError, RidgeFillWarning, SettingError
from ridgefill.fit.quantize import dequantize_int8, quantize_int8
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Reading
from ridgefill.rows.token_table import TokenTable
from tests.disk import small_files
from tests.local_hub import local_hub
from tests.tiny import tiny_model, tiny_tokenizer

D = 64
PROVENANCE = {"lambda_rel": 0.03, "rows": 1000, "seed": 0, "held_out": {"2": 0.95, "3": 0.9}}


def make_maps(split=1, layers=(2, 3), seed=0, width=D, **kwargs) -> RidgeMaps:
    generator = torch.Generator().manual_seed(seed)
    maps = {
        layer: AffineMap(
            torch.randn(width, width, generator=generator), torch.randn(width, generator=generator)
        )
        for layer in layers
    }
    return RidgeMaps(split, maps, provenance=PROVENANCE, **kwargs)


def model_of(seed=0, **overrides):
    return tiny_model("llama", seed, num_hidden_layers=4, **overrides)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def equal(a: RidgeMaps, b: RidgeMaps) -> bool:
    return a.maps.keys() == b.maps.keys() and all(
        torch.equal(a.maps[i].weight, b.maps[i].weight) and torch.equal(a.maps[i].bias, b.maps[i].bias)
        for i in a.maps
    )


# --- predict and move


def test_predict_is_the_affine_map_of_every_row():
    maps = make_maps()
    h = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(3))
    a, b = maps.maps[2].weight, maps.maps[2].bias
    assert torch.allclose(maps.predict(2, h), torch.einsum("oi,bti->bto", a, h) + b, atol=1e-5)
    assert maps.predict(1, h) is h
    for missing in (0, 4):
        with pytest.raises(
            MapsMismatchError, match=f"layer {missing}: the maps are for split 1 and layers 2-3"
        ):
            maps.predict(missing, h)


def test_a_map_of_the_split_layer_is_used_where_there_is_one():
    maps = make_maps(split=1, layers=(1, 2))
    h = torch.ones(1, D)
    assert torch.equal(maps.predict(1, h), maps.maps[1](h)) and not torch.equal(maps.predict(1, h), h)


def test_wide_maps_predict_too():
    maps = RidgeMaps(0, {1: AffineMap(torch.randn(D, 3 * D), torch.zeros(D))})
    assert maps.predict(1, torch.randn(2, 7, 3 * D)).shape == (2, 7, D)


def test_to_moves_a_copy_and_predict_keeps_the_state_s_dtype():
    maps = make_maps()
    half = maps.to(dtype=torch.bfloat16)
    assert half.maps[2].weight.dtype == half.maps[3].bias.dtype == torch.bfloat16
    assert maps.maps[2].weight.dtype == torch.float32
    assert half.content_hash == maps.content_hash
    assert half.predict(2, torch.ones(1, D)).dtype == torch.float32
    assert maps.predict(2, torch.ones(1, D, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert maps.to().maps[2].weight is maps.maps[2].weight
    assert maps.to("meta").maps[2].weight.is_meta


@pytest.mark.parametrize("streamed", [False, True])
def test_maps_go_where_the_rows_are_and_streamed_ones_rest_where_they_were(streamed):
    maps = make_maps()
    maps.streamed, hashed = streamed, make_maps().content_hash
    there = maps.predict(
        2, torch.ones(1, D, device="meta", dtype=torch.bfloat16)
    )  # an accelerator of no machine
    assert there.is_meta and there.dtype == torch.bfloat16
    assert maps.maps[2].weight.is_meta == (not streamed) and not maps.maps[3].weight.is_meta
    if streamed:
        assert equal(maps, make_maps())
        assert torch.equal(maps.predict(2, torch.ones(1, D)), make_maps().predict(2, torch.ones(1, D)))
        assert maps.to().streamed
    else:
        assert maps.content_hash == hashed  # it was taken before the map went away


@pytest.mark.parametrize("streamed", [False, True])
def test_the_reduction_goes_where_the_rows_are_as_maps_do(streamed):
    reading = Reading((0, 1), (1,), True, "writes")

    def reduced():
        return RidgeMaps(1, {}, reading=reading, down=torch.ones(2, 3 * D), streamed=streamed)

    maps, hashed = reduced(), reduced().content_hash
    rows = torch.ones(5, D, device="meta", dtype=torch.bfloat16)
    read = maps.read({0: rows, 1: rows})
    assert read.is_meta and read.shape == (5, 2) and read.dtype == torch.bfloat16
    assert maps.down.is_meta == (not streamed)
    assert maps.content_hash == hashed
    if not streamed:
        moved = maps.down
        maps.read({0: rows, 1: rows})
        assert maps.down is moved  # once
    on_host, host = reduced(), torch.ones(5, D)
    assert on_host.read({0: host, 1: host}).shape == (5, 2) and not on_host.down.is_meta


# --- save and load


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_round_trip(tmp_path, encoding):
    identity = ModelIdentity.of(model_of(), tiny_tokenizer())
    maps = make_maps(identity=identity)
    assert maps.save(tmp_path / "new" / "maps", encoding=encoding) == tmp_path / "new" / "maps"
    back = RidgeMaps.load(tmp_path / "new" / "maps")
    expected = {
        "fp32": lambda t: t,
        "bf16": lambda t: t.bfloat16(),
        "int8": lambda t: dequantize_int8(*quantize_int8(t)),
    }[encoding]
    for layer in (2, 3):
        assert torch.equal(back.maps[layer].weight, expected(maps.maps[layer].weight))
    assert torch.equal(back.maps[2].bias, maps.maps[2].bias.to(back.maps[2].bias.dtype))
    assert (back.split, back.identity, back.provenance, back.encoding) == (1, identity, PROVENANCE, encoding)
    # what was loaded is saved again as it was, without loss
    back.save(tmp_path / "again")
    again = RidgeMaps.load(tmp_path / "again")
    assert equal(again, back) and again.content_hash == back.content_hash


def test_files_are_the_published_layout(tmp_path):
    maps = make_maps()
    maps.save(tmp_path / "full")
    assert names(tmp_path / "full") == ["proj.L2.safetensors", "proj.L3.safetensors", "ridgefill.json"]
    tensors = load_file(tmp_path / "full" / "proj.L2.safetensors")
    assert {k: tuple(t.shape) for k, t in tensors.items()} == {"proj.2.weight": (D, D), "proj.2.bias": (D,)}
    maps.save(tmp_path / "small", encoding="int8")
    assert names(tmp_path / "small") == ["proj8.L2.safetensors", "proj8.L3.safetensors", "ridgefill.json"]
    tensors = load_file(tmp_path / "small" / "proj8.L3.safetensors")
    assert {k: t.dtype for k, t in tensors.items()} == {
        "proj.3.codes": torch.int8,
        "proj.3.scale": torch.bfloat16,
        "proj.3.bias": torch.float32,
    }


def test_manifest_says_what_the_folder_is(tmp_path):
    make_maps(identity=ModelIdentity.of(model_of())).save(tmp_path / "m", encoding="int8")
    manifest = json.loads((tmp_path / "m" / "ridgefill.json").read_text())
    assert (manifest["format"], manifest["format_version"], manifest["split"]) == ("ridgefill-maps", 1, 1)
    assert (manifest["encoding"], manifest["dtype"], manifest["group"]) == ("int8", "float32", 128)
    assert manifest["lambda_rel"] == 0.03 and manifest["model"]["hidden"] == D
    for entry in manifest["layers"]:
        data = (tmp_path / "m" / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest() and (entry["d_in"], entry["d_out"]) == (
            D,
            D,
        )
    assert str(tmp_path) not in json.dumps(manifest)


def test_content_hash_tells_maps_apart(tmp_path):
    maps = make_maps()
    assert len(maps.content_hash) == 64
    assert maps.content_hash == make_maps().content_hash
    others = [make_maps(seed=1), make_maps(split=0), make_maps(layers=(2,))]
    assert len({m.content_hash for m in [maps, *others]}) == 4
    hashes = set()
    for i, m in enumerate([maps, *others]):
        m.save(tmp_path / f"{i}")
        hashes.add(RidgeMaps.load(tmp_path / f"{i}").content_hash)
    assert len(hashes) == 4
    maps.provenance["seed"] = 9  # how they were fitted is no part of what they are
    maps.save(tmp_path / "0b")
    assert RidgeMaps.load(tmp_path / "0b").content_hash in hashes


def test_a_split_at_the_last_layer_needs_no_map(tmp_path):
    RidgeMaps(3, {}).save(tmp_path / "m")
    back = RidgeMaps.load(tmp_path / "m")
    assert back.split == 3 and back.maps == {}


def test_a_saved_folder_is_readable_by_others(tmp_path):
    make_maps().save(tmp_path / "m")
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_an_earlier_maps_folder_is_replaced_and_its_other_files_kept(tmp_path):
    folder = tmp_path / "m"
    make_maps(layers=(2, 3)).save(folder)
    (folder / "README.md").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.txt").write_text("x")
    loaded = RidgeMaps.load(folder)
    make_maps(seed=5, layers=(3,)).save(folder, encoding="int8")
    assert names(folder) == ["README.md", "plots", "proj8.L3.safetensors", "ridgefill.json"]
    assert (folder / "README.md").read_text() == "mine" and names(folder / "plots") == ["a.txt"]
    assert names(tmp_path) == ["m"]
    assert equal(loaded, make_maps(layers=(2, 3)))  # tensors read before stay what they were
    loaded.save(folder)
    assert equal(RidgeMaps.load(folder), loaded)


def test_a_foreign_folder_or_file_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="holds other files"):
        make_maps().save(tmp_path / "thesis")
    with pytest.raises(OutputError, match="file of that name"):
        make_maps().save(tmp_path / "file")
    with pytest.raises(OutputError):
        make_maps().save(tmp_path / "file" / "below")
    assert names(tmp_path) == ["file", "thesis"] and names(tmp_path / "thesis") == ["chapter1.txt"]
    (tmp_path / "empty").mkdir()
    make_maps().save(tmp_path / "empty")
    assert equal(RidgeMaps.load(tmp_path / "empty"), make_maps())


def test_a_full_disk_leaves_nothing(tmp_path):
    with pytest.raises(OutputError, match="free some space"), small_files(8192):
        make_maps().save(tmp_path / "m")
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_earlier_maps(tmp_path):
    make_maps(layers=(2,), width=16).save(tmp_path / "m")
    with pytest.raises(OutputError), small_files(8192):
        make_maps().save(tmp_path / "m")
    assert names(tmp_path) == ["m"]
    assert equal(RidgeMaps.load(tmp_path / "m"), make_maps(layers=(2,), width=16))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_is_one_clear_error(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        make_maps().save(tmp_path / "locked" / "m")


def test_what_json_or_int8_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(SettingError, match=r"manifest\.provenance\.a with the maps: JSON cannot hold"):
        RidgeMaps(1, make_maps().maps, provenance={"a": torch.zeros(1)}).save(tmp_path / "m")
    broken = make_maps()
    broken.maps[3].weight[0, 0] = float("nan")
    with pytest.raises(SettingError, match="finite"):
        broken.save(tmp_path / "m", encoding="int8")
    with pytest.raises(SettingError, match="'int4'"):
        make_maps().save(tmp_path / "m", encoding="int4")
    assert names(tmp_path) == []
    RidgeMaps(1, {}, provenance={"score": float("nan"), "grid": (1, 2)}).save(tmp_path / "m")
    assert RidgeMaps.load(tmp_path / "m").provenance == {"score": None, "grid": [1, 2]}


# --- token table, terminal states, preset


def table(n=320, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TokenTable.of(tiny_tokenizer(), torch.randint(0, 50, (n,), generator=g))


def states(layers=(2, 3), seed=0):
    g = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(4, 8, 12, generator=g) for layer in layers}


def test_table_terminal_states_and_preset_are_saved_and_loaded(tmp_path):
    preset = {"name": "quality", "rows": [{"share": 0.25}], "tail": 2048}
    maps = make_maps(tokens=table(), terminal=states(), preset=preset)
    maps.save(tmp_path / "m", encoding="bf16")
    assert names(tmp_path / "m")[2:] == ["ridgefill.json", "terminal.safetensors", "tokens.safetensors"]
    manifest = json.loads((tmp_path / "m" / "ridgefill.json").read_text())
    assert [entry["file"] for entry in manifest["others"]] == ["tokens.safetensors", "terminal.safetensors"]
    for entry in manifest["others"]:
        data = (tmp_path / "m" / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    back = RidgeMaps.load(tmp_path / "m")
    assert back.preset == preset and list(back.terminal) == [2, 3]
    for layer, state in states().items():
        assert torch.equal(back.terminal[layer], state)  # fp32, whatever the maps' encoding
    for name, column in table().tensors().items():
        assert torch.equal(back.tokens.tensors()[name], column)
    make_maps().save(tmp_path / "m")  # maps without them leave none behind
    assert names(tmp_path / "m") == ["proj.L2.safetensors", "proj.L3.safetensors", "ridgefill.json"]


def test_folders_without_them_load_and_have_the_hash_they_had(tmp_path):
    make_maps().save(tmp_path / "m")
    path = tmp_path / "m" / "ridgefill.json"
    manifest = json.loads(path.read_text())
    for name in ("others", "preset", "manifest_sha256"):  # as earlier versions wrote it
        manifest.pop(name)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**manifest, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}))
    back = RidgeMaps.load(tmp_path / "m")
    assert (back.tokens, back.terminal, back.preset) == (None, {}, None)
    files = {entry["file"]: entry["sha256"] for entry in manifest["layers"]}
    text = json.dumps({"split": 1, "files": files}, sort_keys=True, separators=(",", ":"))
    assert back.content_hash == hashlib.sha256(text.encode()).hexdigest()


def test_the_hash_covers_table_and_terminal_states_but_no_preset(tmp_path):
    kinds = [
        make_maps(),
        make_maps(terminal=states()),
        make_maps(terminal=states(seed=1)),
        make_maps(terminal=states((3,))),
        make_maps(tokens=table()),
        make_maps(tokens=table(seed=1)),
    ]
    assert len({m.content_hash for m in kinds}) == len(kinds)
    for i, m in enumerate(kinds):
        m.save(tmp_path / f"{i}")
    assert len({RidgeMaps.load(tmp_path / f"{i}").content_hash for i in range(len(kinds))}) == len(kinds)
    assert make_maps(preset={"name": "pop"}).content_hash == kinds[0].content_hash


def test_terminal_states_move_and_stay_fp32():
    maps = make_maps(terminal=states(), tokens=table(), preset={"name": "quality"})
    moved = maps.to("meta", torch.bfloat16)
    assert moved.terminal[2].is_meta and moved.terminal[2].dtype == torch.float32
    assert moved.tokens is maps.tokens and moved.preset == maps.preset
    assert not maps.terminal[2].is_meta and moved.content_hash == maps.content_hash


@pytest.mark.parametrize("file", ["tokens.safetensors", "terminal.safetensors"])
def test_damaged_tables_and_states_are_named(tmp_path, file):
    maps = make_maps(tokens=table(), terminal=states())
    path = maps.save(tmp_path / "m") / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(MapsFileError, match=f"{file} is truncated or altered"):
        RidgeMaps.load(tmp_path / "m")
    path.unlink()
    with pytest.raises(MapsFileError, match=f"{file} is missing"):
        RidgeMaps.load(tmp_path / "m")
    for wrong in (
        {"terminal.x": torch.zeros(1, 2, 3)},
        {"terminal.2": torch.zeros(2, 3)},
        {"terminal.2": torch.full((1, 2, 3), float("nan"))},
        {"terminal.2": torch.zeros(1, 2, 3).bfloat16()},
        {"classes": torch.zeros(3)},
    ):
        save_file(wrong, path)
        entries = json.loads((tmp_path / "m" / "ridgefill.json").read_text())["others"]
        for entry in entries:
            entry["sha256"] = hashlib.sha256((tmp_path / "m" / entry["file"]).read_bytes()).hexdigest()
        edit(tmp_path / "m", sign=True, others=entries)
        with pytest.raises(MapsFileError, match=file):
            RidgeMaps.load(tmp_path / "m")
    edit(tmp_path / "m", sign=True, others=[{"file": "../m/tokens.safetensors", "sha256": "0"}])
    with pytest.raises(MapsFileError, match="names it wrongly"):
        RidgeMaps.load(tmp_path / "m")


def test_a_full_disk_leaves_no_table_behind(tmp_path):
    with pytest.raises(OutputError), small_files(30_000):
        make_maps(terminal={2: torch.zeros(4, 64, 64)}).save(tmp_path / "m")
    assert names(tmp_path) == []


def test_a_preset_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"manifest\.preset\.a"):
        make_maps(preset={"a": torch.zeros(1)}).save(tmp_path / "m")
    assert names(tmp_path) == []


def test_tables_and_states_of_another_model_are_refused():
    hybrid = tiny_model("qwen3_next", num_hidden_layers=4)
    make = partial(make_maps, identity=ModelIdentity.of(hybrid))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tokens=table(), terminal=states((3,))).check_model(hybrid)  # layers 0, 1 and 3 are recurrent
    with pytest.raises(MapsMismatchError, match="token table has 300 tokens, and the model 320"):
        make(tokens=table(300)).check_model(hybrid)
    for layers, named in (((2, 3), "2"), ((0, 3), "0"), ((3, 4), "4")):
        with pytest.raises(MapsMismatchError, match=f"terminal states of layers {named}, which"):
            make(terminal=states(layers)).check_model(hybrid)


# --- which folder


def test_a_parent_of_one_maps_folder_will_do(tmp_path):
    with pytest.raises(MapsFileError, match=r"holds ridgefill\.json"):
        RidgeMaps.load(tmp_path)
    make_maps().save(tmp_path / "split-1")
    (tmp_path / "notes").mkdir()
    assert equal(RidgeMaps.load(tmp_path), make_maps())
    make_maps(split=0).save(tmp_path / "split-0")
    with pytest.raises(MapsFileError, match="several maps folders: split-0, split-1"):
        RidgeMaps.load(tmp_path)
    assert RidgeMaps.load(tmp_path / "split-0").split == 0
    assert RidgeMaps.from_pretrained(str(tmp_path / "split-1")).split == 1


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    with local_hub(monkeypatch) as hub:
        with pytest.raises(MapsFileError, match="no such folder"):
            RidgeMaps.load(name)
        assert hub.requests == []


def test_from_pretrained_takes_no_model_settings(tmp_path):
    with pytest.raises(SettingError, match="device_map"):
        RidgeMaps.from_pretrained(tmp_path, device_map="auto")


# --- damage


@pytest.fixture
def saved(tmp_path) -> Path:
    return make_maps(identity=ModelIdentity.of(model_of())).save(tmp_path / "m")


def test_a_flipped_byte_is_found_wherever_it_is(saved):
    file = saved / "proj.L3.safetensors"
    data = file.read_bytes()
    for at in (0, 20, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(MapsFileError, match=r"proj\.L3\.safetensors is truncated or altered"):
            RidgeMaps.load(saved)
    file.write_bytes(data)
    RidgeMaps.load(saved)


def test_a_truncated_or_missing_file_is_named(saved):
    file = saved / "proj.L2.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MapsFileError, match=r"proj\.L2\.safetensors is truncated"):
        RidgeMaps.load(saved)
    file.unlink()
    with pytest.raises(MapsFileError, match=r"proj\.L2\.safetensors is missing"):
        RidgeMaps.load(saved)


def edit(folder: Path, sign=False, **changes) -> None:
    """Edits the manifest; with ``sign``, its own hash is made to fit, as a careless writer would."""
    path = folder / "ridgefill.json"
    manifest = {**json.loads(path.read_text()), **changes}
    if sign:
        rest = {k: v for k, v in manifest.items() if k != "manifest_sha256"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        manifest["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("change", [{"split": 0}, {"lambda_rel": 0.1}, {"model": None}, {"extra": 1}])
def test_an_edited_manifest_is_found(saved, change):
    edit(saved)  # other white space is no edit
    RidgeMaps.load(saved)
    edit(saved, **change)
    with pytest.raises(MapsFileError, match=r"ridgefill\.json was altered"):
        RidgeMaps.load(saved)


def test_an_unknown_format_version_is_refused(saved):
    edit(saved, format_version=3)
    with pytest.raises(MapsFileError, match="format version is 3, and this ridgefill reads up to 2"):
        RidgeMaps.load(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_manifest_that_is_no_json_object_is_refused(saved, text):
    (saved / "ridgefill.json").write_text(text)
    with pytest.raises(MapsFileError, match=r"ridgefill\.json cannot be read"):
        RidgeMaps.load(saved)


def test_a_manifest_with_a_right_hash_but_wrong_content_is_refused(saved):
    layers = json.loads((saved / "ridgefill.json").read_text())["layers"]
    wrong = [
        {"layers": None},
        {"layers": [{"layer": 2}]},
        {"split": "one"},
        {"model": {"name": "x"}},
        {"layers": [{**layers[0], "file": "../m/proj.L2.safetensors"}]},
        {"layers": [{**layers[0], "d_in": 128}]},
        {"layers": [{**layers[0], "layer": 3}]},
    ]
    original = (saved / "ridgefill.json").read_text()
    for change in wrong:
        (saved / "ridgefill.json").write_text(original)
        edit(saved, sign=True, **change)
        with pytest.raises(MapsFileError):
            RidgeMaps.load(saved)
    (saved / "ridgefill.json").write_text(original)
    edit(saved, sign=True, split=0)  # `edit` signs rightly, so the refusals above are for the content
    assert RidgeMaps.load(saved).split == 0


# --- the published layout


def publish(folder: Path, maps: RidgeMaps, int8=False, **manifest) -> None:
    """Writes the published layout as FACTS describes it, with none of our code for folders."""
    folder.mkdir()
    for layer, m in maps.maps.items():
        if int8:
            codes, scale = quantize_int8(m.weight)
            tensors = {"codes": codes, "scale": scale, "bias": m.bias}
        else:
            tensors = {"weight": m.weight.bfloat16(), "bias": m.bias.bfloat16()}
        name = f"proj{'8' if int8 else ''}.L{layer}.safetensors"
        save_file({f"proj.{layer}.{k}": t for k, t in tensors.items()}, folder / name)
    (folder / "ridgefill.json").write_text(json.dumps({"model_id": "org/other", **manifest}))


@pytest.mark.parametrize("int8", [False, True])
def test_published_maps_load_with_a_warning(tmp_path, int8):
    maps = make_maps(split=2, layers=(2, 3))
    publish(tmp_path / "p", maps, int8)
    with pytest.warns(RidgeFillWarning, match="name no model and carry no hashes"):
        back = RidgeMaps.load(tmp_path / "p")
    assert back.split == 2 and back.identity is None and set(back.maps) == {2, 3}
    assert back.encoding == ("int8" if int8 else "bf16")
    expected = (
        dequantize_int8(*quantize_int8(maps.maps[3].weight)) if int8 else maps.maps[3].weight.bfloat16()
    )
    assert torch.equal(back.maps[3].weight, expected)
    assert not torch.equal(back.predict(2, torch.ones(1, D)), torch.ones(1, D))  # its own map of the split
    with pytest.warns(RidgeFillWarning, match="name no model"):
        back.check_model(model_of())
    with pytest.raises(MapsMismatchError, match="64 x 64, and the model's states are 32 wide"):
        back.check_model(model_of(hidden_size=32))


def test_maps_are_compared_with_what_the_model_s_layers_read(monkeypatch):
    wide = {layer: AffineMap(torch.zeros(D, 4 * D), torch.zeros(D)) for layer in (2, 3)}
    maps = RidgeMaps(1, wide, ModelIdentity.of(model_of()))
    with pytest.raises(MapsMismatchError, match="layer 2 is 64 x 256, and the model's states are 64 wide"):
        maps.check_model(model_of())
    monkeypatch.setattr(Decoder, "width_in", 4 * D, raising=False)  # as if four streams entered each layer
    maps.check_model(model_of())
    with pytest.raises(MapsMismatchError, match=r"64 x 64, and .* are 256 wide and its layers' inputs 64"):
        make_maps(identity=maps.identity).check_model(model_of())


@pytest.mark.parametrize(("stated", "split"), [({"split_layer": 1}, 1), ({"split_seed": 42}, 2), ({}, 2)])
def test_published_split(tmp_path, stated, split):
    publish(tmp_path / "p", make_maps(layers=(2, 3)), **stated)
    with pytest.warns(RidgeFillWarning):
        assert RidgeMaps.load(tmp_path / "p").split == split


def test_damaged_published_maps_are_refused_by_name(tmp_path):
    publish(tmp_path / "p", make_maps())
    file = tmp_path / "p" / "proj.L3.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(MapsFileError, match=r"proj\.L3\.safetensors cannot be read"):
        RidgeMaps.load(tmp_path / "p")
    save_file({"proj.3.weight": torch.zeros(2, 2), "proj.3.bias": torch.zeros(3)}, file)
    with pytest.raises(MapsFileError, match="no affine map"):
        RidgeMaps.load(tmp_path / "p")
    save_file({"proj.3.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(MapsFileError, match=r"holds no tensor 'proj\.3\.bias'"):
        RidgeMaps.load(tmp_path / "p")
    for path in (tmp_path / "p").glob("proj*"):
        path.unlink()
    with pytest.raises(MapsFileError, match="not in a known format"):
        RidgeMaps.load(tmp_path / "p")


# --- check_model


def test_the_model_they_were_fitted_on_passes_silently():
    maps = make_maps(identity=ModelIdentity.of(model_of(), tiny_tokenizer()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps.check_model(model_of(), tiny_tokenizer())
        maps.check_model(model_of())


def test_another_model_is_refused_and_both_are_named():
    identity = replace(ModelIdentity.of(model_of(), tiny_tokenizer()), name="org/mine")
    maps = make_maps(identity=identity)
    for other, words in [
        (model_of(seed=1), "other weights"),
        (tiny_model("qwen3", num_hidden_layers=4), "another architecture"),
        (model_of(hidden_size=32), "another hidden width"),
        (tiny_model("llama"), "another number of layers"),
        (model_of(num_key_value_heads=1), "another key/value heads"),
        (model_of(vocab_size=328), "another vocabulary size"),
    ]:
        with pytest.raises(MapsMismatchError, match=words) as caught:
            maps.check_model(other)
        assert (
            "org/mine, split 1, layers 2-3" in str(caught.value) and "ridgefill fit" in caught.value.instead
        )
    longer = tiny_tokenizer()
    longer.add_tokens(["<new>"])
    with pytest.raises(MapsMismatchError, match="another tokenizer"):
        maps.check_model(model_of(), longer)


@pytest.mark.parametrize("identified", [False, True])
@pytest.mark.parametrize(("split", "layers"), [(1, (2, 4)), (4, ()), (-1, (2,)), (2, (1, 3))])
def test_layers_outside_the_model_are_refused(split, layers, identified):
    identity = ModelIdentity.of(model_of()) if identified else None
    with pytest.raises(MapsMismatchError, match="do not lie in the model's layers 0-3"):
        make_maps(split, layers, identity=identity).check_model(model_of())


def test_a_copy_in_another_dtype_name_or_quantization_only_warns():
    maps = make_maps(identity=replace(ModelIdentity.of(model_of()), name="mine"))
    model = copy.deepcopy(model_of()).to(torch.bfloat16)
    model.config._name_or_path = "org/yours"
    with pytest.warns(RidgeFillWarning) as caught:
        maps.check_model(model)
    assert len(caught) == 1
    assert "another name (org/yours, not mine); another dtype (bfloat16, not float32)" in str(
        caught[0].message
    )


# --- the hub


def test_push_and_pull_give_equal_maps(tmp_path, monkeypatch):
    identity = replace(ModelIdentity.of(model_of(), tiny_tokenizer()), name="org/base")
    maps = make_maps(identity=identity, encoding="bf16")
    with local_hub(monkeypatch) as hub:
        maps.push_to_hub("me/fill-maps", token="hf_local")
        pushed = hub.files("me/fill-maps")
        assert sorted(pushed) == [
            "README.md",
            "proj.L2.safetensors",
            "proj.L3.safetensors",
            "ridgefill.json",
        ]
        cache = tmp_path / "cache"
        back = RidgeMaps.from_pretrained("me/fill-maps", cache_dir=cache, token="hf_local")
        assert equal(back, maps.to(dtype=torch.bfloat16))
        assert (back.identity, back.provenance, back.split) == (identity, PROVENANCE, 1)
        back.check_model(replace_name(model_of(), "org/base"), tiny_tokenizer())
        assert any(line.startswith("POST /api/models/me/fill-maps/commit/") for line in hub.requests)
        # a second push replaces the first, and a revision still gives the first
        first = hub.repos["me/fill-maps"][-1][0]
        make_maps(seed=4).push_to_hub("me/fill-maps", token="hf_local")
        assert equal(RidgeMaps.load("me/fill-maps", cache_dir=cache), make_maps(seed=4))
        assert equal(RidgeMaps.load("me/fill-maps", cache_dir=cache, revision=first), back)
        asked = len(hub.requests)
        offline = RidgeMaps.from_pretrained("me/fill-maps", cache_dir=cache, local_files_only=True)
        assert equal(offline, make_maps(seed=4)) and len(hub.requests) == asked


def replace_name(model, name):
    model.config._name_or_path = name
    return model


def test_the_card_says_what_the_maps_are(tmp_path):
    identity = replace(ModelIdentity.of(model_of()), name="org/base")
    maps = make_maps(identity=identity)
    maps.save_pretrained(tmp_path / "m")
    assert names(tmp_path / "m") == [
        "README.md",
        "proj.L2.safetensors",
        "proj.L3.safetensors",
        "ridgefill.json",
    ]
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.library_name == "ridgefill" and card.data.base_model == "org/base"
    assert "org/base, split 1" in card.text and "layer 2-3" in card.text
    assert 'RidgeMaps.from_pretrained("' in card.text
    assert equal(RidgeMaps.from_pretrained(tmp_path / "m"), maps)


def test_a_card_without_a_hub_name_claims_no_base_model():
    maps = make_maps(identity=replace(ModelIdentity.of(model_of()), name="my-folder"))
    card = maps.generate_model_card(repo_id="me/maps")
    assert card.data.base_model is None and "my-folder, split 1" in card.text
    assert 'from_pretrained("me/maps")' in card.text
    assert "not named" in make_maps().generate_model_card().text


def test_hub_failures_are_one_clear_error(tmp_path, monkeypatch):
    with local_hub(monkeypatch) as hub:
        with pytest.raises(MapsFileError, match=r"load maps from me/nothing: .*the hub did not give it"):
            RidgeMaps.load("me/nothing", cache_dir=tmp_path)
        hub.repos["me/other"] = []
        hub.commit("me/other", {"config.json": b"{}", "model.safetensors": b"many gigabytes"})
        with pytest.raises(
            MapsFileError, match=r"from me/other: that hub repository holds no ridgefill\.json"
        ):
            RidgeMaps.load("me/other", cache_dir=tmp_path)
        assert not any("model.safetensors" in line for line in hub.requests)
        with pytest.raises(MapsFileError, match="me/other"):
            RidgeMaps.load("me/other", cache_dir=tmp_path, revision="no-such-branch")
        make_maps().push_to_hub("me/maps", token="hf_local")
        files = dict(hub.files("me/maps"))
        files["proj.L2.safetensors"] = files["proj.L2.safetensors"][:-1] + b"\x7f"
        hub.commit("me/maps", files)
        with pytest.raises(MapsFileError, match=r"proj\.L2\.safetensors is truncated or altered"):
            RidgeMaps.load("me/maps", cache_dir=tmp_path)
    with pytest.raises(MapsFileError, match="the hub did not give it"):
        RidgeMaps.load("me/maps", cache_dir=tmp_path / "empty", local_files_only=True)


def test_a_repository_with_a_folder_per_split_names_them(tmp_path, monkeypatch):
    with local_hub(monkeypatch) as hub:
        hub.repos["me/many"] = []
        files = {}
        for split in (0, 1):
            folder = make_maps(split=split).save(tmp_path / f"split-{split}")
            files |= {f"split-{split}/{p.name}": p.read_bytes() for p in folder.iterdir()}
        hub.commit("me/many", files)
        with pytest.raises(MapsFileError, match="several maps folders: split-0, split-1"):
            RidgeMaps.load("me/many", cache_dir=tmp_path / "cache")
