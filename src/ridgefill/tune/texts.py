"""The user's texts in two: one part to fit maps on, one to judge by, no document in both."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import CorpusError
from ridgefill.eval.documents import digest
from ridgefill.files import whole
from ridgefill.fit.corpus import Source, Text, read_sources

CHARS_A_TOKEN = 16  # more than any tokenizer packs into a token of prose, on average


@dataclass(frozen=True)
class Texts:
    """Files of the two parts.

    Attributes:
        strata: name of each text -> the paths to judge by.
        fit: the paths to fit on; empty where no maps are fitted.
    """

    strata: dict[str, list[Path | str]]
    fit: tuple[Path, ...] = ()

    @property
    def held(self) -> list[Path | str]:
        """All paths to judge by."""
        return [path for paths in self.strata.values() for path in paths]


def whole_texts(sources: Sequence[Source], texts: Sequence[str | Path]) -> Texts:
    """All of the texts to judge by, where nothing is fitted."""
    return Texts(dict(zip(_names(sources), ([text] for text in texts), strict=True)))


def divide(
    sources: Sequence[Source], folder: Path, *, fit_tokens: int, held_tokens: int, seed: int = 0
) -> Texts:
    """Writes ``folder/fit`` and ``folder/held``, a JSONL file in each for every text.

    Documents go in a seeded order to the part that has less of what it needs, until both have enough; the one
    document of a text is cut in two. A file that is there is kept: it was written by the same call.

    Args:
        fit_tokens, held_tokens: what the parts need, in tokens.

    Raises:
        OutputError: a file cannot be written.
        CorpusError: a text of one short line, which gives only one part.
    """
    room = {"fit": CHARS_A_TOKEN * fit_tokens, "held": CHARS_A_TOKEN * held_tokens}
    strata: dict[str, list[Path | str]] = {}
    fit = []
    for at, (name, source) in enumerate(zip(_names(sources), sources, strict=True)):
        paths = {part: folder / part / f"{at:02d}.jsonl" for part in room}
        if not all(path.exists() for path in paths.values()):
            _write(source, paths, room, seed)
        strata[name] = [paths["held"]]
        fit.append(paths["fit"])
    return Texts(strata, tuple(fit))


def fingerprint(sources: Sequence[Source]) -> str:
    """Tells texts from others by the names and lengths of their documents."""
    found = [(source.name, [(d.name, d.chars) for d in source.documents]) for source in sources]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def prose_of(paths: Sequence[str | Path], chars: int, fitted: Collection[str] = ()) -> list[str]:
    """Documents as plain text, ``chars`` characters in all or a little more, the maps' own left out."""
    found, length = [], 0
    for source in read_sources(paths):
        for document in source.documents:
            text = _plain(document.load())
            if length < chars and digest(text) not in fitted:
                found.append(text)
                length += len(text)
    return found


def _names(sources: Sequence[Source]) -> list[str]:
    """A name for each text, all different."""
    plain = [source.name for source in sources]
    return [name if plain.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(plain)]


def _write(source: Source, paths: dict[str, Path], room: dict[str, int], seed: int) -> None:
    with whole(paths["fit"]) as fit, whole(paths["held"]) as held:
        with fit.open("w", encoding="utf-8") as fit_file, held.open("w", encoding="utf-8") as held_file:
            files = {"fit": fit_file, "held": held_file}
            filled = dict.fromkeys(room, 0)
            for text in _pieces(source, seed):
                part = min(room, key=lambda part: filled[part] / room[part])
                if filled[part] >= room[part]:
                    break
                files[part].write(json.dumps(_line(text), ensure_ascii=False) + "\n")
                filled[part] += len(_plain(text))
        if not all(filled.values()):
            raise CorpusError(
                f"a part of {source.name} to fit on and one to judge by",
                "it has too little text for two",
                "name more text, or give fitted maps with --maps",
            )


def _pieces(source: Source, seed: int) -> Iterator[Text]:
    """A text's documents in a seeded order; halves of it where it is one document."""
    documents = list(source.documents)
    random.Random(f"{seed} {source.name}").shuffle(documents)
    if len(documents) > 1:
        yield from (document.load() for document in documents)
        return
    text = _plain(documents[0].load())
    middle = text.find(" ", len(text) // 2)
    yield from (half for half in (text[:middle], text[middle:]) if middle > 0 and half.strip())


def _line(text: Text) -> dict[str, Any]:
    return {"text": text} if isinstance(text, str) else {"messages": text}


def _plain(text: Text) -> str:
    return text if isinstance(text, str) else "\n\n".join(message["content"] for message in text)
