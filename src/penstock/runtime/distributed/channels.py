"""The transport of a call among processes: sends and receives the messages of one program.

gloo and NCCL need the shape of a message before it arrives: a message that is larger than the
buffer aborts the receiving process. In the first call with inputs of a certain kind, a header
(`PayloadSpec` as text) goes before each message:

    first call    header over the control channel (text), then the tensors over the links
    later calls   the tensors alone, as both ends have cached the header in a `CallCacheEntry`

`Pipe(shapes="sent")` sends the header in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.distributed.control_channel import (
    FIRST_MESSAGE_TAG,
    ControlChannel,
    WaitObserver,
)
from penstock.runtime.distributed.links import Links
from penstock.runtime.distributed.payload_codec import PayloadSpec, decode_spec, encode_spec
from penstock.runtime.worker import BoundAction
from penstock.schedules.ir import Message, Program
from penstock.stage.payload import Payload


@dataclass
class CallCacheEntry:
    """Facts that the ranks have cached about calls with the same cache key.

    They may be used once a call with this key has succeeded on all ranks (`is_complete`).
    """

    payload_specs: dict[Message, PayloadSpec] = field(default_factory=dict)
    loss_is_weighted: bool = False  # whether loss_fn returns weights
    batch_announcement: str = ""  # the text that the data rank sent, with data="first"
    is_complete: bool = False
    # The lane of this rank, and the same actions with the receives moved forward.
    prefetch_order: tuple[Sequence[BoundAction], Sequence[BoundAction]] | None = None


class ProcessTransport:
    """The transport of one call on this rank.

    `loss_is_weighted` travels with the headers. It tells ranks without the last stage that the
    gradients they receive have a provisional scale (see step_results.py).
    """

    def __init__(
        self,
        links: Links,
        placement: Sequence[int],
        compute_tag: Callable[[Message], int],
        cache_entry: CallCacheEntry,
        text_channel: ControlChannel,
        watchdog: WaitObserver,
    ) -> None:
        self._links, self._placement, self._compute_tag = links, placement, compute_tag
        self._cache_entry, self._text_channel, self._watchdog = cache_entry, text_channel, watchdog
        self.loss_is_weighted = cache_entry.loss_is_weighted

    def send(self, message: Message, payload: Payload) -> None:
        """Send a payload to the rank of the destination stage. Do not wait for the receiver."""
        self.send_to(self._placement[message.dst], message, payload)

    def send_to(self, peer: int, message: Message, payload: Payload) -> None:
        """Send a payload to this rank. It may come from outside, for example an input."""
        tag = self._compute_tag(message)
        if not self._cache_entry.is_complete:
            spec = self._cache_entry.payload_specs[message] = PayloadSpec.from_payload(payload)
            self._text_channel.send_text(
                peer, tag, f"{int(self.loss_is_weighted)}{encode_spec(spec)}"
            )
        elif not self._cache_entry.payload_specs[message].matches(payload):
            raise RunError(
                f"message {message} has {PayloadSpec.from_payload(payload)}, but in the first call "
                f"with such inputs it had {self._cache_entry.payload_specs[message]}, or other "
                "values or requires_grad flags beside the tensors. If the output of a stage "
                "depends on more than the shapes of the inputs, create the pipe with shapes='sent'."
            )
        wait = self._links.send(peer, tag, [t for t in payload.tensors if t is not None])
        if wait is not None:
            self._watchdog.mark_waiting(f"confirmation of messages before {message}", peer)
            wait()
            self._watchdog.mark_arrived()

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Start to receive a message. Return a function that waits for its payload."""
        return self.recv_from(self._placement[message.src], message)

    def recv_from(self, peer: int, message: Message) -> Callable[[], Payload]:
        """Start to receive a message from this rank. Return a function that waits for it."""
        tag = self._compute_tag(message)
        if not self._cache_entry.is_complete:
            text = self._text_channel.recv_text(peer, tag, f"the header of {message}")
            self.loss_is_weighted = self.loss_is_weighted or text[0] == "1"
            self._cache_entry.payload_specs[message] = decode_spec(text[1:])
        spec = self._cache_entry.payload_specs[message]
        wait_for_tensors = self._links.recv(
            peer, tag, [s for s in spec.tensor_specs if s is not None]
        )

        def wait_for_payload() -> Payload:
            self._watchdog.mark_waiting(message, peer)
            payload = spec.build_payload(_insert_nones(spec, wait_for_tensors()))
            self._watchdog.mark_arrived()
            return payload

        return wait_for_payload

    def flush(self) -> None:
        """Wait until the receivers have all messages."""
        self._watchdog.mark_waiting("confirmation of all messages", None)
        self._links.flush()
        self._watchdog.mark_arrived()


def _insert_nones(spec: PayloadSpec, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    if len(tensors) == len(spec.tensor_specs):
        return tuple(tensors)
    remaining = iter(tensors)
    return tuple([None if s is None else next(remaining) for s in spec.tensor_specs])


def assign_message_tags(program: Program) -> Callable[[Message], int]:
    """Return a function that gives each message of a program a tag of its own.

    Messages from outside (stage OUTSIDE, -1) have tags too. The tag depends on the schedule only,
    so both ends compute the same number without an exchange.
    """
    chunks, stage_count = program.schedule.chunks, program.schedule.stages + 1

    def compute_tag(message: Message) -> int:
        pair = (message.src + 1) * stage_count + message.dst + 1
        return FIRST_MESSAGE_TAG + pair * chunks + message.microbatch

    return compute_tag
