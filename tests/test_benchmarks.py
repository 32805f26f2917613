"""The GPU benchmarks: their arithmetic, and their error message without a GPU."""

from __future__ import annotations

import re
import runpy
import sys
from math import isnan
from pathlib import Path

import pytest
import torch
from benchmarks import bench, graph, papers, plan_speed, recording, zero_bubble
from benchmarks.virtual import Block, enough, head, ideal_of, line, loss_of, simulate_units
from torch import nn

from penstock import Pipe
from penstock.device.device import Cpu
from penstock.model.traced.traced_partition import UnitCost

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("program", ["graph.py --figure 2", "virtual_gpu.py", "real_models.py"])
def test_benchmark_without_a_gpu_exits_with_a_message(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", program.split())
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / sys.argv[0]), run_name="__main__")
    written = capsys.readouterr()
    assert (ended.value.code, written.out) == (2, "")
    assert "there is none" in written.err


def test_make_calls_benchmarks_with_options_that_they_have() -> None:
    """The table of plans was left out: `--rounds` was no option any more."""
    calls = re.findall(r"(benchmarks/\w+\.py)(.*)", (ROOT / "Makefile").read_text())
    assert len(calls) > 10
    for program, options in calls:
        source = (ROOT / program).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{program} has no {option}"


def test_benchmark_ideal_speedup_of_a_schedule() -> None:
    assert ideal_of("1f1b", "never", 4, 32) == pytest.approx(4 * 32 / (32 + 3))
    assert ideal_of("loss.backward()", "never", 4, 32) == ideal_of("gpipe", "never", 4, 32)
    assert ideal_of("naive", "never", 8, 32) == 1
    assert ideal_of("1f1b", "always", 4, 32) < ideal_of("1f1b", "never", 4, 32)


def test_benchmark_repeats_slow_measurements_at_least_three_times() -> None:
    assert enough([1.0] * 9, times=9, budget=100.0)
    assert not enough([1.0] * 8, times=9, budget=100.0)
    assert not enough([60.0] * 2, times=9, budget=100.0)
    assert enough([60.0] * 3, times=9, budget=100.0)


def test_benchmark_speed_ceiling() -> None:
    speed = bench.Speed(naive=100.0, threads=60.0, graph=30.0, ideal=5.0, contention=0.8)
    assert speed.ceiling == pytest.approx(25.0)
    assert speed.over_threads == pytest.approx(2.0)
    assert speed.of_the_ceiling == pytest.approx(25 / 30)


def test_benchmark_claims_are_printed_and_set_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    least, most = graph.Claim("speed", 1.8, 1.7), graph.Claim("host", 0.06, 0.05, at_most=True)
    assert (least.holds, most.holds) == (True, False)
    assert not graph.Claim("speed", float("nan"), 1.7).holds
    assert graph.told(iter([least])) == 0
    assert graph.told(iter([least, most])) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "| host | 0.060 | at most 0.05 | NO |"


def test_benchmark_tables_are_markdown() -> None:
    assert head(["a", "b"]) == "| a | b |\n|---|---|"
    assert line([1, "x"]) == "| 1 | x |"


def test_benchmark_accumulate_equals_a_pipe() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(8) for _ in range(4)]).double()
    x = torch.randn(12, 8).double()
    bench.accumulate(blocks, x, 3)
    expected = [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
    blocks.zero_grad()
    small = bench.Bench(blocks, x, 3, times=1)
    small.of_pipe(bench.THREADS, ["cpu"] * 2, lambda pipe: _step(pipe, small, expected))
    assert all(p.grad is None for p in blocks.parameters())


def _step(pipe: Pipe, small: bench.Bench, expected: list[torch.Tensor]) -> None:
    pipe.step(small.x)
    found = [p.grad for p in small.model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # the loss is float32
    assert loss_of(small.x).dtype is torch.float32


def test_benchmark_command_line_options() -> None:
    given = graph.arguments(["--devices", "8", "--rows", "128", "512"])
    assert (given.devices, given.rows, given.chunks, given.figure) == ([8], [128, 512], 32, None)
    assert graph.arguments(["--host"]).rows == graph.ROWS
    assert set(graph.FIGURES) == {2, 3, 4, 5}
    assert papers.arguments(["--cpu", "--runtime", "graph"]).runtime == "graph"


def test_benchmark_of_recorded_times_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["recording.py", "--rounds", "1", "--rows", "2", "--width", "8", "--chunks", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    recording.main()
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[0] for row in rows] == ["| inline", "| threads"]


def test_benchmark_of_the_planner_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"tiny": plan_speed.Case(4, 2, 4), "tiny-3GB": plan_speed.Case(4, 2, 4, "3GB")}
    monkeypatch.setattr(plan_speed, "CASES", tiny)
    plan_speed.main(["tiny", "tiny-3GB", "--solver", "0"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| tiny", "no"], ["| tiny-3GB", "no"]]
    with pytest.raises(SystemExit):
        plan_speed.main(["huge"])
    assert "there is no case huge: choose from tiny, tiny-3GB" in capsys.readouterr().err


def test_benchmark_without_recorded_times_has_no_timeline() -> None:
    cpu = [Cpu(), Cpu()]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(layers, 2, stages=2, devices=cpu, loss_fn=loss_of, runtime="inline", audit="off")
    with recording.silent(cpu):
        assert pipe.step(torch.ones(4, 4)).timeline.makespan == 0
    assert pipe.step(torch.ones(4, 4)).timeline.makespan > 0


def test_benchmark_ceiling_is_the_simulated_step_of_the_units() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipe = Pipe(layers, 4, "never", stages=[2, 1], devices=["cpu"] * 2, schedule="1f1b")
    units = [UnitCost(1.0, 1.0, 1.0, 0, 0) for _ in range(3)]
    # The first stage takes 6 s a micro-batch, and waits 1 s for its first backward.
    assert simulate_units(pipe, units) == pytest.approx(4 * 6 + 1)
    assert isnan(simulate_units(pipe, units[:2]))


def test_zero_bubble_results_carry_on_to_larger_caps_and_are_read_again(tmp_path: Path) -> None:
    points, file = [*zero_bubble.curves(16)][:3], tmp_path / "found.jsonl"
    results = zero_bubble.Results(points, file)
    work = points[0].work
    for point, period in zip(points, (1.2 * work, 1.1 * work, 1.3 * work), strict=True):
        results.add(zero_bubble.Result(point, period), effort=5)
    again = zero_bubble.Results(points, file)
    for found in (results, again):
        periods = [result.period / work for result in found.results()]
        assert periods == pytest.approx([1.2, 1.1, 1.1])
    # The second and the third are below the published bubble. The first one is open for more.
    assert [result.verdict for result in again.results()] == ["worse", "better", "better"]
    assert again.open_points(5) == []
    assert again.open_points(50) == points[:1]


def test_zero_bubble_searches_some_points_and_goes_on_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--points", "0:3", "--effort", "1000", "--workers", "1", "--save"]
    for _ in range(2):
        assert zero_bubble.main([*command, str(tmp_path / "found.jsonl")]) == 0
        written = capsys.readouterr()
        assert (
            "3 points: 3 at or below the published bubble, 0 of them strictly below" in written.out
        )
    assert not written.err  # nothing was searched again
