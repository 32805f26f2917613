"""The rendezvous transport, which buffers nothing, and pipes that run over it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Pipe, Program, RunError, schedules
from penstock.device.device import Cpu
from penstock.runtime import program_cache, threads
from penstock.runtime.program_cache import Phase, bind_program
from penstock.runtime.rendezvous import Rendezvous
from penstock.runtime.transport import Stopped
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload
from tests.properties.random_schedules import obvious
from tests.properties.test_rendezvous import early
from tests.properties.test_sweep import VARIANTS
from tests.support import CHECKPOINTS, Pop, Stash

FIRST, SECOND = Message(0, 1, 0), Message(0, 1, 1)
BACK = Message(1, 0, 0)


def meeting(ranks: int = 2, waits: bool = True, patience: float = 20.0) -> Rendezvous:
    places = [Cpu() for _ in range(ranks)]
    return Rendezvous(places, tuple(range(ranks)), blocking_recv=waits, timeout=patience)


def payload(number: float) -> Payload:
    return Payload((torch.tensor(number),))


class InThread:
    """A function that runs in a thread."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.found: list[object] = []
        self._do = do
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found.append(self._do())
        except Exception as error:
            self.found.append(error)

    def is_blocked(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.found[0]


def test_rendezvous_send_blocks_until_it_is_received() -> None:
    ranks = meeting()
    sending = InThread(lambda: ranks.endpoint(0).send(FIRST, payload(7)))
    assert sending.is_blocked()
    assert ranks.endpoint(1).recv(FIRST)().tensors[0] == 7
    assert sending.result() is None


def test_rendezvous_receive_blocks_or_is_posted() -> None:
    ranks = meeting()
    receiving = InThread(lambda: ranks.endpoint(1).recv(FIRST))
    assert receiving.is_blocked()
    ranks.endpoint(0).send(FIRST, payload(7))
    wait = receiving.result()
    assert callable(wait)
    assert wait().tensors[0] == 7

    ranks = meeting(waits=False)
    wait = ranks.endpoint(1).recv(FIRST)
    ranks.endpoint(0).send(FIRST, payload(7))
    assert wait().tensors[0] == 7


def test_rendezvous_detects_a_deadlock_of_two_ranks() -> None:
    ranks = meeting()
    other = InThread(lambda: ranks.endpoint(1).send(BACK, payload(1)))
    assert other.is_blocked()
    expected = "wait for each other in a deadlock: rank 0 at !0>1:0 for rank 1; rank 1 at !1>0:0"
    with pytest.raises(RunError, match=expected):
        ranks.endpoint(0).send(FIRST, payload(1))
    assert isinstance(other.result(), Stopped)


def test_rendezvous_detects_a_deadlock_of_three_ranks() -> None:
    ranks = meeting(3, waits=False)
    messages = [Message(0, 1, 0), Message(1, 2, 0)]
    others = [
        InThread(partial(ranks.endpoint(at).send, m, payload(1))) for at, m in enumerate(messages)
    ]
    assert all(other.is_blocked() for other in others)
    with pytest.raises(RunError, match=r"rank 2 at .* rank 0 at .* rank 1 at !1>2:0 for rank 2"):
        ranks.endpoint(2).send(Message(2, 0, 0), payload(1))


@pytest.mark.parametrize("waits", [True, False])
def test_rendezvous_refuses_messages_in_a_different_order(waits: bool) -> None:
    ranks = meeting(waits=waits)
    receiving = InThread(lambda: ranks.endpoint(1).recv(SECOND)())
    assert receiving.is_blocked()
    with pytest.raises(RunError, match=r"rank 0 is at !0>1:0 where rank 1 is at \?0>1:1"):
        ranks.endpoint(0).send(FIRST, payload(1))
    assert isinstance(receiving.result(), Stopped)


def test_rendezvous_times_out() -> None:
    with pytest.raises(RunError, match=r"rank 1 has waited 0.01 s at \?0>1:0 for rank 0"):
        meeting(patience=0.01).endpoint(1).recv(FIRST)


def test_rendezvous_stop_wakes_waiting_ranks() -> None:
    ranks = meeting()
    waiting = InThread(lambda: ranks.endpoint(0).send(FIRST, payload(1)))
    assert waiting.is_blocked()
    ranks.stop()
    assert ranks.stopped
    assert isinstance(waiting.result(), Stopped)
    with pytest.raises(Stopped):
        ranks.endpoint(1).recv(FIRST)


# ---- pipes --------------------------------------------------------------------------------


def posted_early(program: Program) -> Phase:
    phase = bind_program(program)
    return Phase(
        tuple(tuple(early(program, rank)) for rank in range(len(phase.lanes))),
        phase.execution_order,
    )


@pytest.fixture(params=["strict", "posted early"])
def _over_a_rendezvous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipes use the rendezvous transport, in which a send waits for its receive."""
    posted = request.param == "posted early"
    monkeypatch.setattr(threads, "Mailboxes", partial(Rendezvous, blocking_recv=not posted))
    if posted:
        monkeypatch.setattr(program_cache, "bind_program", posted_early)


def layers(stages: int) -> nn.Sequential:
    """Return one layer per stage, with a skip connection from the first to the last."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(stages)]
    made[0], made[-1] = nn.Sequential(made[0], Stash()), nn.Sequential(Pop(), made[-1])
    return nn.Sequential(*made).double()


@pytest.mark.usefixtures("_over_a_rendezvous")
@pytest.mark.parametrize(("name", "v"), [x for x in VARIANTS if schedules.FAMILIES[x[0]].trains])
def test_every_schedule_family_runs_over_a_rendezvous(name: str, v: int) -> None:
    for ranks, chunks in ((2, 5), (3, 3)):
        model = layers(ranks * v)
        pipe = Pipe(
            copy.deepcopy(model),
            chunks,
            CHECKPOINTS[(ranks + chunks) % 3],
            stages=[1] * (ranks * v),
            devices=["cpu"] * ranks,
            schedule=name,
            loss_fn=mse_loss,
        )
        x, target = torch.randn(2, 2 * chunks + 1, 3, dtype=torch.float64)
        result = pipe.step(x, target=target)
        loss = mse_loss(model(x), target)
        loss.backward()
        _same({"loss": result.loss}, {"loss": loss.detach()})
        _same(_gradients(pipe), _gradients(model))


@pytest.mark.usefixtures("_over_a_rendezvous")
def test_deadlocking_program_raises_over_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "lower", lambda schedule, graph: obvious(schedule))
    four = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    where = {"stages": 4, "devices": ["cpu"] * 2}
    pipe = Pipe(four, 4, schedule="interleaved", loss_fn=mse_loss, **where)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="these ranks wait for each other"):
        pipe.step(torch.zeros(8, 3), target=torch.zeros(8, 3))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
