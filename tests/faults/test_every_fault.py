"""Every fault at every place of a training run, on ranks that change from place to place.

                forward  backward  send  loss       between  saving
    raise          x        x        x   last rank     x        x     of 2 and of 3 ranks, in turns
    kill -9        x        x        x   last rank     x        x     of 2 and of 3, in turns
    stall          x        x        x   last rank     x        x     of 2 and of 3, in turns
    sys.exit       x        x        x   last rank     x        x     of 2: like an error for others
    os._exit       x                                   x        x     of 2: like kill -9 for others

Only the last rank computes the loss. Between steps it is the optimizer that fails. Ranks that
disagree are tested in test_disagreement.py. In every case all ranks end in time with the same
cause, no process is left running, and training can resume from the last checkpoint. `make soak`
lets each rank of each size fail at each place.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.distributed.ranks import SOAK
from tests.faults.checks import check_cause, check_checkpoint, others
from tests.faults.disposable_ranks import RankOutcome, run_cases
from tests.faults.training_run import LAYERS, Fault, burst, ends, train_with_fault
from tests.faults.watchdog_step import EXIT_CODE, LONG_HEARTBEAT, kill, leave, stall

PLACES = ("forward", "backward", "send", "loss", "between", "saving")
FAULTS = (burst, kill, stall, ends, leave)


def failing_ranks(place: str, fail: Callable[[], object], size: int) -> list[int]:
    """Return the ranks on which the fault is tried: one of them, or all in a soak run."""
    if place == "loss":
        return [size - 1]
    return [*range(size)] if SOAK else [(PLACES.index(place) + FAULTS.index(fail)) % size]


def numbers_of_ranks(
    place: str, fail: Callable[[], object], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the sizes to try at a place: they take turns, and a soak run tries all of them."""
    if SOAK:
        return sizes
    return (sizes[(PLACES.index(place) + FAULTS.index(fail)) % len(sizes)],)


def run_fault(
    fail: Callable[[], object],
    folder: Path,
    sizes: tuple[int, ...] = (2, 3),
    places: tuple[str, ...] = PLACES,
) -> Iterator[tuple[str, int, int, list[RankOutcome]]]:
    """Check what holds for all faults; yield the place, the size, the failing rank and outcomes.

    All cases run at the same time, because most of them wait most of the time.
    """
    given = {
        (place, size, rank): (size, train_with_fault, Fault(rank, place, fail), folder / name)
        for place in places
        for size in numbers_of_ranks(place, fail, sizes)
        for rank in failing_ranks(place, fail, size)
        for name in [f"{place}-{size}-{rank}"]
    }
    for (place, size, rank), outcomes in run_cases(given).items():
        case = place, size, rank
        assert all(outcome.code not in (0, None) for outcome in outcomes), (case, outcomes)
        check_checkpoint(folder / f"{place}-{size}-{rank}", outcomes)
        yield place, size, rank, outcomes


def check_cell(place: str, rank: int, size: int, outcomes: list[RankOutcome]) -> None:
    """Check that the error names the cell."""
    share = LAYERS // size
    layers = tuple(map(str, range(rank * share, (rank + 1) * share)))
    # The loss of a recomputed micro-batch is computed in its recomputation.
    action = f"{rank}{ {'backward': 'B', 'loss': 'R'}.get(place, 'F') }1"
    for outcome in outcomes:
        fields = outcome.facts["fields"]
        found = fields["stage"], fields["layers"], fields["microbatch"], fields["action"]
        assert found == (rank, layers, 1, action)


def test_exception_on_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    for place, size, rank, outcomes in run_fault(burst, tmp_path):
        # Between calls, the failing rank raises the caller's own error.
        raised = others(size, rank) if place == "between" else range(size)
        text = check_cause(outcomes, raised, "raised", rank)
        assert f"The original error, on rank {rank}:\nTraceback" in text
        assert "in burst\n" in text
        assert "Burst: all wrong" in text
        if place in ("forward", "backward", "loss"):
            check_cell(place, rank, size, outcomes)
        assert outcomes[rank].facts["error" if place == "between" else "came_from"] == "Burst"


def test_sys_exit_on_one_rank_interrupts_the_others(tmp_path: Path) -> None:
    for place, size, rank, outcomes in run_fault(ends, tmp_path, (2,)):
        kind = "left" if place == "between" else "interrupted"
        text = check_cause(outcomes, others(size, rank), kind, rank)
        assert place == "between" or f"rank {rank} was interrupted by SystemExit" in text
        assert outcomes[rank].code == EXIT_CODE


def test_killed_rank_is_reported_by_its_peers(tmp_path: Path) -> None:
    for _, size, rank, outcomes in run_fault(kill, tmp_path):
        text = check_cause(outcomes, others(size, rank), "died", rank)
        silence = re.search(rf"rank {rank} died: no heartbeat for ([0-9.]+) s, ", text)
        # A closed connection makes the others suspicious long before a heartbeat is over.
        assert silence is not None
        assert float(silence[1]) < LONG_HEARTBEAT / 4
        assert re.search(r"; rank \d was in \w+ \(call \d\), (waiting for|at) ", text)
        assert outcomes[rank].code == -signal.SIGKILL


def test_os_exit_on_one_rank_is_reported_by_its_peers(tmp_path: Path) -> None:
    places = ("forward", "between", "saving")
    for _, size, rank, outcomes in run_fault(leave, tmp_path, (2,), places):
        check_cause(outcomes, others(size, rank), "died", rank)
        assert outcomes[rank].code == EXIT_CODE


def test_stalled_rank_is_reported_by_its_peers(tmp_path: Path) -> None:
    for _, size, rank, outcomes in run_fault(stall, tmp_path):
        text = check_cause(outcomes, others(size, rank), "stalled", rank)
        assert f"rank {rank} has stalled, " in text
        assert "heartbeat= above 3 seconds" in text
        assert "waiting for " in text
        assert outcomes[rank].code == 1
        assert text in outcomes[rank].written
        assert "in stall\n" in outcomes[rank].written
