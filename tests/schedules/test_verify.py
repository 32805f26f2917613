from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock import schedules
from penstock.errors import InvalidScheduleError
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op, Program, Schedule, StageGraph
from penstock.schedules.lowering import lower, recompute
from penstock.schedules.notation import loads
from penstock.schedules.verify import (
    find_compute_mismatches,
    find_incomplete_cells,
    find_invalid_overlaps,
    find_misplaced_actions,
    find_unmatched_messages,
    require_sound,
    verify,
)
from tests.schedules.texts import schedule


def problems(text: str, graph: StageGraph | None = None) -> list[str]:
    return list(verify(loads(text), graph))


def breaks(claim: Callable[[Schedule], Iterator[str]], text: str) -> list[str]:
    """Return the problems that one check finds; `verify` must report them, too."""
    found = list(claim(schedule(text)))
    assert set(found) <= set(problems(text))
    return found


# ---- sound --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_verify_accepts_every_family_and_its_program(name: str) -> None:
    schedule = schedules.make(name, ranks=3, chunks=6)
    assert verify(schedule) == ()
    assert verify(lower(schedule)) == ()


def test_verify_accepts_skips_and_recomputation() -> None:
    schedule = recompute(schedules.dualpipe_v(ranks=2, chunks=4), lambda s, m: m % 2 == 0)
    skips = StageGraph.chain(4, skips=[(0, 2), (0, 3), (1, 3)])
    assert verify(schedule, skips) == ()
    assert verify(lower(schedule, skips)) == ()


@pytest.mark.parametrize("text", ["0F0 0F1 \n 1F0 1F1", "placement: 1 \n - \n 0F0 0B0"])
def test_verify_accepts_inference_and_an_idle_rank(text: str) -> None:
    assert verify(loads(text), memory=1) == ()


def test_require_sound_raises_with_every_problem() -> None:
    require_sound(schedules.one_f_one_b(ranks=2, chunks=2), memory=2)
    work = loads("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B1 1B0")
    with pytest.raises(InvalidScheduleError) as error:
        require_sound(work)
    assert error.value.problems == verify(work)
    assert str(error.value) == (
        "this schedule must not run:\n"
        "  rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3)\n"
        "  rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)"
    )


