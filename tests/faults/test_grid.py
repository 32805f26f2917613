"""Every fault, at every place of a training run over a pipe, on each rank.

                forward  backward  send  loss       between  saving
    raise          x        x        x   last rank     x        x     of 2 and of 3 ranks
    kill -9        x        x        x   last rank     x        x     of 2 and of 3
    stall          x        x        x   last rank     x        x     of 2 and of 3
    sys.exit       x        x        x   last rank     x        x     of 2: like an error for others
    os._exit       x                                   x        x     of 2: like kill -9 for others

Only the last rank computes the loss. Between steps it is the optimizer that fails. Ranks that
disagree are tested in test_disagree.py. In every case all ranks end in time with the same cause, no
process is left running, and training can resume from the last checkpoint.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.checks import SOON, check_cause, check_checkpoint, others
from tests.faults.course import (
    CODE,
    HEARTBEAT,
    LAYERS,
    Fault,
    burst,
    course,
    ends,
    ends_at_once,
    kill,
    stall,
)
from tests.faults.throwaway import Fate, perform_all

PLACES = ("forward", "backward", "send", "loss", "between", "saving")
each_place = pytest.mark.parametrize("place", PLACES)


def each_rank(
    place: str, fail: Callable[[], object], folder: Path, sizes: tuple[int, ...] = (2, 3)
) -> Iterator[tuple[int, int, list[Fate]]]:
    """Run the fault on each rank, check what holds for all faults, and yield size, rank, fates."""
    cases = [(size, rank) for size in sizes for rank in range(size)]
    cases = [(size, rank) for size, rank in cases if place != "loss" or rank == size - 1]
    folders = {case: folder / "{}-{}".format(*case) for case in cases}
    given = {
        (size, rank): (size, course, Fault(rank, place, fail), folders[size, rank])
        for size, rank in cases
    }
    for (size, rank), fates in perform_all(given).items():
        assert all(fate.code not in (0, None) for fate in fates), (size, rank, fates)
        check_checkpoint(folders[size, rank], fates)
        yield size, rank, fates


def check_cell(place: str, rank: int, size: int, fates: list[Fate]) -> None:
    """Check that the error names the cell."""
    share = LAYERS // size
    layers = tuple(map(str, range(rank * share, (rank + 1) * share)))
    action = f"{rank}{'B' if place == 'backward' else 'F'}1"
    for fate in fates:
        fields = fate.facts["fields"]
        found = fields["stage"], fields["layers"], fields["microbatch"], fields["action"]
        assert found == (rank, layers, 1, action)


@each_place
def test_exception_on_one_rank_is_raised_on_all_ranks(place: str, tmp_path: Path) -> None:
    for size, rank, fates in each_rank(place, burst, tmp_path):
        # Between calls, the failing rank raises the caller's own error.
        raised = others(size, rank) if place == "between" else range(size)
        text = check_cause(fates, raised, "raised", rank, SOON)
        assert f"The original error, on rank {rank}:\nTraceback" in text
        assert "in burst\n" in text
        assert "Burst: all wrong" in text
        if place in ("forward", "backward", "loss"):
            check_cell(place, rank, size, fates)
        assert fates[rank].facts["error" if place == "between" else "came_from"] == "Burst"


@each_place
def test_sys_exit_on_one_rank_interrupts_the_others(place: str, tmp_path: Path) -> None:
    for size, rank, fates in each_rank(place, ends, tmp_path, (2,)):
        kind = "left" if place == "between" else "interrupted"
        text = check_cause(fates, others(size, rank), kind, rank, SOON)
        assert place == "between" or f"rank {rank} was interrupted by SystemExit" in text
        assert fates[rank].code == CODE


@each_place
def test_killed_rank_is_reported_by_its_peers(place: str, tmp_path: Path) -> None:
    for size, rank, fates in each_rank(place, kill, tmp_path):
        text = check_cause(fates, others(size, rank), "died", rank, HEARTBEAT + SOON)
        assert f"rank {rank} died: no heartbeat for" in text
        assert re.search(r"; rank \d was in \w+ \(call \d\), (waiting for|at) ", text)
        assert fates[rank].code == -signal.SIGKILL


@pytest.mark.parametrize("place", ["forward", "between", "saving"])
def test_os_exit_on_one_rank_is_reported_by_its_peers(place: str, tmp_path: Path) -> None:
    for size, rank, fates in each_rank(place, ends_at_once, tmp_path, (2,)):
        check_cause(fates, others(size, rank), "died", rank, HEARTBEAT + SOON)
        assert fates[rank].code == CODE


@each_place
def test_stalled_rank_is_reported_by_its_peers(place: str, tmp_path: Path) -> None:
    for size, rank, fates in each_rank(place, stall, tmp_path):
        text = check_cause(fates, others(size, rank), "stalled", rank, HEARTBEAT + SOON)
        assert f"rank {rank} has stalled, " in text
        assert "waiting for " in text
        assert fates[rank].code == 1
        assert text in fates[rank].written
        assert "in stall\n" in fates[rank].written
