"""Short words between the processes of a pipe: numbers of all, texts from one to another.

Collectives of gloo take several times as long as messages between two, so these are messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.run.processes.codec import Meta, dumps, flat, loads
from penstock.run.processes.links import Group
from penstock.stage.parcel import Parcel, put_together, taken_apart

NUMBERS, TEXT, TENSORS = 1, 2, 3  # tags
FIRST_OF_MESSAGES = 16  # those below are for words, and for poison


class Watched(Protocol):
    """Who is told when this rank waits."""

    def waiting(self, what: object, peer: int | None) -> None:
        """It is about to, for something of a rank, or of all."""

    def arrived(self) -> None:
        """It is there."""


class Peers:
    """The other ranks of a pipe, or its other copies, over a gloo group of its own."""

    def __init__(self, group: Group, watched: Watched, word: str = "rank") -> None:
        self.group = group
        self.word = word  # for one of them
        self.rank, self.size = group.rank(), group.size()
        self._watched = watched
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._posted: list[tuple[int, Any, Tensor]] = []

    def exchange(self, mine: Tensor, what: str) -> list[Tensor]:
        """The numbers of all ranks, by rank: as many from each."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        found[self.rank] = mine
        asked = [self.group.recv([found[rank]], rank, NUMBERS) for rank in self._others]
        sent = [self.group.send([mine], rank, NUMBERS) for rank in self._others]
        for rank, work in zip(self._others, asked, strict=True):
            self._watched.waiting(what, rank)
            work.wait()
        for work in sent:
            work.wait()
        self._watched.arrived()
        return found

    def texts(self, mine: str, what: str) -> list[str]:
        """The texts of all ranks, by rank."""
        for rank in self._others:
            self.post(rank, TEXT, mine)
        found = [mine if rank == self.rank else self.take(rank, TEXT, what) for rank in self.all]
        self.flush()
        return found

    def told(self, by: int, text: str | None, what: str) -> str:
        """A text that one rank tells all."""
        if self.rank != by:
            return self.take(by, TEXT, what)
        assert text is not None
        for rank in self._others:
            self.post(rank, TEXT, text)
        self.flush()
        return text

    @property
    def all(self) -> range:
        """The ranks."""
        return range(self.size)

    def post(self, rank: int, tag: int, text: str) -> None:
        """A text to a rank: its length, and its bytes; it does not wait."""
        content = text.encode()
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        for tensor in (length, data):
            self._posted.append((rank, self.group.send([tensor], rank, tag), tensor))

    def take(self, rank: int, tag: int, what: str) -> str:
        """A text from a rank."""
        length = torch.empty(1, dtype=torch.int64)
        self._watched.waiting(what, rank)
        self.group.recv([length], rank, tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], rank, tag).wait()
        self._watched.arrived()
        return bytes(data.numpy()).decode() if len(data) else ""

    def flush(self) -> None:
        """Wait until all texts have been taken."""
        for rank, work, _ in self._posted:
            self._watched.waiting("a text to be taken", rank)
            work.wait()
        self._posted.clear()
        self._watched.arrived()

    def value(self, by: int, value: Any, what: str) -> Any:
        """What one rank has, on all: tensors, and plain values around them."""
        parcel = None
        if self.rank == by:
            tensors, layout = taken_apart((value,))
            parcel = Parcel(tuple(t.detach().cpu() for t in tensors), layout)
        meta = loads(self.told(by, None if parcel is None else dumps(Meta.of(parcel)), what))
        if parcel is not None:
            flats = [flat(t) for t in parcel.tensors if t is not None and t.numel()]
            to = [(rank, t) for rank in self._others for t in flats]
            works = [(rank, self.group.send([t], rank, TENSORS)) for rank, t in to]
            for rank, work in works:
                self._watched.waiting(f"{what} to be taken", rank)
                work.wait()
            self._watched.arrived()
            return value
        found = [shape.empty("cpu") for shape in meta.shapes if shape is not None]
        for tensor in found:
            if tensor.numel():
                self._watched.waiting(what, by)
                self.group.recv([flat(tensor)], by, TENSORS).wait()
                self._watched.arrived()
        (value,) = put_together(found, meta.layout)
        return value

    def summed(self, holders: Sequence[int], mine: Tensor | None, like: Tensor) -> Tensor | None:
        """The sum of what the holders give, in their order, on each of them; None if of nobody.

        The first adds, so that all have the same to the last bit. `like` is of its sizes.
        """
        owner, *others = holders
        if self.rank != owner:
            self._give(owner, mine)
            return self._taken(owner, like)
        total = mine
        for rank in others:
            more = self._taken(rank, like)
            if more is not None:
                total = more if total is None else total + more
        for rank in others:
            self._give(rank, total)
        return total

    def _give(self, rank: int, tensor: Tensor | None) -> None:
        there = torch.tensor([tensor is not None])
        self._watched.waiting("what was learned of a tied parameter to be taken", rank)
        self.group.send([there], rank, TENSORS).wait()
        if tensor is not None:
            self.group.send([tensor.detach().cpu().contiguous()], rank, TENSORS).wait()
        self._watched.arrived()

    def _taken(self, rank: int, like: Tensor) -> Tensor | None:
        there = torch.empty(1, dtype=torch.bool)
        self._watched.waiting("what it has learned of a tied parameter", rank)
        self.group.recv([there], rank, TENSORS).wait()
        found = torch.empty(like.shape, dtype=like.dtype) if there else None
        if found is not None:
            self.group.recv([found], rank, TENSORS).wait()
        self._watched.arrived()
        return None if found is None else found.to(like.device)