def test_require_sound_uses_graph_memory_and_cost() -> None:
    schedule = schedules.one_f_one_b(ranks=2, chunks=2)
    with pytest.raises(InvalidScheduleError, match="edge 0>2"):
        require_sound(schedule, StageGraph(((0, 2),)))
    with pytest.raises(InvalidScheduleError, match="over 1"):
        require_sound(schedule, memory=1)
    small = Cost((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, activation=(0.5, 0.5))
    require_sound(schedule, memory=1, cost=small)


# ---- each check of a schedule, violated alone ---------------------------------------------


OVERLAPS = "overlaps: 0F1+0B0 \n"
APART = "0F1 and 0B0 may overlap, but are not neighbours in a lane"


@pytest.mark.parametrize(
    ("claim", "text", "problem"),
    [
        (
            find_misplaced_actions,
            "placement: 0 \n 0F0 0B0 1F0",
            "rank 0, step 2: 1F0 names stage 1, but there are 1",
        ),
        (
            find_misplaced_actions,
            "placement: 0 1 \n 0F0 0B0 1B0 \n 1F0",
            "rank 0, step 2: 1B0 is in this lane, but stage 1 is on rank 1",
        ),
        (
            find_misplaced_actions,
            "chunks: 1 \n 0F0 0B0 0F1",
            "rank 0, step 2: 0F1 names micro-batch 1 of 1",
        ),
        (
            find_invalid_overlaps,
            "overlaps: 0B0+0F7 \n 0F0 0B0",
            "0B0 and 0F7 may overlap, but are not both in the schedule",
        ),
        (find_invalid_overlaps, f"{OVERLAPS} 0F0 0F1 0B1 0B0", APART),
        (find_invalid_overlaps, f"{OVERLAPS} 0F0 0B0 0F1 0B1", APART),
        (
            find_invalid_overlaps,
            "overlaps: 0F0+1B0 \n 0F0 0B0 \n 1F0 1B0",
            "0F0 and 1B0 may overlap, but are not neighbours in a lane",
        ),
    ],
)
def test_verify_reports_misplaced_actions_and_invalid_overlaps(
    claim: Callable[[Schedule], Iterator[str]], text: str, problem: str
) -> None:
    assert breaks(claim, text) == [problem]


@pytest.mark.parametrize(
    ("lane", "problem"),
    [
        ("0F0 0B0 0B1", "F runs never, not once"),
        ("0F0 0B0 0F1 0F1 0B1", "F runs twice, not once"),
        ("0F0 0B0 0F1 0F1 0F1 0F1 0B1", "F runs 4 times, not once"),
        ("0F0 0B0 0F1 0R1 0R1 0B1", "R runs twice, not at most once"),
    ],
)
def test_verify_reports_missing_or_repeated_f_and_r(lane: str, problem: str) -> None:
    assert breaks(find_incomplete_cells, lane) == [f"stage 0, micro-batch 1: {problem}"]


@pytest.mark.parametrize(
    ("lane", "found"),
    [
        ("0F0 0B0 0F1", "B never, I never, W never"),
        ("0F0 0B0 0F1 0B1 0B1", "B twice, I never, W never"),
        ("0F0 0B0 0F1 0B1 0I1 0W1", "B once, I once, W once"),
        ("0F0 0B0 0F1 0I1", "B never, I once, W never"),
        ("0F0 0B0 0F1 0W1", "B never, I never, W once"),
        ("0F0 0B0 0F1 0I1 0W1 0W1", "B never, I once, W twice"),
        ("0F0 0I0 0W0 0F1", "B never, I never, W never"),
    ],
)
def test_verify_reports_missing_or_repeated_backwards(lane: str, found: str) -> None:
    assert breaks(find_incomplete_cells, lane) == [
        f"stage 0, micro-batch 1: it needs B once, or I and W once, but has {found}"
    ]


def test_verify_reports_an_edge_to_an_unknown_stage() -> None:
    text, graph = "0F0 0B0 \n 1F0 1B0", StageGraph(((0, 1), (1, 5)))
    wrong = ["edge 1>5 names stage 5, but there are 2"]
    assert graph.strays(schedule(text).stages) == wrong
    assert problems(text, graph) == wrong


def test_verify_uses_the_given_stage_graph() -> None:
    text = "placement: 0 0 \n 1F0 0F0"
    assert problems(text, StageGraph(())) == []
    assert problems(text) == ["rank 0, step 0: 1F0 waits for 0F0 (rank 0, step 1)"]


@pytest.mark.parametrize(
    ("lane", "problem"),
    [
        ("0B0 0F0", "rank 0, step 0: 0B0 waits for 0F0 (rank 0, step 1)"),
        ("0F0 0B0 0R0", "rank 0, step 1: 0B0 waits for 0R0 (rank 0, step 2)"),
    ],
)
def test_verify_reports_actions_of_a_cell_in_the_wrong_order(lane: str, problem: str) -> None:
    assert problems(lane) == [problem]


# ---- memory -------------------------------------------------------------------------------


def test_verify_reports_where_memory_exceeds_the_cap() -> None:
    gpipe = schedules.gpipe(ranks=2, chunks=3)
    assert verify(gpipe, memory=3) == verify(recompute(gpipe, lambda s, m: True), memory=1) == ()
    assert verify(gpipe, memory=2) == verify(lower(gpipe), memory=2)
    assert verify(gpipe, memory=2) == (
        "rank 0, step 2: 0F2 brings live memory to 3, over 2",
        "rank 1, step 2: 1F2 brings live memory to 3, over 2",
    )
    interleaved = schedules.interleaved(ranks=2, chunks=4)
    assert verify(interleaved, memory=2.5) == ()
    assert verify(interleaved, memory=2.4) == (
        "rank 0, step 4: 0F2 brings live memory to 2.5, over 2.4",
    )


def test_verify_memory_uses_the_units_of_the_cost() -> None:
    cost = Cost((1.0,), (1.0,), (1.0,), activation=(1e9,))
    two = loads("0F0 0F1 0B0 0B1")
    assert verify(two, memory=2e9, cost=cost) == ()
    assert verify(two, memory=1.5e9, cost=cost) == (
        "rank 0, step 1: 0F1 brings live memory to 2e+09, over 1.5e+09",
    )


# ---- each check of a program, violated alone ----------------------------------------------

RANK_0 = "0F0 !0>1:0 ?1>0:0 0B0"
RANK_1 = "?0>1:0 1F0 1B0 !1>0:0"


def program_problems(rank_0: str = RANK_0, rank_1: str = RANK_1) -> list[str]:
    return problems(f"placement: 0 1 \n edges: 0>1 \n {rank_0} \n {rank_1}")


def unmatched(rank_0: str = RANK_0, rank_1: str = RANK_1, placement: str = "0 1") -> list[str]:
    """Return the problems of the messages; `verify` must report them, too."""
    text = f"placement: {placement} \n edges: 0>1 \n {rank_0} \n {rank_1}"
    program = loads(text)
    assert isinstance(program, Program)
    found = list(find_unmatched_messages(program))
    assert set(found) <= set(verify(program))
    return found


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "problem"),
    [
        (RANK_0, "1F0 1B0 !1>0:0", "rank 1: ?0>1:0 occurs never, not once"),
        (RANK_0, "?0>1:0 1F0 1B0", "rank 1: !1>0:0 occurs never, not once"),
        ("0F0 !0>1:0 !0>1:0 ?1>0:0 0B0", RANK_1, "rank 0: !0>1:0 occurs twice, not once"),
        (RANK_0, f"?0>1:0 ?0>1:0 {RANK_1}", "rank 1: ?0>1:0 occurs 3 times, not once"),
        (f"{RANK_0} !0>1:7", RANK_1, "rank 0: !0>1:7 occurs once, not never"),
    ],
)
def test_verify_reports_missing_and_repeated_messages(
    rank_0: str, rank_1: str, problem: str
) -> None:
    assert program_problems() == []
    assert unmatched(rank_0, rank_1) == [problem]


