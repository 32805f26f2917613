from __future__ import annotations

import threading

import pytest
import torch

from penstock.device.device import Cpu
from penstock.runtime.transport import Mailboxes, Stopped
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload


def boxes(ranks: int = 2) -> Mailboxes:
    return Mailboxes([Cpu() for _ in range(ranks)], tuple(range(ranks)))


def payload(number: float) -> Payload:
    return Payload((torch.tensor(number),))


def number(payload: Payload) -> float:
    (tensor,) = payload.tensors
    assert tensor is not None
    return tensor.item()


def test_mailbox_delivers_messages_sent_in_any_order() -> None:
    mail = boxes()
    messages = [Message(0, 1, i) for i in range(3)]
    sender, receiver = mail.endpoint(0), mail.endpoint(1)
    for message in reversed(messages):
        sender.send(message, payload(message.microbatch))
    waits = [receiver.recv(message) for message in messages]
    assert [number(wait()) for wait in waits] == [0, 1, 2]


def test_mailbox_delivers_to_the_rank_of_the_destination_stage() -> None:
    mail = Mailboxes([Cpu(), Cpu(), Cpu()], (0, 1, 2, 0))
    mail.endpoint(2).send(Message(2, 3, 0), payload(5))
    assert number(mail.endpoint(0).recv(Message(2, 3, 0))()) == 5


def test_mailbox_recv_waits_for_the_message() -> None:
    mail = boxes()
    wait = mail.endpoint(1).recv(Message(0, 1, 0))
    later = threading.Timer(0.01, lambda: mail.endpoint(0).send(Message(0, 1, 0), payload(7)))
    later.start()
    assert number(wait()) == 7
    later.join()


def test_mailbox_stop_wakes_waiting_ranks() -> None:
    mail = boxes(3)
    woken = []

    def wait(rank: int) -> None:
        with pytest.raises(Stopped):
            mail.endpoint(rank).recv(Message(0, rank, 0))()
        woken.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in (1, 2, 2)]
    for thread in threads:
        thread.start()
    mail.stop()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(woken) == [1, 2, 2]
    assert mail.stopped
    with pytest.raises(Stopped):
        mail.endpoint(1).recv(Message(0, 1, 1))()


def test_mailbox_does_not_copy_host_tensors() -> None:
    mail = boxes()
    sent = payload(1)
    mail.endpoint(0).send(Message(0, 1, 0), sent)
    received = mail.endpoint(1).recv(Message(0, 1, 0))()
    assert received.tensors[0] is sent.tensors[0]
