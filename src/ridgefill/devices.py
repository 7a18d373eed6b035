"""Devices: those that users name, and waiting for one."""

from __future__ import annotations

import torch

from ridgefill.errors import SettingError


def usable_device(name: str | torch.device, option: str = "--device") -> torch.device:
    """The device, known to be here and to hold numbers.

    Raises:
        SettingError: it is unknown, not here, or holds none (``meta``).
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingError(
            f"{option} {name}",
            "it is unknown or not here",
            "leave it out, or give cpu or, with a GPU, cuda:0",
        ) from error
    if device.type == "meta":
        raise SettingError(f"{option} {name}", "it holds no numbers", "leave it out, or give cpu")
    return device


def wait(device: torch.device) -> None:
    """Returns when the device has done what it was given; timings are of the work, not of the launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