def test_verify_reports_a_recv_on_the_wrong_rank() -> None:
    found = unmatched(rank_0="0F0 !0>1:0 0B0", rank_1=f"{RANK_1} ?1>0:0")
    assert sorted(found) == [
        "rank 0: ?1>0:0 occurs never, not once",
        "rank 1: ?1>0:0 occurs once, not never",
    ]


def test_verify_reports_a_message_within_a_rank() -> None:
    assert unmatched("0F0 !0>1:0 1F0", "-", placement="0 0") == [
        "rank 0: !0>1:0 occurs once, not never"
    ]


def test_verify_reports_a_send_before_its_compute() -> None:
    assert program_problems(rank_0="!0>1:0 0F0 ?1>0:0 0B0") == [
        "rank 0, step 0: !0>1:0 waits for 0F0 (rank 0, step 1)",
        "rank 1, step 1: 1F0 waits for !0>1:0 (rank 0, step 0)",
    ]


def test_verify_reports_a_recv_after_its_use() -> None:
    assert program_problems(rank_1="1F0 ?0>1:0 1B0 !1>0:0") == [
        "rank 0, step 3: 0B0 waits for !1>0:0 (rank 1, step 3)",
        "rank 1, step 0: 1F0 waits for ?0>1:0 (rank 1, step 1)",
    ]


