from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

import penstock
from penstock import Cost, StageGraph, cli, lower, schedules, simulate
from penstock.cli import report
from penstock.schedules.ir import Send
from penstock.schedules.notation import loads
from tests import fuzz_cli


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[[str], Answer]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs `penstock` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(report, "ACTIVITY_SECONDS", 600.0)
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(variable, raising=False)

    def call(words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["penstock", *words.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Answer(int(end.value.code or 0), *capsys.readouterr())

    return call


def drawn(picture: str) -> str:
    return dedent(picture).strip("\n") + "\n"


def refused(answer: Answer) -> str:
    """Return the error message of a command that exits with 2."""
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("penstock: ")
    assert "Traceback" not in answer.err
    return answer.err.removeprefix("penstock: ").removesuffix("\n")


# ---- show ---------------------------------------------------------------------------------


def test_show_draws_the_schedule(run: Run) -> None:
    assert run("show 1f1b --ranks 2 --chunks 3") == Answer(
        0,
        drawn("""
            1f1b: 2 ranks, 2 stages, 3 micro-batches, 6 messages, ends under rendezvous

            rank 0  F0 F1 ······B0─── F2 B1─── ···B2───
            rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······
            makespan 12, bubble 25.0%, peak 2 (2 1)
        """),
        "",
    )


def test_show_folds_drawings_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("show gpipe -p 4 -m 8").out.splitlines()
    assert max(map(len, lines[2:])) <= 60
    assert "        t = 0" in lines


@pytest.mark.parametrize(
    ("name", "bubble"), [("gpipe", 27.3), ("1f1b", 27.3), ("interleaved", 15.8), ("zb-v", 5.9)]
)
def test_show_json_equals_the_library(run: Run, name: str, bubble: float) -> None:
    answer = run(f"show {name} --ranks 4 --chunks 8 --json")
    program = penstock.lower(schedules.make(name, ranks=4, chunks=8))
    timeline = simulate(program)
    actions = [action for lane in program.lanes for action in lane]
    facts = json.loads(answer.out)
    assert facts == {
        "schedule": name,
        "ranks": 4,
        "chunks": 8,
        "stages": program.schedule.stages,
        "makespan": timeline.makespan,
        "busy": 96.0,
        "bubble": timeline.bubble,
        "peak": list(timeline.peak),
        "messages": sum(isinstance(action, Send) for action in actions),
        "actions": len(actions),
        "deadlock_free": True,
    }
    assert round(100 * facts["bubble"], 1) == bubble
    assert (answer.code, answer.err) == (0, "")


def facts(run: Run, words: str) -> dict[str, Any]:
    answer = run(f"{words} --json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("1f1b -p 1 -m 1 --cost W=5", {"makespan": 1 + 1 + 5}),
        ("gpipe -p 2 -m 4 --checkpoint except_last", {"peak": [1.0, 1.0], "busy": 2 * (4 * 3 + 3)}),
        ("1f1b -p 4 -m 8", {"messages": 3 * 8 * 2}),
        ("1f1b -p 4 -m 8 --skip 0:3 --skip 1:3", {"messages": 5 * 8 * 2}),
        ("zb-v -p 2 -m 2 --skip 0:3", {"messages": 2 * 2 * 2}),  # the skip stays on its rank
        ("interleaved -p 4 -m 8 --stages-per-rank 4", {"stages": 16}),
        ("fit -p 2 -m 4 --stages-per-rank 3", {"stages": 6}),
        ("1f1b -p 4 -m 8 --memory 4", {"peak": [4.0, 3.0, 2.0, 1.0]}),
        ("1f1b -p 2 -m 2 --save saved.txt", {"ranks": 2}),  # prints JSON only
    ],
)
def test_show_json_with_options(run: Run, words: str, expected: dict[str, Any]) -> None:
    found = facts(run, f"show {words}")
    assert {name: found[name] for name in expected} == expected


def test_show_uses_cost(run: Run) -> None:
    found = facts(run, "show 1f1b -p 2 -m 2 --cost F=2,I=3,W=4,send=0.5")
    program = penstock.lower(schedules.one_f_one_b(2, 2))
    timeline = simulate(program, Cost.even((0, 1), F=2.0, I=3.0, W=4.0, send=0.5))
    assert found["makespan"] == timeline.makespan
    assert found["busy"] == 2 * 2 * (2 + 3 + 4)


def test_show_checkpoint_draws_recomputation(run: Run) -> None:
    assert run("show gpipe -p 1 -m 2 --checkpoint always").out.splitlines()[2] == (
        "rank 0  F0 F1 R1 B1─── R0 B0───"
    )


def test_show_memory_that_does_not_suffice(run: Run) -> None:
    assert refused(run("show gpipe -p 2 -m 8 --memory 2")).splitlines() == [
        "gpipe does not fit in 2 micro-batches per rank:",
        "  rank 0, step 7: 0F7 brings live memory to 8, over 2",
        "  rank 1, step 7: 1F7 brings live memory to 8, over 2",
        "Schedules that fit: naive, 1f1b, interleaved-zb, zb-h1, zb-v, v-half, v-min; or fit "
        "--memory M, with M >= 1",
    ]


def test_show_suggests_schedules_that_fit_in_memory(run: Run) -> None:
    said = refused(run("show gpipe -p 4 -m 8 --memory 3")).split("Schedules that fit: ")[1]
    names = said.split(";")[0].split(", ")
    assert names == ["naive", "v-half", "v-min"]
    for name in names:
        assert max(facts(run, f"show {name} -p 4 -m 8 --memory 3")["peak"]) <= 3


def test_show_fit_on_a_v_placement(run: Run, tmp_path: Path) -> None:
    assert max(facts(run, "show fit -p 4 -m 8 --memory 2")["peak"]) <= 2
    found = facts(run, "show fit -p 4 -m 8 --placement v --memory 4 --save saved.txt")
    assert round(100 * found["bubble"], 1) <= 5.9
    assert "placement: 0 1 2 3 3 2 1 0\n" in (tmp_path / "saved.txt").read_text()


# ---- show: files --------------------------------------------------------------------------


def test_show_save_writes_a_schedule_that_loads(run: Run, tmp_path: Path) -> None:
    answer = run("show zb-v -p 3 -m 4 --checkpoint except_last --save saved.txt")
    assert answer.out.splitlines()[-1] == "wrote saved.txt"
    wanted = penstock.recompute_mode("except_last", 4)
    saved = loads((tmp_path / "saved.txt").read_text())
    assert saved == penstock.recompute(schedules.zb_v(3, 4), wanted)


def test_show_save_with_messages_writes_a_program_that_loads(run: Run, tmp_path: Path) -> None:
    run("show dualpipe-v -p 2 -m 4 --skip 0:2 --save saved.txt --messages")
    graph = StageGraph.chain(4, skips=[(0, 2)])
    saved = loads((tmp_path / "saved.txt").read_text())
    assert saved == penstock.lower(schedules.dualpipe_v(2, 4), graph)


@pytest.mark.parametrize("messages", ["", "--messages"])
def test_verify_accepts_what_show_saves(run: Run, messages: str) -> None:
    run(f"show fit -p 3 -m 4 --placement v --skip 0:4 --save saved.txt {messages}")
    assert run("verify saved.txt") == Answer(0, "sound: 3 ranks, 6 stages, 4 micro-batches\n", "")


def test_show_svg_and_png_write_pictures(run: Run, tmp_path: Path) -> None:
    answer = run("show 1f1b -p 2 -m 2 --skip 0:1 --svg a.svg --png b.png")
    assert answer.out.splitlines()[-2:] == ["wrote a.svg", "wrote b.png"]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_show_trace_writes_the_trace_of_the_timeline(run: Run, tmp_path: Path) -> None:
    run("show 1f1b -p 2 -m 2 --trace trace.json")
    timeline = simulate(penstock.lower(schedules.one_f_one_b(2, 2)))
    assert json.loads((tmp_path / "trace.json").read_text()) == penstock.draw.trace(timeline)


# ---- compare ------------------------------------------------------------------------------


def compared(run: Run, words: str) -> list[dict[str, Any]]:
    answer = run(f"compare {words} --json")
    assert (answer.code, answer.err) == (0, "")
    rows = json.loads(answer.out)
    assert isinstance(rows, list)
    return rows


def test_compare_lists_every_schedule_that_trains(run: Run) -> None:
    names = {row["schedule"] for row in compared(run, "-p 2 -m 4")}
    assert names == (set(schedules.FAMILIES) - {"forward-only"}) | {"fit", "fit, v"}


def test_compare_sorts_by_makespan_then_memory(run: Run) -> None:
    rows = compared(run, "-p 4 -m 8")
    keys = [(round(row["makespan"], 9), max(row["peak"])) for row in rows]
    assert keys == sorted(keys)
    assert rows[-1]["schedule"] == "naive"


def test_compare_equals_show(run: Run) -> None:
    rows = {row["schedule"]: row for row in compared(run, "-p 3 -m 4 --cost F=1,I=2,W=1,send=0.2")}
    for name in ("1f1b", "zb-v", "looped-bfs"):
        shown = facts(run, f"show {name} -p 3 -m 4 --cost F=1,I=2,W=1,send=0.2")
        assert rows[name] == shown


def test_compare_with_memory_lists_only_schedules_that_fit(run: Run) -> None:
    rows = compared(run, "-p 4 -m 8 --memory 2")
    assert {row["schedule"] for row in rows} == {"naive", "v-min", "fit", "fit, v"}
    assert max(max(row["peak"]) for row in rows) <= 2


def test_compare_stages_per_rank_applies_where_supported(run: Run) -> None:
    stages = {row["schedule"]: row["stages"] for row in compared(run, "-p 2 -m 4 -v 3")}
    assert (stages["interleaved"], stages["fit"]) == (6, 6)
    assert (stages["1f1b"], stages["zb-v"], stages["fit, v"]) == (2, 4, 4)


def test_compare_prints_a_table(run: Run) -> None:
    lines = [line.strip() for line in run("compare -p 2 -m 3").out.splitlines()]
    assert lines[0] == "2 ranks, 3 micro-batches, F=1,I=1,W=1,send=0, checkpoint never"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert ["1f1b", "1", "12", "25.0%", "2", "6"] in rows
    assert ["naive", "1", "18", "50.0%", "1", "6"] in rows


# ---- verify -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "code", "out"),
    [
        ("# by hand\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", "", 0, "sound: 2 ranks, 2 stages, 2 "),
        ("0F0 0B0\n1F0 1B0\n2F0 2B0\n", "--skip 0:2", 0, "sound: 3 ranks, 3 stages, 1 "),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0\n",
            "--memory 1.5",
            1,
            "rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3)\n"
            "rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)\n"
            "rank 1, step 1: 1F1 brings live memory to 2, over 1.5\n",
        ),
    ],
)
def test_verify_accepts_a_schedule_or_lists_every_problem(
    run: Run, tmp_path: Path, text: str, options: str, code: int, out: str
) -> None:
    (tmp_path / "mine.txt").write_text(text)
    answer = run(f"verify mine.txt {options}")
    assert (answer.code, answer.out[: len(out)], answer.err) == (code, out, "")


