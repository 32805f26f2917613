"""The text form of schedules and programs, one line a rank.

# comments and empty lines are skipped
placement: 0 1        each stage's rank      (left out: where its actions stand)
chunks: 2                                    (left out: as many as are in use)
overlaps: 0F1+0B0     pairs, if there are any
edges: 0>1            makes it a program
0F0 0F1 0B0 0B1       then one line a rank; "-" for a rank that does nothing
1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import re
from itertools import islice

from penstock.errors import ArgumentError, FormatError
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
    schedule_of,
)
from penstock.text_format import make_printable


def dumps(work: Schedule | Program) -> str:
    """Return the text form of a schedule or program.

    Args:
        work: The schedule or program.

    Returns:
        The text, from which `loads` makes an equal value.

    Example:
        >>> from penstock import schedules
        >>> print(dumps(schedules.one_f_one_b(ranks=2, chunks=2)), end="")
        placement: 0 1
        chunks: 2
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    schedule = schedule_of(work)
    lines = ["placement: " + " ".join(map(str, schedule.placement)), f"chunks: {schedule.chunks}"]
    if schedule.overlaps:
        pairs = sorted(schedule.overlaps)
        lines.append("overlaps: " + " ".join(f"{left}+{right}" for left, right in pairs))
    if isinstance(work, Program):
        lines.append("edges: " + " ".join(f"{src}>{dst}" for src, dst in work.graph.edges))
    lines += [" ".join(map(str, lane)) or "-" for lane in work.lanes]
    return "\n".join(lines) + "\n"


def loads(text: str) -> Schedule | Program:
    """Parse the text form of a schedule or program, which may be written by hand.

    Args:
        text: The text form, as described in the docstring of this module.

    Returns:
        A `Program` if the text has an `edges:` line, else a `Schedule`.

    Raises:
        FormatError: The text is not valid. The error lists the problems with their lines, the
            first twenty if there are many.

    Example:
        >>> loads("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1").placement
        (0, 1)
    """
    problems: list[str] = []
    count = 0

    def report(number: int, quoted: str, problem: str) -> None:
        nonlocal count
        count += 1
        if count <= _MAX_PROBLEMS:
            shown = make_printable(quoted, _MAX_QUOTE)
            problems.append(f"line {number}: '{shown}' {problem}")

    head: dict[str, str] = {}
    lanes: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        name, colon, value = line.partition(":")
        if name in _HEADERS and colon:
            pattern, example = _HEADERS[name]
            if name in head:
                report(number, f"{name}:", "is given twice; keep one of them")
            head[name] = value
            if not re.fullmatch(rf"(\s*{pattern})*\s*", value):
                report(number, line, f"is not valid; write '{name}: {example}'")
        elif line:
            lane = []
            for word in line.split() if line != "-" else ():
                if _match_action(word):
                    lane.append(_parse_action(word))
                else:
                    report(number, word, "is not an action")
            lanes.append(tuple(lane))
    if not lanes:
        problems.append("it has no lanes: write one line per rank, such as '0F0 0F1 0B0 0B1'")
    if problems:
        if count > _MAX_PROBLEMS:
            problems.append(f"and {count - _MAX_PROBLEMS} more")
        if any(problem.endswith("is not an action") for problem in problems):
            problems.append(_ACTION_HELP)
        raise FormatError("this is not a schedule:", problems)
    try:
        return _build(head, tuple(lanes))
    except ArgumentError as error:
        raise FormatError("this is not a schedule:", [str(error)]) from None


_MAX_PROBLEMS = 20  # that an error lists: a text that is something else has millions of them
_MAX_QUOTE = 60  # characters of the text that a problem repeats

# At most nine digits. A longer number is a typo, and int() refuses very long ones.
_NUMBER = r"\d{1,9}"
_OPS = "".join(Op)
_COMPUTE = rf"{_NUMBER}[{_OPS}]{_NUMBER}"
_EDGE = rf"{_NUMBER}>{_NUMBER}"
_match_action = re.compile(rf"{_COMPUTE}|[!?]{_EDGE}:{_NUMBER}").fullmatch
_HEADERS = {
    "placement": (rf"{_NUMBER}\b", "0 1 1 0"),
    "chunks": (rf"{_NUMBER}\b", "8"),
    "overlaps": (rf"{_COMPUTE}\+{_COMPUTE}\b", "0F1+3B0"),
    "edges": (rf"{_EDGE}\b", "0>1 1>2"),
}


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


_ACTION_HELP = (
    f"actions look like 2F0 (stage 2, forward, micro-batch 0; also {', '.join(_OPS[1:])}), "
    "!0>1:3 (send from stage 0 to 1, micro-batch 3) and ?0>1:3 (receive)"
)


def _parse_action(word: str) -> Action:
    if word[0] in "!?":
        message = Message(*_parse_numbers(word))
        return Send(message) if word[0] == "!" else Recv(message)
    return _parse_compute(word)


def _parse_compute(word: str) -> Compute:
    stage, op, microbatch = re.split(f"([{_OPS}])", word)
    return Compute(Op(op), int(stage), int(microbatch))


# Build the schedule or program from parsed lines, with defaults for the headers that are missing.
def _build(headers: dict[str, str], lanes: tuple[tuple[Action, ...], ...]) -> Schedule | Program:
    computes = tuple(tuple(a for a in lane if isinstance(a, Compute)) for lane in lanes)
    if "placement" in headers:
        placement = _parse_numbers(headers["placement"])
    else:
        placement = _infer_placement(computes)
    used = 1 + max((a.microbatch for lane in computes for a in lane), default=0)
    chunks = _parse_numbers(headers.get("chunks", str(used)))
    if len(chunks) != 1:
        raise ArgumentError(f"chunks must be one number, not {len(chunks)}: write 'chunks: {used}'")
    pairs = [word.split("+") for word in headers.get("overlaps", "").split()]
    overlaps = frozenset((_parse_compute(left), _parse_compute(right)) for left, right in pairs)
    schedule = Schedule(placement, chunks[0], computes, overlaps)
    if "edges" in headers:
        ends = _parse_numbers(headers["edges"])
        graph = StageGraph(tuple(zip(ends[::2], ends[1::2], strict=True)))
        return Program(schedule, graph, lanes)
    if computes != lanes:
        raise ArgumentError("it sends or receives: a program needs a line such as 'edges: 0>1 1>2'")
    return schedule


def _infer_placement(lanes: tuple[tuple[Compute, ...], ...]) -> tuple[int, ...]:
    """Return each stage's rank: the first rank that runs it. `verify` reports a second one."""
    owners: dict[int, int] = {}
    for rank, lane in enumerate(lanes):
        for action in lane:
            owners.setdefault(action.stage, rank)
    # Only the first three gaps are listed: a typo such as 999999999F0 leaves a billion of them.
    if len(owners) <= max(owners, default=-1):
        gaps = islice((stage for stage in range(max(owners)) if stage not in owners), 3)
        raise ArgumentError(
            f"no rank runs stage {', '.join(map(str, gaps))}, so its rank is unknown: "
            "add its actions, or a line 'placement: ...'"
        )
    return tuple(owners[stage] for stage in range(len(owners)))
