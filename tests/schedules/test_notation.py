from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.schedules.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
)
from penstock.schedules.notation import dumps, loads
from tests.schedules.texts import action, schedule

SCHEDULE = """\
placement: 0 1
chunks: 2
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1
"""

OVERLAPS = """\
placement: 0
chunks: 3
overlaps: 0F1+0B0 0F2+0B1
0F0 0F1 0B0 0F2 0B1 0B2
"""

PROGRAM = """\
placement: 0 1
chunks: 1
edges: 0>1
0F0 !0>1:0 ?1>0:0 0I0 0W0
?0>1:0 1F0 1R0 1B0 !1>0:0
"""

IDLE_RANKS = """\
placement: 1
chunks: 1
-
0F0
-
"""

NOTHING = """\
placement:\x20
chunks: 4
edges:\x20
-
"""


@pytest.mark.parametrize("text", [SCHEDULE, OVERLAPS, PROGRAM, IDLE_RANKS, NOTHING])
def test_dumps_of_loads_is_the_same_text(text: str) -> None:
    assert dumps(loads(text)) == text


def test_dumps_sorts_overlaps() -> None:
    pairs = [(Compute(Op.F, 0, i + 1), Compute(Op.B, 0, i)) for i in range(8)]
    made = Schedule((0,), 1, ((),), frozenset(pairs))
    line = "overlaps: " + " ".join(f"0F{i + 1}+0B{i}" for i in range(8))
    assert dumps(made).splitlines()[2] == line


def test_loads_a_schedule_with_overlaps() -> None:
    assert loads("placement: 0 \n chunks: 2 \n overlaps: 0F1+0B0 \n 0F0 0F1 0B0") == Schedule(
        placement=(0,),
        chunks=2,
        lanes=((action("0F0"), action("0F1"), action("0B0")),),
        overlaps=frozenset({(action("0F1"), action("0B0"))}),
    )


def test_loads_text_with_edges_as_a_program() -> None:
    there = Message(0, 1, 0)
    assert loads("edges: 0>1 \n 0F0 !0>1:0 \n ?0>1:0 1F0") == Program(
        schedule("0F0 \n 1F0"),
        StageGraph(((0, 1),)),
        ((action("0F0"), Send(there)), (Recv(there), action("1F0"))),
    )


def test_loads_text_with_comments_and_without_headers() -> None:
    text = """
        # 1F1B on two ranks

        0F0 0F1  0B0 0B1   # the first rank
        \t1F0 1B0 1F1 1B1
    """
    assert dumps(loads(text)) == SCHEDULE


def test_loads_infers_missing_headers() -> None:
    assert schedule("0F0 0B0 \n chunks: 7").chunks == 7
    assert schedule("0F0 0F4").chunks == 5
    assert schedule("-").chunks == 1
    assert schedule("1F0 2F0 \n - \n 3F0 0F0").placement == (2, 0, 0, 2)
    assert schedule("0F0 \n 1F0 1B0 0B0").placement == (0, 1)


computes = st.builds(Compute, st.sampled_from(Op), st.integers(0, 12), st.integers(0, 120))
messages = st.builds(Message, st.integers(0, 12), st.integers(0, 12), st.integers(0, 120))
actions = computes | st.builds(Send, messages) | st.builds(Recv, messages)
edges = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda e: (e[0], e[0] + e[1]))


@st.composite
def works(draw: st.DrawFn) -> Schedule | Program:
    """Draw any schedule or program, sound or not."""
    ranks = draw(st.integers(1, 4))
    lowered = draw(st.booleans())
    words: st.SearchStrategy[Action] = actions if lowered else computes
    lanes = [tuple(draw(st.lists(words, max_size=6))) for _ in range(ranks)]
    made = Schedule(
        placement=tuple(draw(st.lists(st.integers(0, ranks - 1), max_size=6))),
        chunks=draw(st.integers(1, 200)),
        lanes=tuple(tuple(a for a in lane if isinstance(a, Compute)) for lane in lanes),
        overlaps=draw(st.frozensets(st.tuples(computes, computes), max_size=3)),
    )
    if not lowered:
        return made
    return Program(made, StageGraph(tuple(draw(st.lists(edges, max_size=5)))), tuple(lanes))


@settings(deadline=None)
@given(works())
def test_loads_of_dumps_is_the_same_value(work: Schedule | Program) -> None:
    assert loads(dumps(work)) == work
    assert hash(loads(dumps(work))) == hash(work)