def test_verify_checks_a_program_against_blocking_sends(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(
        "edges: 0>1\n"
        "0F0 !0>1:0 0F1 !0>1:1 ?1>0:0 0B0 ?1>0:1 0B1\n"
        "?0>1:0 1F0 1B0 !1>0:0 ?0>1:1 1F1 1B1 !1>0:1\n"
    )
    answer = run("verify mine.txt")
    assert answer.code == 1
    assert answer.out.count("when sends block until they are received") == 2


def test_verify_reports_malformed_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0F0 nonsense\n\nmore\n")
    lines = refused(run("verify mine.txt")).splitlines()
    assert lines[0] == "this is not a schedule:"
    assert [line.split(" is not an action")[0] for line in lines[1:]] == [
        "  line 1: 'nonsense'",
        "  line 3: 'more'",
        "  actions look like 2F0 (stage 2, forward, micro-batch 0; also B, I, W, R), !0>1:3 (send "
        "from stage 0 to 1, micro-batch 3) and ?0>1:3 (receive)",
    ]


# ---- gallery ------------------------------------------------------------------------------


def test_gallery_shows_every_schedule_and_saves_its_picture(run: Run, tmp_path: Path) -> None:
    answer = run("gallery --out pictures --ranks 2 --chunks 2")
    assert answer.code == 0
    for name in (*schedules.FAMILIES, "fit"):
        assert f"\n{name}: " in answer.out
        assert (tmp_path / "pictures" / f"{name}.svg").exists()
    assert answer.out.endswith("wrote the pictures to pictures/, with pictures/index.md\n")


# ---- invalid options ----------------------------------------------------------------------

SIZES = "must be at least 1"
SKIP = "two stages as SRC:DST, such as 0:3, not"
COST = "such as F=1,I=1,W=1,send=0, not"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "show 1f1b -p 4000 -m 4000",
            "4000 ranks x 4000 micro-batches x 1 stages per rank are 16,000,000 cells. They would "
            "take about 3200 seconds and 128 GB of memory, and at most 250,000 are allowed. Use "
            "fewer ranks or micro-batches: the pattern repeats",
        ),
        ("show 1f1b -p 0 -m 8", f"ranks=0: each of these {SIZES}"),
        ("show 1f1b -p -2 -m 0", f"ranks=-2, chunks=0: each of these {SIZES}"),
        ("show fit -p 0 -m 0 -v 0", f"ranks=0, chunks=0, stages_per_rank=0: each of these {SIZES}"),
        ("show interleaved -p 2 -m 2 -v 0", f"stages_per_rank=0: each of these {SIZES}"),
        ("compare -p 0 -m 2", f"ranks=0: each of these {SIZES}"),
        ("show zb-v -p 2 -m 2 -v 3", "zb-v has 2 stages a rank, not 3: use stages_per_rank=2"),
        ("show 1f1b -p 2 -m 2 --cost F=x", f"--cost takes numbers, {COST} 'F=x'"),
        ("show 1f1b -p 2 -m 2 --cost F", f"--cost takes numbers, {COST} 'F'"),
        ("show 1f1b -p 2 -m 2 --cost F=-1", f"--cost takes numbers from 0 to 1e9, {COST} 'F=-1'"),
        ("show 1f1b -p 2 -m 2 --cost F=nan", f"--cost takes numbers from 0 to 1e9, {COST} 'F=nan'"),
        ("show 1f1b -p 2 -m 2 --cost I=inf", f"--cost takes numbers from 0 to 1e9, {COST} 'I=inf'"),
        ("show 1f1b -p 2 -m 2 --cost B=1", f"--cost takes F, I, W, send, {COST} 'B=1'"),
        (
            "show 1f1b -p 2 -m 2 --cost F=0,I=0,W=0",
            "--cost: at least one of F, I and W must be more than 0",
        ),
        (
            "show 1f1b -p 2 -m 2 --skip x",
            "--skip takes two stages as SRC:DST, such as 0:3, not 'x'",
        ),
        *(
            (f"show 1f1b -p 2 -m 2 --skip {text}", f"--skip takes {SKIP} '{text}'")
            for text in ("0:1:2", "3", ":", "1:", "-1:2", "a:b", "1.0:2")
        ),
        (
            "show 1f1b -p 2 -m 2 --skip 1:0 --skip 0:5",
            "skip 1:0, 0:5: a skip SRC:DST goes from a stage to a later one, and the stages here "
            "are 0 to 1",
        ),
        (
            "show 1f1b -p 2 -m 2 --checkpoint often",
            "checkpoint must be one of always, except_last, never, not 'often'",
        ),
        ("show fit -p 2 -m 2 --placement w", "placement must be loop or v, not 'w'"),
        ("show fit -p 2 -m 2 --placement v -v 3", "placement v needs 2 stages per rank, not 3"),
        ("show fit -p 2 -m 2 --placement v -v 1", "placement v needs 2 stages per rank, not 1"),
        ("show 1f1b -p 2 -m 2 --svg a.png", "a.png: the file name must end in .svg"),
        ("show zb-v", "zb-v needs --ranks and --chunks, for example -p 4 -m 8"),
        ("show 1f1b -p 2 -m 2 --png a", "a: the file name must end in .png"),
    ],
)
def test_invalid_options_are_reported_in_one_message(run: Run, words: str, message: str) -> None:
    assert refused(run(words)) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "show 1f1b -p 2 -m 2 --memory 0.5",
            "Schedules that fit: none; or fit --memory M, with M >",
        ),
        ("show fit -p 2 -m 2 --memory 0.5", "rank 0: 0.5 < 1, rank 1: 0.5 < 1"),
        ("compare -p 2 -m 2 --memory 0.5", "give each rank at least its share, 1 for all"),
        (
            "show 1f2b -p 2 -m 2",
            "there is no schedule '1f2b'; did you mean 1f1b? The schedules are",
        ),
        ("show qqq -p 2 -m 2", "there is no schedule 'qqq'. The schedules are: naive, "),
        *(
            (f"{words} -p 1000 -m 1000", "1,000,000 cells. They would take about 200 seconds")
            for words in ("show fit", "compare -v 1", "show naive", "show fit -v 1")
        ),
        ("gallery -p 1000 -m 1000", "2,000,000 cells. They would take"),
        ("show naive -p 1000 -m 2 -v 1000", "2,000,000 cells"),
        ("show fit -p 1000 -m 200 --placement v", "x 2 stages per rank are 400,000 cells"),
        (f"show 1f1b -p {10**23} -m 2", "'--ranks' / '-p'"),
        (f"show 1f1b -p 2 -m 2 --width {10**9}", "'--width'"),
        (f"show 1f1b -p 2 -m 2 --skip 0:{'9' * 5000}", "--skip takes two stages as SRC:DST"),
        (f"demo --seed {10**23}", "'--seed'"),
        (f"demo --chunks {10**5}", "about 500 seconds a step on a CPU. Use at most 64 devices"),
        (f"demo --devices {','.join(['cpu'] * 65)}", "65 devices and 8 micro-batches need"),
        ("verify /dev/zero", "/dev/zero has more than 32.00 MiB"),
        ("verify /dev/null", "it has no lanes"),
        ("verify loop", "Too many levels of symbolic links"),
        ("verify binary", "binary is not text"),
        ("show 1f1b -p 2 -m 2 --save no/such/dir", "No such file or directory"),
        ("verify nowhere.txt", "No such file or directory: 'nowhere.txt'"),
        ("verify .", "Is a directory: '.'"),
        ("verify empty.txt", "it has no lanes"),
        ("verify program.txt --skip 0:1", "a program lists its own edges. Write the skip there"),
        ("verify three.txt --skip 0:3", "to a later one, and the stages here are 0 to 2"),
    ],
)
def test_impossible_requests_are_explained(
    run: Run, words: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "program.txt").write_text("edges:\n0F0\n")
    (tmp_path / "three.txt").write_text("0F0 0B0\n1F0 1B0\n2F0 2B0\n")
    assert message in refused(run(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show", "Missing argument 'name'. See 'penstock show --help'."),
        ("show 1f1b", "1f1b needs --ranks and --chunks, for example -p 4 -m 8"),
        ("nonsense", "No such command 'nonsense'. See 'penstock --help'."),
        ("show 1f1b --no-such", "No such option: --no-such. See 'penstock show --help'."),
    ],
)
def test_usage_errors_are_one_line(run: Run, words: str, message: str) -> None:
    assert refused(run(words)) == message


