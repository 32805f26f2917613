"""The exchange of tensors between ranks that run a method of the model together.

Such a method (`generate`) runs in every process; see `model/traced/whole_model.py`. The ranks need
the same random numbers for it: each of them samples the next tokens by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.device.accelerator import get_default_generator
from penstock.errors import RunError
from penstock.runtime.distributed.control_channel import ControlChannel
from penstock.torch_compat import pytree


class RankExchange:
    """Sends tensors from one rank of a pipeline to all others, through host memory."""

    def __init__(self, channel: ControlChannel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self.rank = channel.rank

    def broadcast(self, source_rank: int, tensor: Tensor) -> Tensor:
        """Return the tensor of one rank on the device of every rank."""
        description = f"a tensor of rank {source_rank}"
        shared = self._channel.broadcast_tensor(source_rank, tensor, description)
        return shared.to(self._device)

    def find_draws(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of a call, and whether it drew from the default generators."""
        before = _read_generators(self._device)
        result = call()
        return result, not all(map(torch.equal, before, _read_generators(self._device)))

    def check_same(self, result: Any) -> None:
        """Raise if the ranks have different integers in their results."""
        digest = hashlib.sha256()
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex():
                digest.update(str(tuple(leaf.shape)).encode())
                digest.update(bytes(leaf.detach().cpu().contiguous().view(torch.uint8).numpy()))
        number = torch.tensor([int.from_bytes(digest.digest()[:8]) >> 1])
        digests = self._channel.all_gather(number, "the tokens of all ranks")
        if any(int(other) != int(number) for other in digests):
            raise RunError(
                "the ranks have generated different tokens: their generate depends on something "
                "that is not the same on all ranks, such as random numbers of Python or NumPy, or "
                "the time. Pass the same arguments and objects on all ranks."
            )


@contextmanager
def share_rng(channel: ControlChannel, device: torch.device) -> Iterator[None]:
    """Give all ranks the random state of the first one.

    Usually all ranks have it already, and go on with the state after the context. A rank with
    another state gets its own back.
    """
    states = _read_generators(device)
    digest = hashlib.sha256(b"".join(bytes(state.numpy()) for state in states)).digest()
    number = torch.tensor([int.from_bytes(digest[:8]) >> 1])
    digests = channel.all_gather(number, "the random state of all ranks")
    if all(int(other) == int(number) for other in digests):
        yield
        return
    shared = channel.broadcast_value(0, states, "the random state of the first rank")
    has_other_state = int(number) != int(digests[0])
    _write_generators(device, shared)
    try:
        yield
    finally:
        if has_other_state:
            _write_generators(device, states)


def _read_generators(device: torch.device) -> list[Tensor]:
    """Return the states of the default generators of the CPU and of this device."""
    devices = dict.fromkeys((torch.device("cpu"), device))
    return [get_default_generator(where).get_state() for where in devices]


def _write_generators(device: torch.device, states: list[Tensor]) -> None:
    devices = dict.fromkeys((torch.device("cpu"), device))
    for where, state in zip(devices, states, strict=True):
        get_default_generator(where).set_state(state)
