"""The setting file: written whole, read back as it was, refused by name, and maps told from other maps."""

from __future__ import annotations

import json

import pytest
import torch

import ridgefill
from ridgefill.correct import ValueRescale
from ridgefill.errors import MapsFileError, MapsMismatchError, OutputError, SettingError
from ridgefill.fill import Identity, TrueInputs
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.identity import ModelIdentity
from ridgefill.plan import FillPlan, make_plan
from ridgefill.settings_file import SettingFile, beside
from tests.tiny import tiny_model, tiny_tokenizer


def maps_of(model, scale=1.0, preset=None):
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    each = {i: AffineMap(scale * torch.eye(width), torch.zeros(width)) for i in range(4, layers)}
    return RidgeMaps(3, each, ModelIdentity.of(model, tiny_tokenizer()), preset=preset)


@pytest.fixture
def written(tmp_path):
    """A setting file beside its maps: (folder, model, plan)."""
    model = tiny_model()
    maps = RidgeMaps.load(maps_of(model, preset={"tail": 9, "rows": "special"}).save(tmp_path / "maps" / "a"))
    plan = make_plan(6, maps, tail=32, leading=4, rows="none", corrections="value_rescale(8, 0.5)")
    made = SettingFile.of(plan, beside(tmp_path / "maps" / "a", tmp_path), maps, {"n": 3}, min_tokens=50)
    made.write(tmp_path / "ridgefill-setting.json")
    return tmp_path, model, plan


def test_it_is_read_back_as_it_was_and_gives_the_same_plan(written):
    folder, model, plan = written
    found = SettingFile.read(folder / "ridgefill-setting.json")
    assert (found.maps, found.min_tokens, found.evidence) == ("./maps/a", 50, {"n": 3})
    assert found.ridgefill == ridgefill.__version__ and found.format == 1
    maps = found.load_maps(folder)
    assert maps.content_hash == found.maps_hash
    again = make_plan(6, maps, **found.arguments())
    assert again.to_json() == plan.to_json() and again.corrections == (ValueRescale(8, 0.5),)
    assert again.rows is None  # though the maps' own preset names some
    with ridgefill.filling(model, maps, **found.arguments(), min_tokens=found.min_tokens) as active:
        model(torch.randint(256, (1, 60)), logits_to_keep=1)
    assert active.stats.filled == 60 - 32 - 4
    text = (folder / "ridgefill-setting.json").read_text()
    assert next(iter(json.loads(text))) == "format" and str(folder) not in text


def test_rows_are_kept_in_words(tmp_path):
    plan = make_plan(6, None, fill="identity", split=2, tail=8, rows="random(0.10) | special")
    made = SettingFile.of(plan, None, None, {})
    found = SettingFile.read(made.write(tmp_path / "s.json"))
    assert found == made and found.load_maps() is None and found.maps_hash is None
    assert make_plan(6, None, **found.arguments()) == plan


def test_the_folder_can_move_with_its_maps(written, tmp_path_factory):
    folder, _, _ = written
    moved = tmp_path_factory.mktemp("moved") / "there"
    folder.rename(moved)
    assert SettingFile.read(moved / "ridgefill-setting.json").load_maps(moved).split == 3


def test_other_maps_and_no_maps_are_refused(written):
    folder, model, _ = written
    found = SettingFile.read(folder / "ridgefill-setting.json")
    with pytest.raises(MapsFileError, match="gone"):
        found.load_maps(folder / "maps")
    maps_of(model, scale=0.5).save(folder / "maps" / "a")
    with pytest.raises(MapsMismatchError, match="other maps"):
        found.load_maps(folder)


def test_maps_elsewhere_are_named_absolutely_and_hub_names_stay(tmp_path):
    (tmp_path / "maps").mkdir()
    assert beside(tmp_path / "maps", tmp_path / "out") == str(tmp_path / "maps")
    assert beside("org/name", tmp_path) == "org/name"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format is 2"),
        ({"format": None}, "format is None"),
        ({"tails": 3}, "unknown key tails"),
        ({"split": None}, "its split is a layer from 1, not None"),
        ({"split": True}, "split is a layer"),
        ({"tail": 0}, "tail counts"),
        ({"leading": -1}, "leading counts"),
        ({"min_tokens": 0}, "min_tokens counts"),
        ({"fill": "pop"}, "fill is one of"),
        ({"fill": ["ridge"]}, "fill is one of"),
        ({"maps": None}, "needs maps"),
        ({"maps": 3}, "maps is a path"),
        ({"rows": "nonsense(1)"}, "no rows called 'nonsense'"),
        ({"corrections": "nonsense"}, "is none"),
        ({"corrections": None}, "corrections is text"),
        ({"evidence": []}, "evidence is an object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(written, change, said):
    path = written[0] / "ridgefill-setting.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SettingError) as error:
        SettingFile.read(path)
    assert said in str(error.value)


def test_missing_keys_and_files_that_are_none(written):
    path = written[0] / "ridgefill-setting.json"
    whole = json.loads(path.read_text())
    del whole["tail"], whole["rows"]
    path.write_text(json.dumps(whole))
    with pytest.raises(SettingError, match="lacks tail, rows"):
        SettingFile.read(path)
    for text, said in (("{", "not JSON"), ("[]", "no JSON object")):
        path.write_text(text)
        with pytest.raises(SettingError, match=said):
            SettingFile.read(path)
    for other in (written[0], written[0] / "none.json"):
        with pytest.raises(SettingError, match="name a file that tune wrote"):
            SettingFile.read(other)


def test_a_plan_that_no_file_can_hold_is_refused_when_written():
    with pytest.raises(SettingError, match="fill is one of"):
        SettingFile.of(FillPlan(TrueInputs(), 2), None, None, {})


def test_nothing_half_written_is_left(tmp_path):
    made = SettingFile.of(FillPlan(Identity(), 2), None, None, {"bad": float("nan")})
    with pytest.raises(ValueError):
        made.write(tmp_path / "s.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        SettingFile.of(FillPlan(Identity(), 2), None, None, {}).write(tmp_path / "file" / "s.json")
