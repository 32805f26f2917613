"""The profile: all that the planner knows about a model and its devices, as plain numbers.

A profile is measured once, on the devices, and saved as JSON. Plans can then be made, compared and
explained anywhere. Times are in seconds, sizes in bytes; both are for one micro-batch, and depend
on its rows as `fixed + per_row * rows`.

The units are in the order of the forward. The loss, and what the model computes after its last
unit, belong to the last unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isinf, isnan
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.display import render_html
from penstock.errors import ArgumentError, PenstockError, PenstockTypeError
from penstock.text_format import format_plural, parse_bytes

_VERSION = 1


class PerRows(NamedTuple):
    """A number that grows with the rows of a micro-batch.

    >>> PerRows(fixed=1.0, per_row=0.5).at(rows=4)
    3.0
    """

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> float:
        """Return the number for a micro-batch of so many rows."""
        return self.fixed + self.per_row * rows


_NOTHING = PerRows()


@dataclass(frozen=True)
class UnitSeconds:
    """The seconds of one unit on one kind of device. R is None if it takes as long as F."""

    F: PerRows
    I: PerRows
    W: PerRows
    R: PerRows | None = None


@dataclass(frozen=True)
class UnitProfile:
    """A part of the model that is never cut.

    Attributes:
        name: Its name in the model.
        seconds: Its seconds on each kind of device.
        parameter_bytes: Its parameters and buffers.
        gradient_bytes: The gradients of the parameters that are trained.
        activation: What it keeps from F until the backward, without the values of the profile:
            `ValueProfile.saved_by` says who keeps those.
        weight_activation: All that it keeps between I and W, its inputs included. None means that I
            frees nothing.
        workspace: The most that it needs in addition while it computes: values that are alive
            during an action only, and the gradient of its outputs.
    """

    name: str
    seconds: Mapping[str, UnitSeconds]
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    activation: PerRows = _NOTHING
    weight_activation: PerRows | None = None
    workspace: PerRows = _NOTHING


@dataclass(frozen=True)
class ValueProfile:
    """A value that one unit makes and later units use. A skip connection is one more of these.

    A stage keeps a value for the backward if it has received it from another stage, or if one of
    its units saves it.

    Attributes:
        src: The unit that makes it.
        dsts: The units that use it. It is sent once to each other stage with such a unit.
        size: Its bytes.
        has_grad: Whether a gradient of the same size comes back.
        saved_by: The units that save it for their backwards. None means `dsts`.
    """

    src: int
    dsts: tuple[int, ...]
    size: PerRows
    has_grad: bool = True
    saved_by: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DeviceProfile:
    """The device of a rank. The units' seconds on its kind are divided by its speed.

    Attributes:
        kind: The key of the units' seconds on devices of this kind.
        memory: Its bytes.
        speed: Its speed while all ranks are busy, relative to the units' seconds.
        idle_gain: By which fraction it would be faster if all ranks were idle. In a step in which
            they are idle for a tenth of the time, it is faster by a tenth of this. 0 if ranks share
            nothing.
    """

    kind: str
    memory: float = inf
    speed: float = 1.0
    idle_gain: float = 0.0


@dataclass(frozen=True)
class LinkProfile:
    """A link between two ranks, in both directions.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes per second.
        shares_memory: Whether a message is not copied: both ranks use what the sender has made.
    """

    latency: float = 0.0
    bandwidth: float = inf
    shares_memory: bool = False

    def seconds(self, size: float) -> float:
        """Return how long a message of this size takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Profile:
    """A model and its devices as numbers.

    Attributes:
        model: The name of the model.
        rows: The rows of the whole batch.
        units: The units, in the order of the forward.
        values: The values between units.
        devices: The device of each rank.
        link: The link between two ranks ...
        links: ... except these, by (lower rank, higher rank).
        optimizer_factor: The bytes of optimizer state per byte of gradients: 0 for plain SGD, 1
            with momentum, 2 for Adam.
        runtimes: The runtimes to choose from, each with the seconds that it adds to every action.

    Raises:
        ArgumentError: A number is negative or not finite, or an index is out of range. The message
            says which.

    Example:
        >>> seconds = {"cpu": UnitSeconds(PerRows(1), PerRows(1), PerRows(1))}
        >>> units = [UnitProfile(f"layer {i}", seconds) for i in range(4)]
        >>> profile = Profile("tiny", 8, units, devices=[DeviceProfile("cpu")] * 2)
        >>> Profile.from_json(profile.to_json()) == profile
        True
    """

    model: str
    rows: int
    units: tuple[UnitProfile, ...]
    values: tuple[ValueProfile, ...] = ()
    devices: tuple[DeviceProfile, ...] = ()
    link: LinkProfile = LinkProfile()
    links: Mapping[tuple[int, int], LinkProfile] = field(default_factory=dict)
    optimizer_factor: float = 0.0
    runtimes: Mapping[str, float] = field(default_factory=lambda: {"threads": 0.0})

    def __post_init__(self) -> None:
        for name in ("units", "values", "devices"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = [*_find_invalid_numbers(self), *self._find_invalid_references()]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ArgumentError(f"this is not a profile: {'; '.join(problems[:3])}{more}")

    def _find_invalid_references(self) -> Iterable[str]:
        if self.rows < 1 or not self.units or not self.devices or not self.runtimes:
            yield (
                f"it has {self.rows} rows, {len(self.units)} units, {len(self.devices)} devices "
                f"and {len(self.runtimes)} runtimes, and each must be at least 1"
            )
        kinds = {device.kind for device in self.devices}
        for unit in self.units:
            if missing := sorted(kinds - set(unit.seconds)):
                yield f"unit {unit.name!r} was not measured on {', '.join(missing)}"
        for value in self.values:
            if not all(0 <= value.src < dst < len(self.units) for dst in value.dsts):
                yield (
                    f"a value goes from unit {value.src} to {list(value.dsts)} of "
                    f"{len(self.units)} units, and a value only goes to later units"
                )
        for low, high in self.links:
            if not 0 <= low < high:
                yield f"link ({low}, {high}) does not name a lower and a higher rank"

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(device.kind for device in self.devices))
        sizes = {"unit": len(self.units), "row": self.rows, "device": len(self.devices)}
        counted = ", ".join(format_plural(size, noun) for noun, size in sizes.items())
        return f"Profile({self.model}, {counted}: {kinds})"

    def _repr_html_(self) -> str | None:
        return render_html(self)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the units."""
        return tuple(unit.name for unit in self.units)

    def link_between(self, rank: int, other: int) -> LinkProfile:
        """Return the link between two ranks.

        Args:
            rank: The number of a rank.
            other: The number of another rank.
        """
        return self.links.get((min(rank, other), max(rank, other)), self.link)

    def with_devices(self, devices: int | Sequence[DeviceProfile]) -> Profile:
        """Return the profile for other devices: these, or so many.

        Args:
            devices: The device of each rank. A number takes the profile's own devices, and repeats
                the last of them if it has fewer.

        Raises:
            ArgumentError: There are no devices, or one is of a kind that was not measured.
        """
        if isinstance(devices, int):
            if devices < 1:
                raise ArgumentError(f"devices is {devices}: a plan needs at least one device")
            more = devices - len(self.devices)
            devices = (*self.devices[:devices], *(self.devices[-1],) * more)
        ranks = len(devices)
        links = {pair: link for pair, link in self.links.items() if pair[1] < ranks}
        return replace(self, devices=tuple(devices), links=links)

    # ---- JSON ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the profile as values that `json` can write."""
        return {
            "format": "penstock profile",
            "version": _VERSION,
            "model": self.model,
            "rows": self.rows,
            "devices": [_device_to_json(device) for device in self.devices],
            "link": _drop_infinite(vars(self.link)),
            "links": [
                {"ranks": list(pair), **_drop_infinite(vars(link))}
                for pair, link in self.links.items()
            ],
            "optimizer_factor": self.optimizer_factor,
            "runtimes": dict(self.runtimes),
            "units": [
                {
                    **{name: value for name, value in vars(unit).items() if value is not None},
                    "seconds": {
                        kind: {op: list(n) for op, n in vars(seconds).items() if n is not None}
                        for kind, seconds in unit.seconds.items()
                    },
                }
                for unit in self.units
            ],
            "values": [
                {name: field for name, field in vars(value).items() if field is not None}
                for value in self.values
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the profile that `to_json` has written.

        Args:
            data: What `to_json` has returned.

        Raises:
            ArgumentError: It is not a profile, or a field is missing or wrong.
        """
        with parse_json(data, "profile", _VERSION):
            return cls(
                model=str(data["model"]),
                rows=int(data["rows"]),
                units=tuple(_unit_from_json(unit) for unit in data["units"]),
                values=tuple(
                    ValueProfile(
                        int(value["src"]),
                        tuple(map(int, value["dsts"])),
                        _per_rows(value["size"]),
                        bool(value.get("has_grad", True)),
                        tuple(map(int, value["saved_by"])) if "saved_by" in value else None,
                    )
                    for value in data.get("values", ())
                ),
                devices=tuple(DeviceProfile(**device) for device in data["devices"]),
                link=LinkProfile(**data.get("link", {})),
                links={
                    (int(entry["ranks"][0]), int(entry["ranks"][1])): LinkProfile(
                        **{key: value for key, value in entry.items() if key != "ranks"}
                    )
                    for entry in data.get("links", ())
                },
                optimizer_factor=float(data.get("optimizer_factor", 0.0)),
                runtimes={
                    str(name): float(seconds)
                    for name, seconds in data.get("runtimes", {"threads": 0.0}).items()
                },
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a JSON file.

        Args:
            path: The file to write.
        """
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a profile from a file that `save` has written.

        Args:
            path: The file.
        """
        return cls.from_json(read_json(path))


def read_json(path: str | PathLike[str]) -> Any:
    """Return the content of a JSON file, or raise an `ArgumentError` that names the file."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise ArgumentError(f"there is no file '{Path(path)}'") from error
    except (ValueError, OSError) as error:
        raise ArgumentError(f"'{Path(path)}' cannot be read as JSON: {error}") from error


def write_json(path: str | PathLike[str], data: Any) -> None:
    """Write values to a JSON file that people can read and edit."""
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


@contextmanager
def parse_json(data: Any, noun: str, version: int) -> Iterator[None]:
    """Check the format of a saved plan or profile, and raise `ArgumentError` for a bad field.

    Args:
        data: What was read from the file.
        noun: "plan" or "profile".
        version: The version of the format that this release reads.
    """
    if not isinstance(data, dict) or data.get("format") != f"penstock {noun}":
        raise ArgumentError(f"this is not a penstock {noun}: its field 'format' does not say so")
    if data.get("version") != version:
        raise ArgumentError(
            f"this penstock {noun} has version {data.get('version')}, and this release reads "
            f"{version}"
        )
    try:
        yield
    except PenstockError:  # what is wrong was found, and said
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArgumentError(
            f"this {noun} is damaged: {type(error).__name__} {error}. Write it again with "
            f"{noun.capitalize()}.save."
        ) from error


def resolve_memory(memory: Any, devices: Sequence[DeviceProfile]) -> tuple[float, ...]:
    """Return the memory cap of each rank, in bytes.

    Args:
        memory: None for the memory of the devices; a number of bytes; a text such as "24GB" or
            "90%"; a fraction of the device, above 0 and up to 1; or one of these for each rank.
        devices: The device of each rank.

    Raises:
        ArgumentError: A cap is not positive, has an unknown unit, is a fraction of a device whose
            memory is not known, or there is not one per rank.

    >>> gpus = [DeviceProfile("gpu", memory=80e9)] * 2
    >>> resolve_memory("24GB", gpus), resolve_memory(0.5, gpus), resolve_memory(None, gpus)
    ((24000000000.0, 24000000000.0), (40000000000.0, 40000000000.0), (80000000000.0, 80000000000.0))
    """
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        if len(memory) != len(devices):
            raise ArgumentError(
                f"memory has {len(memory)} entries for {len(devices)} devices: give one for all, "
                "or one per device"
            )
        return tuple(
            resolve_memory(cap, [device])[0] for cap, device in zip(memory, devices, strict=True)
        )
    return tuple(_resolve_cap(memory, device) for device in devices)


def _resolve_cap(memory: Any, device: DeviceProfile) -> float:
    if memory is None:
        return device.memory
    if isinstance(memory, str) and memory.strip().endswith("%"):
        try:
            memory = float(memory.strip()[:-1]) / 100
        except ValueError as error:
            raise ArgumentError(f"memory {memory!r} is not a percentage such as '90%'") from error
        if not 0 < memory <= 1:
            raise ArgumentError(
                f"memory is {memory:.0%} of a device: give more than 0 %, up to 100 %"
            )
    elif isinstance(memory, str):
        memory = parse_bytes(memory)
    if isinstance(memory, bool) or not isinstance(memory, int | float):
        raise PenstockTypeError(f"memory must be a number of bytes or a text, not {memory!r}")
    if isnan(memory) or memory <= 0:
        raise ArgumentError(f"memory is {memory}: a cap is more than 0 bytes")
    if memory <= 1:
        if isinf(device.memory):
            raise ArgumentError(
                f"memory is {memory:g} of a device of kind {device.kind!r}, whose memory is not "
                "known. Give the cap in bytes, such as '24GB'."
            )
        return memory * device.memory
    return float(memory)


def _per_rows(numbers: Any) -> PerRows:
    fixed, per_row = numbers
    return PerRows(float(fixed), float(per_row))


def _unit_from_json(data: dict[str, Any]) -> UnitProfile:
    sizes = {
        name: _per_rows(data[name])
        for name in ("activation", "weight_activation", "workspace")
        if name in data
    }
    return UnitProfile(
        name=str(data["name"]),
        seconds={
            str(kind): UnitSeconds(**{op: _per_rows(numbers) for op, numbers in columns.items()})
            for kind, columns in data["seconds"].items()
        },
        parameter_bytes=float(data.get("parameter_bytes", 0.0)),
        gradient_bytes=float(data.get("gradient_bytes", 0.0)),
        **sizes,
    )


def _device_to_json(device: DeviceProfile) -> dict[str, Any]:
    """Return the fields of a device, without an `idle_gain` of 0, which not every release reads."""
    fields = _drop_infinite(vars(device))
    return {name: value for name, value in fields.items() if name != "idle_gain" or value}


def _drop_infinite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without infinite numbers, which JSON does not have: they are defaults."""
    return {name: value for name, value in fields.items() if value != inf}


def _find_invalid_numbers(profile: Profile) -> Iterable[str]:
    """Yield the numbers that are negative or not finite."""
    numbers: list[tuple[str, float]] = [("optimizer_factor", profile.optimizer_factor)]
    for unit in profile.units:
        rows: list[tuple[str, PerRows | None]] = [
            ("activation", unit.activation),
            ("weight_activation", unit.weight_activation),
            ("workspace", unit.workspace),
        ]
        for kind, seconds in unit.seconds.items():
            rows += [(f"{op} on {kind}", getattr(seconds, op)) for op in ("F", "I", "W", "R")]
        for name, pair in rows:
            numbers += [(f"{name} of unit {unit.name!r}", number) for number in pair or ()]
        for name in ("parameter_bytes", "gradient_bytes"):
            numbers.append((f"{name} of unit {unit.name!r}", getattr(unit, name)))
    for value in profile.values:
        numbers += [(f"the size of a value of unit {value.src}", number) for number in value.size]
    for link in (profile.link, *profile.links.values()):
        numbers.append(("the latency of a link", link.latency))
    numbers += [(f"the overhead of {name}", number) for name, number in profile.runtimes.items()]
    yield from (f"{name} is {number}" for name, number in numbers if not 0 <= number < inf)
    for rank, device in enumerate(profile.devices):
        if not 0 < device.speed < inf or not device.memory > 0:
            yield f"rank {rank} has speed {device.speed} and memory {device.memory}"
        if not 0 <= device.idle_gain <= 1:
            yield f"rank {rank} has an idle gain of {device.idle_gain}, which is not from 0 to 1"
    for link in (profile.link, *profile.links.values()):
        if not link.bandwidth > 0:
            yield f"a link has a bandwidth of {link.bandwidth}"
