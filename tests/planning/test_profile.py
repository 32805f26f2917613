from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ArgumentError, PenstockTypeError
from penstock.planning import DeviceProfile, LinkProfile, Profile, ValueProfile, resolve_memory
from tests.planning.problems import even_profile, random_profile


@pytest.mark.parametrize("seed", range(8))
def test_profile_survives_json(seed: int, tmp_path: Path) -> None:
    profile = random_profile(seed)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_profile_of_devices_without_a_known_memory_is_valid_json() -> None:
    assert "Infinity" not in json.dumps(even_profile().to_json())


def test_idle_gain_is_only_written_where_there_is_one() -> None:
    """Releases that do not know it called every new profile damaged."""
    devices = DeviceProfile("cpu", idle_gain=0.5), DeviceProfile("cpu")
    profile = even_profile().with_devices(devices)
    first, second = profile.to_json()["devices"]
    assert first["idle_gain"] == 0.5
    assert "idle_gain" not in second
    assert Profile.from_json(profile.to_json()) == profile


def test_more_devices_repeat_the_last_one() -> None:
    profile = replace(
        even_profile(ranks=2), devices=(DeviceProfile("cpu"), DeviceProfile("cpu", 9))
    )
    assert [device.memory for device in profile.with_devices(3).devices] == [float("inf"), 9, 9]
    assert len(profile.with_devices(1).devices) == 1


def test_zero_devices_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^devices is 0: a plan needs at least one device$"):
        even_profile().with_devices(0)


def test_device_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"unit 'layer.0' was not measured on H200"):
        even_profile().with_devices([DeviceProfile("H200")])


def test_profile_refuses_invalid_numbers_and_indices() -> None:
    profile = even_profile(units=2)
    bad = replace(profile.units[0], parameter_bytes=-1.0)
    with pytest.raises(ArgumentError, match=r"parameter_bytes of unit 'layer.0' is -1.0"):
        replace(profile, units=(bad, profile.units[1]))
    with pytest.raises(ArgumentError, match=r"a value goes from unit 1 to \[0\] of 2 units"):
        replace(profile, values=(ValueProfile(1, (0,), profile.values[0].size),))
    with pytest.raises(ArgumentError, match=r"a link has a bandwidth of 0"):
        replace(profile, link=LinkProfile(bandwidth=0))
    with pytest.raises(ArgumentError, match=r"link \(1, 0\) does not name a lower and a higher"):
        replace(profile, links={(1, 0): LinkProfile()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "this is not a penstock profile"),
        ("[", "cannot be read as JSON"),
        ('{"format": "penstock profile", "version": 9}', "has version 9, and this release reads 1"),
        ('{"format": "penstock profile", "version": 1}', "this profile is damaged: KeyError"),
    ],
)
def test_file_that_is_not_a_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        Profile.load(tmp_path / "bad.json")


def test_missing_file_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^there is no file 'nowhere.json'$"):
        Profile.load("nowhere.json")


def test_memory_caps_are_read_from_texts_fractions_and_sequences() -> None:
    devices = [DeviceProfile("gpu", 100.0), DeviceProfile("gpu", 200.0)]
    assert resolve_memory("50%", devices) == (50.0, 100.0)
    assert resolve_memory(1.0, devices) == (100.0, 200.0)
    assert resolve_memory(["2KB", 1500], devices) == (2000.0, 1500.0)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("24 GBytes", "'24 GBytes' is not a number of bytes"),
        ("120%", "memory is 120% of a device"),
        ("x%", "memory 'x%' is not a percentage"),
        (0, "memory is 0: a cap is more than 0 bytes"),
        (-5.0, "memory is -5.0"),
        (float("nan"), "memory is nan"),
        (0.5, "whose memory is not known"),
        ([1e9], "memory has 1 entries for 2 devices"),
    ],
)
def test_invalid_memory_cap_is_refused(memory: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve_memory(memory, [DeviceProfile("gpu")] * 2)


def test_memory_cap_of_another_type_is_refused() -> None:
    with pytest.raises(PenstockTypeError, match="memory must be a number of bytes or a text"):
        resolve_memory(True, [DeviceProfile("gpu")])
