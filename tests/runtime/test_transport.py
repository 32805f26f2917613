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


def parcel(number: float) -> Payload:
    return Payload((torch.tensor(number),))


def number(parcel: Payload) -> float:
    (tensor,) = parcel.tensors
    assert tensor is not None
    return tensor.item()


def test_messages_are_told_apart_whatever_order_they_come_in() -> None:
    mail = boxes()
    messages = [Message(0, 1, i) for i in range(3)]
    sender, receiver = mail.endpoint(0), mail.endpoint(1)
    for message in reversed(messages):
        sender.send(message, parcel(message.microbatch))
    waits = [receiver.recv(message) for message in messages]
    assert [number(wait()) for wait in waits] == [0, 1, 2]


def test_a_message_between_stages_of_other_ranks_goes_to_the_right_one() -> None:
    mail = Mailboxes([Cpu(), Cpu(), Cpu()], (0, 1, 2, 0))
    mail.endpoint(2).send(Message(2, 3, 0), parcel(5))
    assert number(mail.endpoint(0).recv(Message(2, 3, 0))()) == 5


def test_recv_waits() -> None:
    mail = boxes()
    wait = mail.endpoint(1).recv(Message(0, 1, 0))
    later = threading.Timer(0.01, lambda: mail.endpoint(0).send(Message(0, 1, 0), parcel(7)))
    later.start()
    assert number(wait()) == 7
    later.join()


def test_who_waits_is_woken_up_when_all_stop() -> None:
    mail = boxes(3)
    woken = []

    def wait(rank: int) -> None:
        with pytest.raises(Stopped):
            mail.endpoint(rank).recv(Message(0, rank, 0))()
        woken.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    mail.stop()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(woken) == [1, 2]
    assert mail.stopped
    with pytest.raises(Stopped):
        mail.endpoint(1).recv(Message(0, 1, 1))()


def test_tensors_on_the_host_are_not_copied() -> None:
    mail = boxes()
    sent = parcel(1)
    mail.endpoint(0).send(Message(0, 1, 0), sent)
    received = mail.endpoint(1).recv(Message(0, 1, 0))()
    assert received.tensors[0] is sent.tensors[0]