# ---- text that is not a schedule ----------------------------------------------------------

LOOKS = (
    "actions look like 2F0 (stage 2, forward, micro-batch 0; also B, I, W, R), !0>1:3 (send from "
    "stage 0 to 1, micro-batch 3) and ?0>1:3 (receive)"
)


def complaint(text: str) -> str:
    with pytest.raises(FormatError) as error:
        loads(text)
    headline, *problems = str(error.value).split("\n  ")
    assert headline == "this is not a schedule:"
    assert error.value.problems == tuple(problems)
    return "\n".join(problems)


def test_loads_reports_every_invalid_action_with_its_line() -> None:
    text = """\
        0F0 0X1 0B0
        # a comment
        0F

        -1F0 0F0 fine"""
    assert complaint(dedent(text)).splitlines() == [
        "line 1: '0X1' is not an action",
        "line 3: '0F' is not an action",
        "line 5: '-1F0' is not an action",
        "line 5: 'fine' is not an action",
        LOOKS,
    ]


@pytest.mark.parametrize(
    "word", ["0>1:0", "!0>1", "!0<1:0", "0f0", "0F0,", "0F0F0", "F0", "--", "chunks"]
)
def test_loads_refuses_malformed_actions(word: str) -> None:
    assert f"line 2: '{word}' is not an action" in complaint(f"0F0 \n {word}")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "placement: 0 \n chunks: 1"])
def test_loads_refuses_text_without_lanes(text: str) -> None:
    missing = "it has no lanes: write one line per rank, such as '0F0 0F1 0B0 0B1'"
    assert complaint(text) == missing
    assert len(complaint("chunks: many").splitlines()) == 2


@pytest.mark.parametrize(
    ("line", "example"),
    [
        ("placement: one", "placement: 0 1 1 0"),
        ("placement: 0 -1", "placement: 0 1 1 0"),
        ("placement: 0,1", "placement: 0 1 1 0"),
        ("chunks: many", "chunks: 8"),
        ("chunks: -3", "chunks: 8"),
        ("overlaps: 0F0", "overlaps: 0F1+3B0"),
        ("overlaps: 0F0+x", "overlaps: 0F1+3B0"),
        ("overlaps: 0F0+!0>1:0", "overlaps: 0F1+3B0"),
        ("overlaps: 0F0+0B0+0F1", "overlaps: 0F1+3B0"),
        ("overlaps: 0F1+0B00F2+0B1", "overlaps: 0F1+3B0"),
        ("edges: 0>1 1-2", "edges: 0>1 1>2"),
        ("edges: 0>", "edges: 0>1 1>2"),
        ("edges: 0>1:0", "edges: 0>1 1>2"),
        ("edges: 0>12>3", "edges: 0>1 1>2"),
    ],
)
def test_loads_refuses_malformed_headers(line: str, example: str) -> None:
    assert complaint(f"{line} \n 0F0") == f"line 1: '{line}' is not valid; write '{example}'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("chunks: \n 0F0 0F3", "chunks must be one number, not 0: write 'chunks: 4'"),
        ("chunks: 1 2 \n 0F0 0F3", "chunks must be one number, not 2: write 'chunks: 4'"),
        (
            "0F0 !0>1:0 \n ?0>1:0 1F0",
            "it sends or receives: a program needs a line such as 'edges: 0>1 1>2'",
        ),
        (
            "0F0 4F0 \n 2F0",
            "no rank runs stage 1, 3, so its rank is unknown: add its actions, or a line "
            "'placement: ...'",
        ),
        (
            "placement: 0 5 \n 0F0",
            "the placement names rank 5, but there are 1 lanes, for ranks 0 to 0",
        ),
        (
            "edges: 1>0 \n 0F0",
            "edge 1>0: an edge goes from a stage to a later one; number the stages in the order "
            "in which data passes through them",
        ),
        (
            "chunks: x \n 0F0 y \n edges: z",
            "line 1: 'chunks: x' is not valid; write 'chunks: 8'\n"
            "line 2: 'y' is not an action\n"
            f"line 3: 'edges: z' is not valid; write 'edges: 0>1 1>2'\n{LOOKS}",
        ),
    ],
)
def test_loads_refuses_headers_that_do_not_fit(text: str, problem: str) -> None:
    assert complaint(text) == problem
