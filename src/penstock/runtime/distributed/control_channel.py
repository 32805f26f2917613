"""The control channel: small values between the ranks of a pipe, and agreement before a call.

`ControlChannel` gathers numbers, and gathers, broadcasts and sends values: tensors, and the plain
Python values around them, which travel as JSON (`payload_codec.py`). Everything goes over a gloo
group through host memory, even between GPUs. It uses point-to-point messages only, because a gloo
collective takes several times as long.

`check_ranks_agree` compares facts about a call on all ranks before any data is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import RemoteError, RunError
from penstock.runtime.distributed.links import PointToPointGroup
from penstock.runtime.distributed.payload_codec import (
    PayloadSpec,
    decode_spec,
    encode_spec,
    flatten_dense,
)
from penstock.stage.payload import Payload, flatten_values, unflatten_values
from penstock.tensor_spec import TensorSpec

NUMBERS_TAG, VALUES_TAG = 1, 2
FIRST_MESSAGE_TAG = 16  # messages between stages use tags from here on


class WaitObserver(Protocol):
    """The part of a watchdog that needs to know when this rank waits."""

    def mark_waiting(self, description: object, peer: int | None) -> None:
        """Record that this rank is about to wait for one peer, or for all (None)."""

    def mark_arrived(self) -> None:
        """Record that the wait is over."""


class _NoObserver:
    """Ignores waits."""

    def mark_waiting(self, description: object, peer: int | None) -> None: ...

    def mark_arrived(self) -> None: ...


class ControlChannel:
    """A channel between the ranks of a pipe, or between replicas, over a gloo group of its own.

    `member_name` is the word for a member in error messages: "rank" or "replica".
    """

    def __init__(
        self,
        group: PointToPointGroup,
        watchdog: WaitObserver | None = None,
        member_name: str = "rank",
    ) -> None:
        self.group = group
        self.member_name = member_name
        self.rank, self.size = group.rank(), group.size()
        self._watchdog = watchdog or _NoObserver()
        self._other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        # rank, work, tensor to keep alive, description
        self._pending_sends: list[tuple[int, Any, Tensor, str]] = []

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks. All have the same shape.

        The description tells the watchdog what this rank waits for.
        """
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        tensors[self.rank] = tensor
        # A message to a rank that has left may fail as soon as it is posted.
        self._watchdog.mark_waiting(description, None)
        receives = [
            self.group.recv([tensors[rank]], rank, NUMBERS_TAG) for rank in self._other_ranks
        ]
        sends = [self.group.send([tensor], rank, NUMBERS_TAG) for rank in self._other_ranks]
        for rank, work in zip(self._other_ranks, receives, strict=True):
            self._watchdog.mark_waiting(description, rank)
            work.wait()
        for work in sends:
            work.wait()
        self._watchdog.mark_arrived()
        return tensors

    def all_gather_value(self, value: Any, description: str) -> list[Any]:
        """Return the values of all ranks, in the order of ranks.

        A value is made of tensors, numbers, strings and None, in lists, tuples and dicts. The
        tensors of other ranks arrive on the CPU.
        """
        self.send_value(self._other_ranks, value, description)
        values = [
            value if rank == self.rank else self.recv_value(rank, description)
            for rank in range(self.size)
        ]
        self.flush()
        return values

    def broadcast_value(self, source_rank: int, value: Any, description: str) -> Any:
        """Return the value of one rank on every rank. The others pass anything."""
        if self.rank != source_rank:
            return self.recv_value(source_rank, description)
        self.send_value(self._other_ranks, value, description)
        self.flush()
        return value

    def broadcast_tensor(self, source_rank: int, tensor: Tensor, description: str) -> Tensor:
        """Return the tensor of one rank on every rank; on those that receive it, on the CPU.

        All ranks pass a tensor of the same shape and dtype, so its header is one number. All get a
        contiguous one. The source waits for the others in its next broadcast, or in `flush`.
        """
        header = torch.tensor([hash_facts(f"{tensor.dtype} {tuple(tensor.shape)}")])
        if self.rank == source_rank:
            self.flush()
            packed = tensor.detach().contiguous()
            # The caller may change the tensor before all others have received it.
            copy = packed.to("cpu", copy=True)
            for rank in self._other_ranks:
                self._send(rank, VALUES_TAG, header, description)
                if copy.numel():
                    self._send(rank, VALUES_TAG, copy, description)
            return packed
        received_header = torch.empty_like(header)
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._watchdog.mark_waiting(description, source_rank)
        self.group.recv([received_header], source_rank, VALUES_TAG).wait()
        # A message that is larger than its buffer would end this process.
        if not torch.equal(header, received_header):
            raise RunError(
                f"rank {self.rank} expected {TensorSpec.from_tensor(tensor)} as {description}, "
                "which has another shape or dtype there, because the model took another path."
            )
        if received.numel():
            self.group.recv([received], source_rank, VALUES_TAG).wait()
        self._watchdog.mark_arrived()
        return received

    def send_value(self, ranks: Sequence[int], value: Any, description: str) -> None:
        """Send a value to ranks: its header as text, then its tensors. Do not wait for them."""
        tensors, layout = flatten_values((value,))
        payload = Payload(tuple(t.detach().cpu() for t in tensors), layout)
        header = encode_spec(PayloadSpec.from_payload(payload))
        flats = [flatten_dense(t) for t in payload.tensors if t is not None and t.numel()]
        for rank in ranks:
            self.send_text(rank, VALUES_TAG, header, description)
            for flat in flats:
                self._send(rank, VALUES_TAG, flat, description)

    def recv_value(self, rank: int, description: str) -> Any:
        """Wait for a value from a rank and return it."""
        spec = decode_spec(self.recv_text(rank, VALUES_TAG, description))
        tensors = [s.allocate("cpu") for s in spec.tensor_specs if s is not None]
        for tensor in tensors:
            if tensor.numel():
                self._watchdog.mark_waiting(description, rank)
                self.group.recv([flatten_dense(tensor)], rank, VALUES_TAG).wait()
                self._watchdog.mark_arrived()
        (value,) = unflatten_values(tensors, spec.layout)
        return value

    def send_text(self, rank: int, tag: int, text: str, description: str = "a text") -> None:
        """Send a text to a rank: its length, then its bytes. Do not wait for the receiver."""
        content = text.encode()
        self._send(rank, tag, torch.tensor([len(content)]), description)
        self._send(rank, tag, torch.frombuffer(bytearray(content), dtype=torch.uint8), description)

    def _send(self, rank: int, tag: int, tensor: Tensor, description: str) -> None:
        work = self.group.send([tensor], rank, tag)
        self._pending_sends.append((rank, work, tensor, description))

    def recv_text(self, rank: int, tag: int, description: str) -> str:
        """Wait for a text from a rank and return it."""
        length = torch.empty(1, dtype=torch.int64)
        self._watchdog.mark_waiting(description, rank)
        self.group.recv([length], rank, tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], rank, tag).wait()
        self._watchdog.mark_arrived()
        return bytes(data.numpy()).decode()

    def flush(self) -> None:
        """Wait until the receivers have everything that was sent."""
        for rank, work, _, description in self._pending_sends:
            self._watchdog.mark_waiting(f"confirmation of {description}", rank)
            work.wait()
        self._pending_sends.clear()
        self._watchdog.mark_arrived()

    def all_reduce_sum(
        self, ranks: Sequence[int], tensor: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """Return the sum of these ranks' tensors, on each of them, or None if no rank has one.

        The first rank adds the tensors in the order of `ranks` and sends the sum back, so all ranks
        get the same bits. A rank without a tensor passes None. The result is on the device of
        `like`.
        """
        description = "a tied parameter"
        owner, *others = ranks
        if self.rank != owner:
            self.send_value([owner], tensor, description)
            self.flush()
            total: Tensor | None = self.recv_value(owner, description)
            return None if total is None else total.to(like.device)
        total = tensor
        for rank in others:
            addend = self.recv_value(rank, description)
            if addend is not None:
                addend = addend.to(like.device)
                total = addend if total is None else total + addend
        self.send_value(others, total, description)
        self.flush()
        return total


# -------------------------------------------------------------------------------------------------
# Agreement before a call
#
# Every rank sends one row of integers to all others, in a single all-gather:
#
#     hash of facts | hash of local state | seed | hashes of samples of up to 8 tensors
#
#     facts         must be equal on all ranks: the call, chunks, training mode, shapes, ...
#     local state   may differ between ranks; it is part of the cache key
#     samples       must be equal where two ranks have them; they are not part of the cache key
#
# If facts or samples differ, the ranks exchange the texts behind the hashes, and every rank raises
# the same error with a list of the differences. No data has been sent at that point.
# -------------------------------------------------------------------------------------------------

RankFacts = Mapping[str, str]
_SAMPLE_NAMES = [f"sample values of tensor {index}" for index in range(8)]


@dataclass(frozen=True)
class Agreement:
    """The result of a successful comparison. It is the same on all ranks."""

    seed: int  # the seed of the first rank
    cache_key: str  # equal for two calls with equal facts and local states on every rank


def check_ranks_agree(
    channel: ControlChannel,
    call_name: str,
    facts: RankFacts,
    tensor_samples: RankFacts | None = None,
    local_state: str = "",
    seed: int = 0,
) -> Agreement:
    """Raise RemoteError unless the facts and the tensor samples of all ranks are equal.

    `local_state` may differ between ranks. It is part of the cache key.
    """
    all_facts, samples = {"the call": call_name, **facts}, tensor_samples or {}
    # 0 means that this rank has no such tensor, or has it on a GPU: there is nothing to compare.
    sample_hashes = [hash_facts(samples[name]) if name in samples else 0 for name in _SAMPLE_NAMES]
    own_row = [hash_facts(all_facts), hash_facts(local_state), seed, *sample_hashes]
    gathered = channel.all_gather(
        torch.tensor(own_row, dtype=torch.int64), f"agreement on {call_name}"
    )
    rows: list[list[int]] = [row.tolist() for row in gathered]
    distinct_samples = [
        {row[3 + index] for row in rows} - {0} for index in range(len(_SAMPLE_NAMES))
    ]
    if any(row[0] != rows[0][0] for row in rows) or any(
        len(hashes) > 1 for hashes in distinct_samples
    ):
        facts_by_rank = channel.all_gather_value(
            {**all_facts, **samples}, f"the facts of {call_name}"
        )
        raise build_disagreement_error(call_name, facts_by_rank, channel.member_name)
    key = hashlib.sha256(repr([hash_facts(facts), [row[1] for row in rows]]).encode()).hexdigest()
    return Agreement(rows[0][2], key)


def hash_facts(value: RankFacts | str) -> int:
    """Return a hash of 63 bits, which fits into a signed int64. It is stable across processes."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def build_disagreement_error(
    call_name: str, facts_by_rank: Sequence[RankFacts], member_name: str = "rank"
) -> RemoteError:
    """Return an error that lists every fact in which the members differ.

    >>> facts = [{"chunks": "4"}, {"chunks": "4"}, {"chunks": "8"}]
    >>> print(build_disagreement_error("step 3", facts))
    the ranks disagree about step 3, and nothing was sent:
      chunks: 4 on rank 0, 1; 8 on rank 2
    """
    problems = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            if name in facts or name not in _SAMPLE_NAMES:
                ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = (
                f"{v} on {member_name} {', '.join(map(str, where))}" for v, where in ranks.items()
            )
            problems.append(f"{name}: {'; '.join(values)}")
    plural = {"rank": "ranks", "replica": "replicas"}[member_name]
    head = f"the {plural} disagree about {call_name}, and nothing was sent:"
    return RemoteError("\n".join([head, *(f"  {p}" for p in problems)]), "disagreed")


def sample_tensors(tensors: Sequence[Tensor]) -> RankFacts:
    """Return up to eight values of each of the first eight tensors that are on the CPU.

    They distinguish batches that have equal shapes but different data, for example after shuffling
    with different seeds. Tensors on a GPU are left out: reading them would wait for the GPU.
    """
    return {
        name: str(sample_values(tensor.detach()))
        for name, tensor in zip(_SAMPLE_NAMES, tensors, strict=False)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided
    }


def sample_values(tensor: Tensor) -> list[float]:
    """Return eight evenly spaced values, or all if there are fewer. Strides do not matter."""
    step = max(1, tensor.numel() // 8)
    if tensor.is_contiguous():
        return tensor.view(-1)[: 8 * step : step].tolist()
    indices = torch.arange(0, min(8 * step, tensor.numel()), step)
    return tensor[torch.unravel_index(indices, tensor.shape)].tolist()
