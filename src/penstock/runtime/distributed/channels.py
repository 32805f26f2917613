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
from penstock.runtime.distributed.control_channel import FIRST_MESSAGE_TAG, WaitObserver
from penstock.runtime.distributed.links import Links
from penstock.runtime.distributed.payload_codec import PayloadSpec, decode_spec, encode_spec
from penstock.runtime.worker import BoundAction
from penstock.schedules.ir import Message, Program
from penstock.stage.payload import Payload


@dataclass
class CallCacheEntry:
    """What ranks know of a call with a certain signature, once one has ended well."""

    payload_specs: dict[Message, PayloadSpec] = field(default_factory=dict)
    loss_is_weighted: bool = False  # does the loss return weights?
    batch_announcement: str = ""  # of the first rank, if it alone has the data
    is_complete: bool = False
    prefetch_order: tuple[Sequence[BoundAction], Sequence[BoundAction]] | None = (
        None  # a lane, and how it is carried out
    )


class TextChannel(Protocol):
    """Texts to and from ranks, each under a tag."""

    def send_text(self, rank: int, tag: int, text: str) -> None:
        """To a rank."""

    def recv_text(self, rank: int, tag: int, description: str) -> str:
        """From a rank."""


class ProcessTransport:
    """The transport of one call."""

    def __init__(
        self,
        links: Links,
        placement: Sequence[int],
        compute_tag: Callable[[Message], int],
        cache_entry: CallCacheEntry,
        text_channel: TextChannel,
        watchdog: WaitObserver,
    ) -> None:
        self._links, self._placement, self._compute_tag = links, placement, compute_tag
        self._cache_entry, self._text_channel, self._watchdog = cache_entry, text_channel, watchdog
        self.loss_is_weighted = cache_entry.loss_is_weighted

    def send(self, message: Message, payload: Payload) -> None:
        """Hand over; it does not wait for the receiver."""
        self.send_to(self._placement[message.dst], message, payload)

    def send_to(self, peer: int, message: Message, payload: Payload) -> None:
        """The same, to a rank that is named: also what comes from outside."""
        tag = self._compute_tag(message)
        if not self._cache_entry.is_complete:
            meta = self._cache_entry.payload_specs[message] = PayloadSpec.from_payload(payload)
            self._text_channel.send_text(
                peer, tag, f"{int(self.loss_is_weighted)}{encode_spec(meta)}"
            )
        elif not self._cache_entry.payload_specs[message].matches(payload):
            raise RunError(
                f"message {message} has {PayloadSpec.from_payload(payload)}, and in the first call with such inputs "
                f"it had {self._cache_entry.payload_specs[message]}, with other values beside it, or other "
                "needs for gradients: if what a stage gives depends on more than the sizes of the "
                "inputs, make the pipe with shapes='sent'"
            )
        wait = self._links.send(peer, tag, [t for t in payload.tensors if t is not None])
        if wait is not None:
            self._watchdog.mark_waiting(f"messages before {message} to be taken", peer)
            wait()
            self._watchdog.mark_arrived()

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Ask for a message; the call that it gives waits for it."""
        return self.recv_from(self._placement[message.src], message)

    def recv_from(self, peer: int, message: Message) -> Callable[[], Payload]:
        """The same, from a rank that is named."""
        tag = self._compute_tag(message)
        if not self._cache_entry.is_complete:
            text = self._text_channel.recv_text(peer, tag, f"the header of {message}")
            self.loss_is_weighted = self.loss_is_weighted or text[0] == "1"
            self._cache_entry.payload_specs[message] = decode_spec(text[1:])
        meta = self._cache_entry.payload_specs[message]
        arrival = self._links.recv(peer, tag, [s for s in meta.tensor_specs if s is not None])

        def wait_for_payload() -> Payload:
            self._watchdog.mark_waiting(message, peer)
            parcel = meta.build_payload(_insert_nones(meta, arrival()))
            self._watchdog.mark_arrived()
            return parcel

        return wait_for_payload

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        self._watchdog.mark_waiting("all that was sent to be taken", None)
        self._links.flush()
        self._watchdog.mark_arrived()


def _insert_nones(spec: PayloadSpec, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    if len(tensors) == len(spec.tensor_specs):
        return tuple(tensors)
    each = iter(tensors)
    return tuple([None if shape is None else next(each) for shape in spec.tensor_specs])


def assign_message_tags(program: Program) -> Callable[[Message], int]:
    """A number for each message of a program, and for what comes from outside."""
    chunks, neighbours = program.schedule.chunks, program.schedule.stages + 1

    def compute_tag(message: Message) -> int:
        pair = (message.src + 1) * neighbours + message.dst + 1
        return FIRST_MESSAGE_TAG + pair * chunks + message.microbatch

    return compute_tag
