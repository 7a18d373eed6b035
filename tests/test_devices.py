"""Devices by name."""

import pytest

from ridgefill.devices import usable_device
from ridgefill.errors import SettingError


def test_the_cpu_is_always_here():
    assert usable_device("cpu").type == "cpu"


@pytest.mark.parametrize("wrong", ["nonsense", "cuda:99", "meta"])
def test_others_are_refused_by_option_and_name(wrong):
    with pytest.raises(SettingError, match=f"--moments-device {wrong}"):
        usable_device(wrong, "--moments-device")