def test_verify_reports_a_program_that_needs_buffered_sends() -> None:
    found = problems("""
        edges: 0>1
        0F0 !0>1:0 0F1 !0>1:1 ?1>0:0 0B0 ?1>0:1 0B1
        ?0>1:0 1F0 1B0 !1>0:0 ?0>1:1 1F1 1B1 !1>0:1
    """)
    blocked = "when sends block until they are received"
    assert found == [
        f"rank 0, step 3: !0>1:1 waits for ?0>1:1 (rank 1, step 4), {blocked}",
        f"rank 1, step 3: !1>0:0 waits for ?1>0:0 (rank 0, step 4), {blocked}",
    ]


def test_verify_reports_a_program_that_differs_from_its_schedule() -> None:
    other = schedule("0B0 0F0")
    program = Program(schedule("0F0 0B0"), StageGraph(()), other.lanes)
    wrong = "rank 0: the program computes something else than its schedule"
    assert list(find_compute_mismatches(program)) == [wrong]
    assert wrong in verify(program)


def test_verify_uses_the_graph_of_the_program() -> None:
    program = lower(schedules.gpipe(ranks=2, chunks=1), StageGraph(()))
    assert verify(program, StageGraph.chain(2)) == ()


# ---- several problems ---------------------------------------------------------------------


def test_verify_reports_every_problem_of_a_schedule() -> None:
    work = loads("""
        placement: 0 0
        chunks: 2
        overlaps: 0F0+0B0
        0F0 0F0 1F0 0B0 0F9 7F0
    """)
    needs = "it needs B once, or I and W once, but has B never, I never, W never"
    assert set(verify(work, StageGraph(((0, 3),)))) == {
        "rank 0, step 4: 0F9 names micro-batch 9 of 2",
        "rank 0, step 5: 7F0 names stage 7, but there are 2",
        "stage 0, micro-batch 0: F runs twice, not once",
        "stage 0: nothing runs on micro-batch 1",
        f"stage 1, micro-batch 0: {needs}",
        "stage 1: nothing runs on micro-batch 1",
        "0F0 and 0B0 may overlap, but are not neighbours in a lane",
        "edge 0>3 names stage 3, but there are 2",
    }


def test_verify_reports_deadlock_and_memory_together() -> None:
    assert verify(loads("0F0 0F1 0B1 0B0 \n 1B0 1F0 1F1 1B1"), memory=1) == (
        "rank 0, step 2: 0B1 waits for 1B1 (rank 1, step 3)",
        "rank 1, step 0: 1B0 waits for 1F0 (rank 1, step 1)",
        "rank 0, step 1: 0F1 brings live memory to 2, over 1",
    )


def test_verify_reports_every_problem_of_a_program() -> None:
    found = program_problems(rank_0="0F0 ?1>0:0 0B0 0B0", rank_1="?0>1:0 1F0 1B0")
    assert {
        "stage 0, micro-batch 0: it needs B once, or I and W once, but has B twice, I never, "
        "W never",
        "rank 0: !0>1:0 occurs never, not once",
        "rank 1: !1>0:0 occurs never, not once",
    } <= set(found)


def test_verify_reports_unknown_edges_of_a_program() -> None:
    # An edge to an unknown stage raised an IndexError.
    assert problems("placement: 0 1 \n edges: 0>5 \n 0F0 \n 1F0") == [
        "edge 0>5 names stage 5, but there are 2"
    ]


class CountedInt(int):
    """A number that counts how often it is compared or looked up."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        CountedInt.uses += 1
        return int(self) == other

    def __hash__(self) -> int:
        CountedInt.uses += 1
        return hash(int(self))


def test_verify_is_linear_in_lanes() -> None:
    """Each stage was looked for among the actions of all lanes."""
    uses = []
    for stages in (50, 100):
        numbers = list(map(CountedInt, range(stages)))
        lanes = tuple((Compute(Op.F, s, 0), Compute(Op.B, s, 0)) for s in numbers)
        CountedInt.uses = 0
        assert verify(Schedule(tuple(range(stages)), 1, lanes)) == ()
        uses.append(CountedInt.uses)
    assert uses[1] <= 2.2 * uses[0]