def test_command_line_without_words_prints_help(run: Run) -> None:
    answer = run("")
    assert (answer.code, answer.err) == (0, "")
    assert "compare" in answer.out


# ---- messages from elsewhere ----------------------------------------------------------------

ESCAPE = "\x1b[31m\x1b]0;title\x07"  # colours the terminal and renames its window


def test_escape_sequences_are_not_echoed(run: Run, tmp_path: Path) -> None:
    (tmp_path / f"{ESCAPE}.txt").write_text(f"0F0 {ESCAPE}\n")
    (tmp_path / f"{ESCAPE}.ok").write_text("0F0 0B0\n")
    (tmp_path / "raising.py").write_text(f"raise ValueError({ESCAPE!r})")
    for words in (
        *(f"verify {ESCAPE}.txt", f"show {ESCAPE}", f"{ESCAPE}", f"show 1f1b --{ESCAPE}"),
        *(f"check {ESCAPE}", "check raising:make", f"show {ESCAPE}.ok --save {ESCAPE}"),
        f"compare -p 1 -m 1 --cost {ESCAPE}",
    ):
        answer = run(words)
        shown = answer.out + answer.err
        assert "\\x1b" in shown
        assert {char for char in shown if not char.isprintable()} == {"\n"}, words


def test_a_file_that_is_something_else_is_not_echoed_whole(run: Run, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("nonsense " * 100_000)
    (tmp_path / "long.txt").write_text("x" * 1_000_000)
    (tmp_path / "head.txt").write_text("chunks: " + "x" * 1_000_000)
    lines = refused(run("verify words.txt")).splitlines()
    assert (len(lines), lines[21]) == (23, "  and 99980 more")
    assert len(refused(run("verify long.txt"))) < 400
    assert len(refused(run("verify head.txt"))) < 400
    (tmp_path / "stuck.txt").write_text("".join(f"{s}B0 {s}F0\n" for s in range(1000)))
    assert len(refused(run("show stuck.txt")).splitlines()) == 26


def test_a_defect_is_one_message_without_a_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("nothing here")

    monkeypatch.setattr(cli, "parse_costs", fail)
    assert refused(run("show 1f1b -p 2 -m 2")).startswith(
        "this is a defect of Penstock: KeyError: 'nothing here'\nPlease report it"
    )
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
    assert "Traceback" in run("show 1f1b -p 2 -m 2").err


def test_a_long_command_says_that_it_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ACTIVITY_SECONDS", 0.001)
    answer = run("show 1f1b -p 20 -m 50")
    assert answer.code == 0
    assert answer.err.startswith("penstock: simulating, for 0 s so far\n")


def test_ctrl_c_ends_a_command_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "parse_costs", lambda text: os.kill(os.getpid(), signal.SIGINT))
    # In the background of a shell without job control, SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("show 1f1b -p 2 -m 2") == Answer(130, "", "penstock: interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_fuzzed_command_lines_end_well(tmp_path: Path) -> None:
    """Try a few; `python -m tests.fuzz_cli --cases 300` tries many."""
    fuzz_cli.write_folder(tmp_path)
    cases = [fuzz_cli.make_case(seed) for seed in range(40)]
    quick = [case for case in cases if not {"gallery", "demo", "doctor"} & {*case.words}]
    for case in quick[:10]:
        problems = list(fuzz_cli.find_problems(case, fuzz_cli.run_case(case, tmp_path)))
        assert not problems, str(case)


