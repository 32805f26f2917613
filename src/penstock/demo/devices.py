"""The devices at hand, and how a model is laid out over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock import balance
from penstock.demo.model import next_byte_loss
from penstock.errors import ArgumentError, MissingExtra
from penstock.partition.profile import layer_times
from penstock.pipe import Pipe
from penstock.schedules.choice import stages_per_rank
from penstock.stage.places import Place, place_at
from penstock.stage.virtual import virtual_devices

VIRTUAL = 4  # devices that one GPU is cut into


class Devices(NamedTuple):
    """One for each rank, and why these."""

    places: tuple[Place, ...]
    why: str

    @property
    def first(self) -> torch.device:
        """Where the batch goes in."""
        return self.places[0].device


def devices_named(names: str) -> Devices:
    """Those of a text such as `cpu,cpu` or `cuda:0,cuda:1`.

    >>> devices_named("cpu,cpu")
    Devices(places=(cpu, cpu), why='as asked')
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    try:
        places = tuple(map(place_at, asked))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--devices takes names such as cpu,cpu; '{names}': {reason}") from None
    if len(places) < 2:
        raise ArgumentError(
            f"a pipeline has at least two devices: --devices cpu,cpu, not '{names}'"
        )
    return Devices(places, "as asked")


def devices_at_hand() -> Devices:
    """Every GPU; the parts of one, if it is alone; else the CPU, twice."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return Devices(tuple(place_at(f"cuda:{gpu}") for gpu in range(gpus)), "all GPUs")
    if gpus == 0:
        return Devices((place_at("cpu"), place_at("cpu")), "two CPU ranks, as there is no GPU")
    try:
        return Devices(tuple(virtual_devices("cuda:0", VIRTUAL)), f"one GPU, cut in {VIRTUAL}")
    except (ArgumentError, MissingExtra, RuntimeError) as error:
        why = f"two CPU ranks, as the one GPU cannot be cut: {error}"
        return Devices((place_at("cpu"), place_at("cpu")), why)


@contextmanager
def one_thread_a_rank(devices: Devices) -> Iterator[None]:
    """On the CPU the ranks are what runs side by side, not the parts of one operation."""
    before = torch.get_num_threads()
    if devices.first.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Layout:
    """Devices, and the seconds of each layer on them: every pipe over it is cut by those."""

    devices: Devices
    seconds: tuple[float, ...]

    @classmethod
    def measured(cls, devices: Devices, model: nn.Sequential, example: Tensor) -> Layout:
        """With a micro-batch as the example."""
        inputs = (example.to(devices.first),)
        times = layer_times(list(model), inputs, timeout=0.5, device=devices.first)
        return cls(devices, tuple(times))

    def cuts(self, schedule: str) -> Sequence[int]:
        """How many layers each stage has, for the stages that the schedule wants."""
        return balance.cut(self.seconds, stages_of(schedule, self.devices))

    def pipe(self, model: nn.Sequential, schedule: str, chunks: int) -> Pipe:
        """The model, cut into stages, over the devices."""
        return Pipe(
            model,
            chunks=chunks,
            checkpoint="never",
            stages=self.cuts(schedule),
            devices=self.devices.places,
            schedule=schedule,
            loss_fn=next_byte_loss,
        )


def stages_of(schedule: str, devices: Devices) -> int:
    """As many as the schedule wants on these devices."""
    return len(devices.places) * stages_per_rank(schedule)
