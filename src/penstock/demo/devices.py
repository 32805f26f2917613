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
from penstock.partition.profile import measure_layer_times
from penstock.pipe import Pipe
from penstock.schedules.choice import default_stages_per_rank
from penstock.stage.places import Device, resolve_device
from penstock.stage.virtual import virtual_devices

VIRTUAL_DEVICE_COUNT = 4  # devices that one GPU is cut into


class DemoDevices(NamedTuple):
    """One for each rank, and why these."""

    by_rank: tuple[Device, ...]
    reason: str

    @property
    def first(self) -> torch.device:
        """Where the batch goes in."""
        return self.by_rank[0].device


def parse_devices(names: str) -> DemoDevices:
    """Those of a text such as `cpu,cpu` or `cuda:0,cuda:1`.

    >>> devices_named("cpu,cpu")
    Devices(places=(cpu, cpu), why='as asked')
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    try:
        places = tuple(map(resolve_device, asked))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--devices takes names such as cpu,cpu; '{names}': {reason}") from None
    if len(places) < 2:
        raise ArgumentError(
            f"a pipeline has at least two devices: --devices cpu,cpu, not '{names}'"
        )
    return DemoDevices(places, "as asked")


def find_devices() -> DemoDevices:
    """Every GPU; the parts of one, if it is alone; else the CPU, twice."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return DemoDevices(tuple(resolve_device(f"cuda:{gpu}") for gpu in range(gpus)), "all GPUs")
    if gpus == 0:
        return DemoDevices(
            (resolve_device("cpu"), resolve_device("cpu")), "two CPU ranks, as there is no GPU"
        )
    try:
        return DemoDevices(
            tuple(virtual_devices("cuda:0", VIRTUAL_DEVICE_COUNT)),
            f"one GPU, cut in {VIRTUAL_DEVICE_COUNT}",
        )
    except (ArgumentError, MissingExtra, RuntimeError) as error:
        why = f"two CPU ranks, as the one GPU cannot be cut: {error}"
        return DemoDevices((resolve_device("cpu"), resolve_device("cpu")), why)


@contextmanager
def limit_cpu_threads(devices: DemoDevices) -> Iterator[None]:
    """On the CPU the ranks are what runs side by side, not the parts of one operation."""
    before = torch.get_num_threads()
    if devices.first.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class DeviceLayout:
    """Devices, and the seconds of each layer on them: every pipe over it is cut by those."""

    devices: DemoDevices
    layer_seconds: tuple[float, ...]

    @classmethod
    def measure(cls, devices: DemoDevices, model: nn.Sequential, example: Tensor) -> DeviceLayout:
        """With a micro-batch as the example."""
        inputs = (example.to(devices.first),)
        times = measure_layer_times(list(model), inputs, timeout=0.5, device=devices.first)
        return cls(devices, tuple(times))

    def layers_per_stage(self, schedule: str) -> Sequence[int]:
        """How many layers each stage has, for the stages that the schedule wants."""
        return balance.balance_costs(self.layer_seconds, count_stages(schedule, self.devices))

    def build_pipe(self, model: nn.Sequential, schedule: str, chunks: int) -> Pipe:
        """The model, cut into stages, over the devices."""
        return Pipe(
            model,
            chunks=chunks,
            checkpoint="never",
            stages=self.layers_per_stage(schedule),
            devices=self.devices.by_rank,
            schedule=schedule,
            loss_fn=next_byte_loss,
        )


def count_stages(schedule: str, devices: DemoDevices) -> int:
    """As many as the schedule wants on these devices."""
    return len(devices.by_rank) * default_stages_per_rank(schedule)
