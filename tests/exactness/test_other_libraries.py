"""What users of pipelines are hurt by in silence: here it is as in the unsplit model.

The scripts are in `examples/three_ways`; `benchmarks/trust.py` also runs them with
torch.distributed.pipelining, and `docs/trust.md` has what came out.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from three_ways import REFUSED, SILENT
from three_ways.processes import Failure, in_processes
from three_ways.replicas import Replicas
from three_ways.row import Found, Row, batch, gradients, network, two_ranks
from three_ways.silent import Evaluate, Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipe
from tests.distributed.fork_server import forked
from tests.support import closely

ROOT = Path(__file__).parents[2]
HERE = [row for row in (*SILENT, *REFUSED) if row.replicas == 1]
ONE_STAGE = ["gpipe", "1f1b", "zb-h1"]


def assert_equal(found: Found | Failure, expected: Found) -> None:
    assert isinstance(found, dict), str(found)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not closely(found[name], expected[name])] == []


@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize("row", HERE, ids=lambda row: row.title)
def test_example_script_equals_the_unsplit_model(row: Row, schedule: str) -> None:
    assert_equal(replace(row, schedule=schedule).penstock(), row.unsplit())


def test_gradients_of_steps_and_calls_add_up() -> None:
    model, pipe = network(), two_ranks(network(), mse_loss, "1f1b")
    for seed in (1, 2, 3):
        x, target = batch(14 + seed, seed)
        mse_loss(model(x), target).backward()
        if seed == 2:
            mse_loss(pipe(x), target).backward()
        else:
            pipe.step(x, target=target)
    assert_equal(gradients(pipe), gradients(model))


def test_tensor_with_other_rows_is_refused_with_a_no_chunk_hint() -> None:
    pipe = two_ranks(Table().model(), mse_loss, "1f1b")
    x, target, positions = Table().sequences()
    with pytest.raises(ValueError, match=r"NoChunk\(positions\).*Chunk\(positions, dim"):
        pipe.step(x, positions=positions, target=target)
    assert gradients(pipe) == {}


# ---- several processes ---------------------------------------------------------------------


class Trains(nn.Module):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.pipe.step(x, target=target).loss


class Wrapped(Replicas):
    def penstock(self) -> Found:
        pipe = two_ranks(network(), mse_loss, self.schedule)
        x, target = self.half(torch.distributed.get_rank())
        around = DistributedDataParallel(Trains(pipe))
        with pytest.raises(RuntimeError, match="wrapped in DistributedDataParallel"):
            around(x, target)
        wrapped = DistributedDataParallel(pipe)
        with pytest.raises(RuntimeError, match="wrapped in DistributedDataParallel"):
            wrapped.module.step(x, target=target)
        assert gradients(pipe) == {}
        with torch.no_grad():
            return {"loss": pipe.step(x, target=target).loss}


class Broken(Evaluate):
    def pipelining(self) -> Found:
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("on one rank\nonly")
        time.sleep(60)
        return {}

    def penstock(self) -> Found:
        time.sleep(60)
        return {}


@pytest.fixture(scope="module")
def _forked() -> Iterator[None]:
    """Fork the processes instead of spawning them; the test of the benchmark spawns some."""
    with pytest.MonkeyPatch.context() as patch:
        context = SimpleNamespace(get_context=lambda method: forked())
        patch.setattr("three_ways.processes.multiprocessing", context)
        yield


@pytest.fixture(scope="module")
def replicated(_forked: None) -> list[Found | Failure]:
    """Run all scripts in one group of processes, and one more after one of them fails."""
    row = Replicas()
    right = [row.penstock, row.penstock_called, Wrapped().penstock]
    return in_processes([*right, Broken().pipelining, Broken().unsplit], row.replicas)


@pytest.mark.parametrize(("door", "at"), [("step", 0), ("call", 1)])
def test_replicas_equal_the_whole_batch(
    replicated: list[Found | Failure], door: str, at: int
) -> None:
    assert_equal(replicated[at], Replicas().unsplit())


def test_step_inside_distributed_data_parallel_is_refused(
    replicated: list[Found | Failure],
) -> None:
    assert isinstance(replicated[2], dict), str(replicated[2])


def test_failing_process_is_reported_and_the_next_script_runs(
    replicated: list[Found | Failure],
) -> None:
    failed, after = replicated[3:]
    assert str(failed) == "rank 1: ArithmeticError: on one rank"
    assert_equal(after, Broken().unsplit())


@pytest.mark.usefixtures("_forked")
def test_hanging_process_is_stopped_at_the_time_limit() -> None:
    start = time.monotonic()
    (failed,) = in_processes([Broken().penstock], processes=1, limit=2)
    assert str(failed) == "rank 0: no answer within the time limit"
    assert time.monotonic() - start < 20


def test_trust_benchmark_prints_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trust.py", "--only", "BatchNorm"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / "trust.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    *_, last = out.splitlines()
    assert last.startswith("| BatchNorm, one step | running statistics |")
    assert last.endswith("| equal (0e+00) |")
