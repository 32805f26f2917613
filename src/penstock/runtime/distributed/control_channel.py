"""Short words between the processes of a pipe: numbers of all, texts from one to another.

Collectives of gloo take several times as long as messages between two, so these are messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import RemoteError
from penstock.runtime.distributed.links import PointToPointGroup
from penstock.runtime.distributed.payload_codec import (
    PayloadSpec,
    decode_spec,
    encode_spec,
    flatten_dense,
)
from penstock.stage.payload import Payload, flatten_values, unflatten_values

NUMBERS_TAG, TEXT_TAG, TENSORS_TAG = 1, 2, 3  # tags
FIRST_MESSAGE_TAG = 16  # those below are for words, and for poison


class WaitObserver(Protocol):
    """Who is told when this rank waits."""

    def mark_waiting(self, description: object, peer: int | None) -> None:
        """It is about to, for something of a rank, or of all."""

    def mark_arrived(self) -> None:
        """It is there."""


class ControlChannel:
    """The other ranks of a pipe, or its other copies, over a gloo group of its own."""

    def __init__(
        self, group: PointToPointGroup, watchdog: WaitObserver, member_name: str = "rank"
    ) -> None:
        self.group = group
        self.member_name = member_name  # for one of them
        self.rank, self.size = group.rank(), group.size()
        self._watchdog = watchdog
        self._other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        self._pending_sends: list[tuple[int, Any, Tensor]] = []

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        """The numbers of all ranks, by rank: as many from each."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        found[self.rank] = tensor
        asked = [self.group.recv([found[rank]], rank, NUMBERS_TAG) for rank in self._other_ranks]
        sent = [self.group.send([tensor], rank, NUMBERS_TAG) for rank in self._other_ranks]
        for rank, work in zip(self._other_ranks, asked, strict=True):
            self._watchdog.mark_waiting(description, rank)
            work.wait()
        for work in sent:
            work.wait()
        self._watchdog.mark_arrived()
        return found

    def all_gather_text(self, text: str, description: str) -> list[str]:
        """The texts of all ranks, by rank."""
        for rank in self._other_ranks:
            self.send_text(rank, TEXT_TAG, text)
        found = [
            text if rank == self.rank else self.recv_text(rank, TEXT_TAG, description)
            for rank in self.ranks
        ]
        self.flush()
        return found

    def broadcast_text(self, source_rank: int, text: str | None, description: str) -> str:
        """A text that one rank tells all."""
        if self.rank != source_rank:
            return self.recv_text(source_rank, TEXT_TAG, description)
        assert text is not None
        for rank in self._other_ranks:
            self.send_text(rank, TEXT_TAG, text)
        self.flush()
        return text

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.size)

    def send_text(self, rank: int, tag: int, text: str) -> None:
        """A text to a rank: its length, and its bytes; it does not wait."""
        content = text.encode()
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        for tensor in (length, data):
            self._pending_sends.append((rank, self.group.send([tensor], rank, tag), tensor))

    def recv_text(self, rank: int, tag: int, description: str) -> str:
        """A text from a rank."""
        length = torch.empty(1, dtype=torch.int64)
        self._watchdog.mark_waiting(description, rank)
        self.group.recv([length], rank, tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], rank, tag).wait()
        self._watchdog.mark_arrived()
        return bytes(data.numpy()).decode() if len(data) else ""

    def flush(self) -> None:
        """Wait until all texts have been taken."""
        for rank, work, _ in self._pending_sends:
            self._watchdog.mark_waiting("a text to be taken", rank)
            work.wait()
        self._pending_sends.clear()
        self._watchdog.mark_arrived()

    def broadcast_value(self, source_rank: int, value: Any, description: str) -> Any:
        """What one rank has, on all: tensors, and plain values around them."""
        parcel = None
        if self.rank == source_rank:
            tensors, layout = flatten_values((value,))
            parcel = Payload(tuple(t.detach().cpu() for t in tensors), layout)
        meta = decode_spec(
            self.broadcast_text(
                source_rank,
                None if parcel is None else encode_spec(PayloadSpec.from_payload(parcel)),
                description,
            )
        )
        if parcel is not None:
            flats = [flatten_dense(t) for t in parcel.tensors if t is not None and t.numel()]
            to = [(rank, t) for rank in self._other_ranks for t in flats]
            works = [(rank, self.group.send([t], rank, TENSORS_TAG)) for rank, t in to]
            for rank, work in works:
                self._watchdog.mark_waiting(f"{description} to be taken", rank)
                work.wait()
            self._watchdog.mark_arrived()
            return value
        found = [shape.allocate("cpu") for shape in meta.tensor_specs if shape is not None]
        for tensor in found:
            if tensor.numel():
                self._watchdog.mark_waiting(description, source_rank)
                self.group.recv([flatten_dense(tensor)], source_rank, TENSORS_TAG).wait()
                self._watchdog.mark_arrived()
        (value,) = unflatten_values(found, meta.layout)
        return value

    def all_reduce_sum(
        self, ranks: Sequence[int], tensor: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """The sum of what the holders give, in their order, on each of them; None if of nobody.

        The first adds, so that all have the same to the last bit. `like` is of its sizes.
        """
        owner, *others = ranks
        if self.rank != owner:
            self._send_optional(owner, tensor)
            return self._recv_optional(owner, like)
        total = tensor
        for rank in others:
            more = self._recv_optional(rank, like)
            if more is not None:
                total = more if total is None else total + more
        for rank in others:
            self._send_optional(rank, total)
        return total

    def _send_optional(self, rank: int, tensor: Tensor | None) -> None:
        there = torch.tensor([tensor is not None])
        self._watchdog.mark_waiting("what was learned of a tied parameter to be taken", rank)
        self.group.send([there], rank, TENSORS_TAG).wait()
        if tensor is not None:
            self.group.send([tensor.detach().cpu().contiguous()], rank, TENSORS_TAG).wait()
        self._watchdog.mark_arrived()

    def _recv_optional(self, rank: int, like: Tensor) -> Tensor | None:
        there = torch.empty(1, dtype=torch.bool)
        self._watchdog.mark_waiting("what it has learned of a tied parameter", rank)
        self.group.recv([there], rank, TENSORS_TAG).wait()
        found = torch.empty(like.shape, dtype=like.dtype) if there else None
        if found is not None:
            self.group.recv([found], rank, TENSORS_TAG).wait()
        self._watchdog.mark_arrived()
        return None if found is None else found.to(like.device)


# -------------------------------------------------------------------------------------------------
# Before anything moves, the ranks agree on what they are about to do.
#
# Each tells a hash of its facts to all. If they differ, the facts themselves are told, and every rank
# raises the same error, which says how.
# -------------------------------------------------------------------------------------------------

RankFacts = Mapping[str, str]
_SAMPLE_NAMES = [f"some numbers of tensor {at}" for at in range(8)]  # of the first that were given


@dataclass(frozen=True)
class Agreement:
    """What came of it."""

    seed: int  # the first rank's
    cache_key: str  # the same as in another call where all facts were the same, on every rank


def check_ranks_agree(
    channel: ControlChannel,
    call_name: str,
    facts: RankFacts,
    tensor_samples: RankFacts | None = None,
    local_state: str = "",
    seed: int = 0,
) -> Agreement:
    """Raise unless the facts of all ranks are the same, and the samples of their data.

    What is a rank's `own` may differ, and counts for the key. A sample does not.
    """
    told, samples = {"the call": call_name, **facts}, tensor_samples or {}
    some = [hash_facts(samples[name]) if name in samples else 0 for name in _SAMPLE_NAMES]
    mine = [hash_facts(told), hash_facts(local_state), seed, *some]
    found = channel.all_gather(torch.tensor(mine, dtype=torch.int64), f"agreement on {call_name}")
    rows: list[list[int]] = [row.tolist() for row in found]
    seen = [{row[3 + at] for row in rows} - {0} for at in range(len(_SAMPLE_NAMES))]
    if any(row[0] != rows[0][0] for row in rows) or any(len(hashes) > 1 for hashes in seen):
        texts = channel.all_gather_text(
            json.dumps({**told, **samples}), f"the facts of {call_name}"
        )
        raise build_disagreement_error(
            call_name, [json.loads(text) for text in texts], channel.member_name
        )
    key = hashlib.sha256(repr([hash_facts(facts), [row[1] for row in rows]]).encode()).hexdigest()
    return Agreement(rows[0][2], key)


def hash_facts(value: RankFacts | str) -> int:
    """A hash of 63 bits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def build_disagreement_error(
    call_name: str, facts_by_rank: Sequence[RankFacts], member_name: str = "rank"
) -> RemoteError:
    """An error that lists every fact in which ranks differ, or whatever the word for them is.

    >>> print(build_disagreement_error("step 3", [{"chunks": "4"}, {"chunks": "4"}, {"chunks": "8"}]))
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
            said = (
                f"{v} on {member_name} {', '.join(map(str, where))}" for v, where in ranks.items()
            )
            problems.append(f"{name}: {'; '.join(said)}")
    plural = {"rank": "ranks", "copy": "copies"}[member_name]
    head = f"the {plural} disagree about {call_name}, and nothing was sent:"
    return RemoteError("\n".join([head, *(f"  {p}" for p in problems)]), "disagreed")


def sample_tensors(tensors: Sequence[Tensor]) -> RankFacts:
    """A few numbers of tensors that are on the host: batches that differ are told apart by them.

    What is on a device would have to be waited for; ranks that have it elsewhere are not compared.
    """
    return {
        name: str(_sample_values(tensor.detach()))
        for name, tensor in zip(_SAMPLE_NAMES, tensors, strict=False)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided
    }


def _sample_values(tensor: Tensor) -> list[float]:
    """Eight at equal distances, or all; the same ones, however they stand in memory."""
    step = max(1, tensor.numel() // 8)
    if tensor.is_contiguous():
        return tensor.view(-1)[: 8 * step : step].tolist()
    places = torch.arange(0, min(8 * step, tensor.numel()), step)
    return tensor[torch.unravel_index(places, tensor.shape)].tolist()
