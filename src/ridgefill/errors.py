"""One hierarchy of refusals: what was asked, why it cannot be, what to do instead."""

from __future__ import annotations


class RidgeFillError(Exception):
    """Base of every refusal.

    Args:
        asked: what the caller asked for, in their own terms.
        why: why it cannot be done.
        instead: what to do instead; the user's next step.
    """

    def __init__(self, asked: str, why: str, instead: str) -> None:
        super().__init__(asked, why, instead)
        self.asked, self.why, self.instead = asked, why, instead

    def __str__(self) -> str:
        return f"{self.asked}: {self.why}. Instead: {self.instead}."


class UnsupportedModelError(RidgeFillError):
    """The model's architecture (or something it carries) cannot be filled correctly."""


class EngineMissingError(RidgeFillError):
    """An engine's library is not installed, of a release that was not tested, or lacks what the fill is built on."""


class ModelFileError(RidgeFillError):
    """A model's files are missing, incomplete, unreachable or not what their name says."""


class MapsMismatchError(RidgeFillError):
    """The maps belong to another model, tokenizer or split."""


class MapsFileError(RidgeFillError):
    """A maps folder is missing, truncated, altered or of an unknown format."""


class SettingError(RidgeFillError, ValueError):
    """A setting is out of range or contradicts another."""


class CorpusError(RidgeFillError):
    """Calibration or evaluation text is unreadable, empty or too short."""


class PromptError(RidgeFillError, ValueError):
    """A prompt cannot be prefilled as asked (empty, mask with holes, longer than the model's context)."""


class OutputError(RidgeFillError):
    """A result could not be written (no space, no permission); nothing half-written is left."""


class RidgeFillWarning(UserWarning):
    """Something differs from what the maps were fitted on, but is known to carry over."""
