"""A rank's end of the messages between processes.

A message's bytes are preceded by nothing if both ends know what they mean. They learn it in the
first call with such inputs (its signature): there, a header goes before each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from penstock.errors import RunError
from penstock.ir import Message, Program
from penstock.run.processes.codec import Meta, dumps, loads
from penstock.run.processes.links import Links
from penstock.run.processes.peers import FIRST_OF_MESSAGES, Watched
from penstock.run.worker import Step
from penstock.stage.parcel import Parcel


@dataclass
class Learned:
    """What ranks know of a call with a certain signature, once one has ended well."""

    metas: dict[Message, Meta] = field(default_factory=dict)
    weighted: bool = False  # does the loss return weights?
    announcement: str = ""  # of the first rank, if it alone has the data
    known: bool = False
    order: tuple[Sequence[Step], Sequence[Step]] | None = None  # a lane, and how it is carried out


class Words(Protocol):
    """Texts to and from ranks, each under a tag."""

    def post(self, rank: int, tag: int, text: str) -> None:
        """To a rank."""

    def take(self, rank: int, tag: int, what: str) -> str:
        """From a rank."""


class Wire:
    """The transport of one call."""

    def __init__(
        self,
        links: Links,
        placement: Sequence[int],
        tag: Callable[[Message], int],
        learned: Learned,
        words: Words,
        watched: Watched,
    ) -> None:
        self._links, self._placement, self._tag = links, placement, tag
        self._learned, self._words, self._watched = learned, words, watched
        self.weighted = learned.weighted

    def send(self, message: Message, parcel: Parcel) -> None:
        """Hand over; it does not wait for the receiver."""
        self.send_to(self._placement[message.dst], message, parcel)

    def send_to(self, peer: int, message: Message, parcel: Parcel) -> None:
        """The same, to a rank that is named: also what comes from outside."""
        tag = self._tag(message)
        if not self._learned.known:
            meta = self._learned.metas[message] = Meta.of(parcel)
            self._words.post(peer, tag, f"{int(self.weighted)}{dumps(meta)}")
        elif not self._learned.metas[message].fits(parcel):
            raise RunError(
                f"message {message} has {Meta.of(parcel)}, and in the first call with such inputs "
                f"it had {self._learned.metas[message]}, with other values beside it, or other "
                "needs for gradients: if what a stage gives depends on more than the sizes of the "
                "inputs, make the pipe with shapes='sent'"
            )
        wait = self._links.send(peer, tag, [t for t in parcel.tensors if t is not None])
        if wait is not None:
            self._watched.waiting(f"messages before {message} to be taken", peer)
            wait()
            self._watched.arrived()

    def recv(self, message: Message) -> Callable[[], Parcel]:
        """Ask for a message; the call that it gives waits for it."""
        return self.recv_from(self._placement[message.src], message)

    def recv_from(self, peer: int, message: Message) -> Callable[[], Parcel]:
        """The same, from a rank that is named."""
        tag = self._tag(message)
        if not self._learned.known:
            text = self._words.take(peer, tag, f"the header of {message}")
            self.weighted = self.weighted or text[0] == "1"
            self._learned.metas[message] = loads(text[1:])
        meta = self._learned.metas[message]
        arrival = self._links.recv(peer, tag, [s for s in meta.shapes if s is not None])

        def wait() -> Parcel:
            self._watched.waiting(message, peer)
            parcel = meta.parcel(_with_nones(meta, arrival()))
            self._watched.arrived()
            return parcel

        return wait

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        self._watched.waiting("all that was sent to be taken", None)
        self._links.flush()
        self._watched.arrived()


def _with_nones(meta: Meta, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    if len(tensors) == len(meta.shapes):
        return tuple(tensors)
    each = iter(tensors)
    return tuple([None if shape is None else next(each) for shape in meta.shapes])


def tags_of(program: Program) -> Callable[[Message], int]:
    """A number for each message of a program, and for what comes from outside."""
    chunks, neighbours = program.schedule.chunks, program.schedule.stages + 1

    def tag(message: Message) -> int:
        pair = (message.src + 1) * neighbours + message.dst + 1
        return FIRST_OF_MESSAGES + pair * chunks + message.microbatch

    return tag
