"""The setting file: one plan, the maps that it needs and the evidence for it, as ``ridgefill tune`` writes it.

{"format": 1, "maps": "./maps/split-15", "maps_hash": "...", "fill": "ridge", "split": 15, "tail": 1024,
 "leading": 16, "rows": "spans(peak, 0.05)", "corrections": "", "min_tokens": null, "evidence": {...},
 "ridgefill": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgefill.errors import MapsFileError, MapsMismatchError, SettingError
from ridgefill.files import write_json

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps
    from ridgefill.plan import FillPlan

FORMAT = 1
SETTING_FILE = "ridgefill-setting.json"
FILLS = ("ridge", "identity", "none", "exact")
_ADVICE = "write it again with `ridgefill tune`, or mend it by hand"


@dataclass(frozen=True)
class SettingFile:
    """One way to prefill one model.

    Attributes:
        maps: a folder (absolute, or "./..." or "../..." from the setting file's own folder), a hub name, or None.
        maps_hash: content hash of the maps; others are refused. None if there are no maps, or any will do.
        fill: "ridge", "identity", "none" or "exact".
        split: the first late layer.
        tail, leading: last and first prompt tokens that run every layer.
        rows: the selector in words (`ridgefill.rows.parse_rows`), or None.
        corrections: in words, or "".
        min_tokens: shorter prompts run exactly; None leaves it to what is known of the machine.
        evidence: what was measured; for readers, nothing goes by it.
        ridgefill: version that wrote it.
        format: of the file.
    """

    maps: str | None
    maps_hash: str | None
    fill: str
    split: int
    tail: int
    leading: int
    rows: str | None = None
    corrections: str = ""
    min_tokens: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ridgefill: str = ""
    format: int = FORMAT

    @classmethod
    def of(
        cls,
        plan: FillPlan,
        maps_path: str | Path | None,
        maps: RidgeMaps | None,
        evidence: Mapping[str, Any],
        *,
        min_tokens: int | None = None,
    ) -> SettingFile:
        """The file of a plan.

        Args:
            maps_path: where ``maps`` were loaded from: `beside` names a folder so that both can move together.
            maps: their content hash is kept.

        Raises:
            SettingError: a plan of the ridge fill without maps, or an arm that is for tests alone.
        """
        from ridgefill import __version__
        from ridgefill.correct.parse import written

        made = cls(
            None if maps_path is None else str(maps_path),
            None if maps is None else maps.content_hash,
            plan.fill.name,
            plan.split,
            plan.tail,
            plan.leading,
            None if plan.rows is None else str(plan.rows),
            written(plan.corrections),
            min_tokens,
            dict(evidence),
            __version__,
        )
        _check(asdict(made), "a setting file of this plan")
        return made

    @classmethod
    def read(cls, path: str | Path) -> SettingFile:
        """Reads a setting file.

        Raises:
            SettingError: it is missing, not JSON, of an unknown format, or has a key or value that is not known.
        """
        asked = f"read the setting file {path}"
        try:
            found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(asked, error.strerror or str(error), "name a file that tune wrote") from error
        except ValueError as error:
            raise SettingError(asked, "it is not JSON", _ADVICE) from error
        if not isinstance(found, dict):
            raise SettingError(asked, "it is no JSON object", _ADVICE)
        if found.get("format") != FORMAT:
            why = f"its format is {found.get('format')!r}, and this version reads {FORMAT}"
            raise SettingError(asked, why, "read it with the version that wrote it, or tune again")
        _check(found, asked)
        return cls(**found)

    def write(self, path: str | Path) -> Path:
        """Writes the file, whole or not at all, and returns its path.

        Raises:
            OutputError: no room, or the place is not writable.
            TypeError, ValueError: the evidence is not strict JSON.
        """
        found = asdict(self)
        write_json(path, {"format": found.pop("format"), **found})
        return Path(path)

    def load_maps(self, base: str | Path = ".") -> RidgeMaps | None:
        """The maps, on the CPU; None if the setting needs none.

        Args:
            base: the setting file's folder, from which a relative path counts.

        Raises:
            MapsFileError: the maps are gone, or damaged.
            MapsMismatchError: other maps lie there than those that the setting was measured with.
        """
        from ridgefill.maps import RidgeMaps
        from ridgefill.maps_hub import HUB_NAME

        if self.maps is None:
            return None
        path = Path(base).expanduser() / Path(self.maps).expanduser()
        on_hub = not path.exists() and HUB_NAME.fullmatch(self.maps) is not None
        if not on_hub and not path.exists():
            raise MapsFileError(
                f"the setting's maps {self.maps}",
                "they are gone from there",
                "put the maps folder back, mend the path in the setting file, or tune again",
            )
        found = RidgeMaps.load(self.maps if on_hub else path)
        if self.maps_hash is not None and found.content_hash != self.maps_hash:
            raise MapsMismatchError(
                f"the setting's maps {self.maps}",
                "they are other maps than those that the setting was measured with",
                "put those back, or tune again with these",
            )
        return found

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `make_plan`, `ridgefill.filling` and `ridgefill.prefill`; ``min_tokens`` is apart.

        Everything is named, so that nothing comes from a preset that the maps carry.
        """
        return {
            "fill": self.fill,
            "split": self.split,
            "tail": self.tail,
            "leading": self.leading,
            "rows": "none" if self.rows is None else self.rows,
            "corrections": self.corrections,
        }


def with_setting(
    setting: str | Path | None, maps: RidgeMaps | None, given: Mapping[str, Any]
) -> tuple[RidgeMaps | None, dict[str, Any], int | None]:
    """Maps, settings for `make_plan` and ``min_tokens``: a setting file's, where nothing else is named.

    Args:
        setting: the file, or None.
        maps: take precedence over the file's.
        given: keyword arguments of `make_plan`; those that are not None take precedence too. A preset named beside
            the file stands for all of it but the maps.

    Raises:
        SettingError, MapsFileError, MapsMismatchError: as `SettingFile.read` and `SettingFile.load_maps`.
    """
    if setting is None:
        return maps, dict(given), None
    read = SettingFile.read(setting)
    maps = read.load_maps(Path(setting).expanduser().parent) if maps is None else maps
    named = {key: value for key, value in given.items() if value is not None}
    if "preset" in named:
        return maps, named, None
    merged = read.arguments() | named
    return maps, merged, read.min_tokens if merged == read.arguments() else None


def beside(maps: str | Path, folder: str | Path) -> str:
    """Maps as a setting file in ``folder`` names them: "./..." if they lie below it, absolute otherwise.

    A hub name, where no such folder exists, stays as it is.
    """
    if not Path(maps).expanduser().exists():
        return str(maps)
    maps, folder = Path(maps).expanduser().resolve(), Path(folder).expanduser().resolve()
    # with "./", for "maps/split-15" could be a hub name
    return f"./{maps.relative_to(folder).as_posix()}" if maps.is_relative_to(folder) else str(maps)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _from(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda value: value == FORMAT, f"is {FORMAT}"),
    "maps": (_or_none(lambda value: _text(value) and bool(value)), "is a path, a hub name or null"),
    "maps_hash": (_or_none(_text), "is a content hash or null"),
    "fill": (lambda value: value in FILLS, f"is one of {', '.join(FILLS)}"),
    "split": (_from(1), "is a layer from 1"),
    "tail": (_from(1), "counts tokens from 1"),
    "leading": (_from(0), "counts tokens from 0"),
    "rows": (_or_none(_text), "is a selector in words or null"),
    "corrections": (_text, "is text, empty for none"),
    "min_tokens": (_or_none(_from(1)), "counts tokens from 1, or is null"),
    "evidence": (lambda value: isinstance(value, dict), "is an object"),
    "ridgefill": (_text, "is a version"),
}


def _check(found: Mapping[str, Any], asked: str) -> None:
    """Raises SettingError for a key or value that cannot be one."""
    known = [f.name for f in fields(SettingFile)]
    if unknown := sorted(found.keys() - set(known)):
        raise SettingError(
            asked, f"it has the unknown key {', '.join(unknown)}", f"keep to {', '.join(known)}"
        )
    if missing := [name for name in known if name not in found]:
        raise SettingError(asked, f"it lacks {', '.join(missing)}", _ADVICE)
    for name, (fits, is_what) in _KINDS.items():
        if not fits(found[name]):
            raise SettingError(asked, f"its {name} {is_what}, not {found[name]!r}", _ADVICE)
    if found["fill"] == "ridge" and found["maps"] is None:
        raise SettingError(asked, "the ridge fill needs maps, and it names none", _ADVICE)
    from ridgefill.correct.parse import parse_corrections
    from ridgefill.rows import parse_rows

    if found["rows"] is not None:
        parse_rows(found["rows"])
    parse_corrections(found["corrections"])