def test_show_help_names_every_schedule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    answer = run("show --help")
    assert answer.code == 0
    assert ", ".join(schedules.FAMILIES) in " ".join(answer.out.split())


# ---- in a separate process ----------------------------------------------------------------


def run_process(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock` in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words], capture_output=True, text=True, check=False
    )


def test_process_prints_errors_to_stderr() -> None:
    done = run_process("show", "1f1b", "--ranks", "0", "--chunks", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "penstock: ranks=0: each of these must be at least 1\n"


def test_command_line_without_typer_names_the_extra() -> None:
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'typer' else find(name)\n"
        "from penstock.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "penstock: the command line needs typer and rich: pip install 'torch-penstock[cli]'\n"
    )


def test_show_a_saved_file(run: Run, tmp_path: Path) -> None:
    for extra in ("", " --messages"):
        run(f"show zb-v -p 2 -m 3 --save {tmp_path}/mine.txt{extra}")
        shown = facts(run, f"show {tmp_path}/mine.txt")
        named = facts(run, "show zb-v -p 2 -m 3")
        assert {**shown, "schedule": "zb-v"} == named


def test_show_refuses_an_unsound_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0B0 0F0\n")
    assert refused(run(f"show {tmp_path}/mine.txt")) == (
        "this schedule must not run:\n  rank 0, step 0: 0B0 waits for 0F0 (rank 0, step 1)"
    )


def test_show_fit_plans_for_recomputation(run: Run) -> None:
    """`fit` planned without the recompute actions, and its schedule was slower than 1f1b."""
    words = "-p 4 -m 8 --checkpoint always --memory 2"
    fitted, plain = (facts(run, f"show {name} {words}") for name in ("fit", "1f1b"))
    assert fitted["makespan"] <= plain["makespan"]
    assert max(fitted["peak"]) <= 2


def test_show_of_a_file_ignores_no_option(run: Run, tmp_path: Path) -> None:
    run(f"show 1f1b -p 2 -m 3 --save {tmp_path}/mine.txt")
    assert refused(run(f"show {tmp_path}/mine.txt --checkpoint always")) == (
        "--checkpoint and --stages-per-rank apply to named schedules only"
    )
    assert refused(run(f"show {tmp_path}/mine.txt --memory 1")) == (
        "this schedule must not run:\n  rank 0, step 1: 0F1 brings live memory to 2, over 1"
    )


# ---- check --------------------------------------------------------------------------------

GIVEN = """
    import torch
    from torch import nn


    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


    class Across(nn.Module):
        def forward(self, x):
            return x - x.mean(0)


    x, y = torch.randn(8, 6), torch.randn(8, 3)

    def pair(): return layers(), x
    def whole(): return layers(), (x,), y, nn.MSELoss()
    def named(): return {"model": layers(), "batch": x, "target": y, "loss_fn": nn.MSELoss()}
    def wrong(): return nn.Sequential(*layers(), Across()), x
    def number(): return 3
    def more(): return {"model": layers(), "batch": x, "optimizer": 1}
    def less(): return {"model": layers()}
    def strings(): return "model", x
    def failing(): raise KeyError("no data")
    def narrow(): return layers(), torch.randn(8, 7)
    def exits(): raise SystemExit(0)
    def unprintable(): raise type("Strange", (BaseException,), {"__str__": None})()
    def empty(): return layers(), x[:0]
    def not_finite(): return layers(), x * float("nan")
    def infinite(): return nn.Sequential(*layers(), Exits(None)), x * 1e308 * 1e308


    class Exits(nn.Module):
        def __init__(self, at):
            super().__init__()
            self.calls = [at]

        def forward(self, x):
            if self.calls[0]:
                self.calls[0] -= 1
                if not self.calls[0]:
                    raise SystemExit(0)
            return x

        def __deepcopy__(self, memo):
            copied = Exits(None)
            copied.calls = self.calls  # all copies count together
            return copied

    def exiting(): return nn.Sequential(*layers(), Exits(1)), x
    def exiting_later(): return nn.Sequential(*layers(), Exits(30)), x


    class Any(nn.Module):
        def __init__(self, decides):
            super().__init__()
            self.layers, self.decides = layers(), decides

        def forward(self, x, shift=0.0):
            first, *others = self.layers
            x = first(x) + shift
            x = -x if self.decides and x.mean() > 0 else x
            for layer in others:
                x = layer(x)
            return x

    def anything(): return Any(False), {"x": x, "shift": 0.5}
    def deciding(): return Any(True), x

    count = 3
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with factories into the current directory and return its name."""
    name = f"given_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(dedent(GIVEN))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("factory", ["pair", "whole", "named"])
def test_check_reports_equal(run: Run, given: str, factory: str) -> None:
    answer = run(f"check {given}:{factory} --schedules 1f1b,gpipe --chunks 2")
    assert answer.code == 0
    assert "equal in all 8 runs, to 1e-10\n" in answer.out
    assert "8 rows in micro-batches of 4, 4\n" in answer.out
    assert answer.err == ""


def test_check_of_a_module_that_is_not_sequential(run: Run, given: str) -> None:
    answer = run(f"check {given}:anything --schedules 1f1b --chunks 2 --stages 2 --units layers")
    assert answer.code == 0, answer.err
    assert "stages of 2 + 2 units; 8 rows in micro-batches of 4, 4\n" in answer.out
    assert "equal in all 4 runs, to 1e-10\n" in answer.out


def test_quick_check_says_what_it_left_out(run: Run, given: str) -> None:
    answer = run(f"check {given}:anything --quick --chunks 2 --stages 2")
    assert answer.code == 0, answer.err
    assert "equal in all 2 runs, to 1e-10\n" in answer.out
    assert "not tried: all other schedules, checkpoint modes and runtimes, and memory" in answer.out
    message = "quick=True chooses schedules, checkpoints and runtimes itself"
    assert message in refused(run(f"check {given}:anything --quick --schedules 1f1b"))


def test_check_names_the_line_at_which_a_model_cannot_be_cut(run: Run, given: str) -> None:
    answer = run(f"check {given}:deciding --schedules 1f1b --stages 2")
    assert answer.code == 2
    assert f"{given}.py:" in answer.err.replace("\n", "")
    assert "reads a value that was computed from unit" in " ".join(answer.err.split())


def test_check_exits_with_1_if_numbers_differ(run: Run, given: str) -> None:
    answer = run(f"check {given}:wrong --schedules gpipe --stages 2 --runtimes inline")
    assert answer.code == 1
    assert "NOT equal, in 2 of 2 runs:\n" in answer.out
    assert " apart (gpipe, checkpoint never, inline, and 1 more)\n" in answer.out
    assert "hint: layer '4' (Across) returns different rows when the batch is split" in answer.out


def test_check_prints_json(run: Run, given: str) -> None:
    answer = run(f"check {given}:wrong --schedules gpipe --checkpoints always --json")
    assert answer.code == 1
    read = json.loads(answer.out)
    assert [one["checkpoint"] for one in read["runs"]] == ["always", "always"]
    assert read["ok"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no_such_module:make", "there is no module 'no_such_module'"),
        (
            "folder/mine.py:make",
            "'folder/mine.py' is a file, and MODULE is a name: write mine:make",
        ),
        ("GIVEN", "expected MODULE:FACTORY, such as my_model:make, not 'GIVEN'"),
        (
            "GIVEN:nothing",
            "GIVEN has no factory 'nothing', which is not defined. The module defines layers, ",
        ),
        ("GIVEN:count", "GIVEN has no factory 'count', which is not a function"),
        ("GIVEN:failing", "GIVEN:failing failed: KeyError: 'no data'"),
        ("GIVEN:number", "a dict with 'model' and 'batch', not an object of type int"),
        ("GIVEN:less", "a dict with 'model' and 'batch', not a dict with model"),
        ("GIVEN:more", "returns a dict with unknown keys: optimizer. It may have model, batch, "),
        ("GIVEN:strings", "the model must be an nn.Module, not an object of type str"),
        ("GIVEN:narrow", "the unsplit model fails, so there is nothing to compare with: Runtime"),
        ("GIVEN:exits", "GIVEN:exits failed: SystemExit: 0"),
        ("GIVEN:unprintable", "GIVEN:unprintable failed: GIVEN.Strange: <exception str() failed>"),
        ("GIVEN:exiting", "the unsplit model fails, so there is nothing to compare with: System"),
        ("GIVEN:not_finite", "the unsplit model's loss is not finite, so a comparison would prove"),
        ("GIVEN:empty", "the outputs of the unsplit model are empty, so a comparison would prove"),
        ("GIVEN:infinite", "the unsplit model's loss is not finite, so a comparison would prove"),
        *(
            (f"GIVEN:pair --tolerance {value}", "tolerance must be a number from 0 to 1, not ")
            for value in ("nan", "inf", "-1", "2")
        ),
        (f"GIVEN:pair --stages {10**23}", "'--stages'"),
        ("GIVEN:pair --schedules 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("GIVEN:pair --stages 9", "9 stages"),
    ],
)
def test_check_reports_invalid_factories_and_options(
    run: Run, given: str, words: str, message: str
) -> None:
    message_shown = refused(run(f"check {words.replace('GIVEN', given)}"))
    assert message.replace("GIVEN", given) in message_shown


def test_check_of_a_model_that_exits_does_not_exit_with_0(run: Run, given: str) -> None:
    answer = run(f"check {given}:exiting_later --schedules gpipe,1f1b --stages 2 --chunks 2")
    assert answer.code in (1, 2)
    assert "SystemExit: 0" in answer.out + answer.err


def test_check_keeps_what_a_model_prints_out_of_its_report(run: Run, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import torch\nprint('noise')\n"
        "def make(): return torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(2, 2)\n"
    )
    answer = run("check noisy:make --schedules gpipe --stages 1 --chunks 1 --json")
    assert json.loads(answer.out)["ok"] is True
    assert answer.err == "noise\n"


def test_check_reports_import_errors_of_the_module(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import not_there\n")
    assert refused(run("check lacking:make")) == "lacking needs not_there, which is not installed"
    (tmp_path / "broken_one.py").write_text("1 / 0\n")
    assert "importing broken_one failed: ZeroDivisionError" in refused(run("check broken_one:make"))


def test_studio_prints_its_address_serves_until_ctrl_c_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0")
    code = (
        "import signal, sys; from penstock.studio import build, server; from penstock import cli;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "server.StudioServer.__init__.__defaults__ = (0, None, build.PAGE);"
        f"sys.argv = ['penstock', 'studio', {str(file)!r}, '--no-browser']; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.fullmatch(r"the studio is at (http://127.0.0.1:\d+/)\?open .*\n", line)
        assert address, line
        with urllib.request.urlopen(f"{address[1]}opened", timeout=30) as response:
            assert response.read() == b"0F0 0B0"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()


def test_show_writes_a_schedule_as_one_html_file(run: Run, tmp_path: Path) -> None:
    answer = run("show zb-v -p 2 -m 4 --html report.html")
    assert answer.out.endswith("wrote report.html\n")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 1
    assert "0F0 0F1" in text


def test_show_says_what_cost_the_time_of_a_measured_step(run: Run, tmp_path: Path) -> None:
    plan = simulate(lower(schedules.one_f_one_b(3, 4)), Cost.even((0, 1, 2), F=0.001))
    plan.save(tmp_path / "plan.json")
    simulate(plan.program, plan.cost.scaled([1, 1, 2])).save(tmp_path / "step.json")
    answer = run("show step.json --plan plan.json --html step.html")
    assert answer.code == 0
    assert "more than planned" in answer.out
    assert "of stage 2 took" in answer.out
    assert answer.out.endswith("wrote step.html\n")
    text = (tmp_path / "step.html").read_text()
    assert text.count("<svg") == 2
    assert "of stage 2 took" in text
    assert "more even cut" in run("show step.json").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("show step.json --memory 3", "--memory does not apply to a measured step"),
        ("show step.json --cost F=2", "--cost does not apply to a measured step"),
        ("show 1f1b -p 2 -m 4 --plan step.json", "--plan is for a measured step"),
        ("show broken.json", "this is not a timeline"),
        ("show missing.json", "missing.json"),
    ],
)
def test_show_refuses_what_does_not_fit_a_measured_step(
    options: str, words: str, run: Run, tmp_path: Path
) -> None:
    simulate(lower(schedules.one_f_one_b(2, 4))).save(tmp_path / "step.json")
    (tmp_path / "broken.json").write_text("{}")
    answer = run(options)
    assert answer.code == 2
    assert words in answer.err


def test_compare_writes_one_html_file(run: Run, tmp_path: Path) -> None:
    answer = run("compare -p 2 -m 4 --html report.html")
    assert answer.out.endswith("wrote report.html\n")
    text = (tmp_path / "report.html").read_text()
    assert "2 ranks, 4 micro-batches, F=1,I=1,W=1,send=0, checkpoint never" in text
    assert text.count("<svg") >= 15
    json.loads(run("compare -p 2 -m 4 --json --html report.html").out)


def test_check_writes_one_html_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "factories_html.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))\n"
        "    return layers, torch.ones(4, 4)\n"
    )
    answer = run("check factories_html:make --stages 2 --schedules 1f1b --html report.html")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "wrote report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<h1>A pipe computes what the model computes</h1>" in text
    assert text.count("<td class='good'>equal</td>") >= 4
    assert text.count("<svg") == 1
    assert "<td>1f1b</td>" in text
