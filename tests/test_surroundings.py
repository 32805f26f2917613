"""Training, checking, drawing and saving in odd surroundings.

`make test` runs the program of one process once, in nearly all of them at the same time. If it
fails, it runs again in each of them alone, to name those that break it. `make surroundings` runs
every pair.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Oddity(NamedTuple):
    """Environment variables, and what a process does before it starts the program."""

    variables: Mapping[str, str] = {}
    prepare: Callable[[], object] = bool  # does nothing


ODD_NAME = "a path with späces"
ODDITIES = {
    "no terminal": Oddity({"TERM": "dumb"}, os.setsid),
    "C locale": Oddity({"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    # The superuser may write to any folder, but not to one below a file.
    "read-only home": Oddity({"HOME": "/dev/null/home"}),
    "read-only working folder": Oddity({}, lambda: os.chdir("/proc")),
    "SIGINT ignored": Oddity({}, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)),
    "python -O": Oddity({"PYTHONOPTIMIZE": "1"}),
    "python -W error": Oddity({"PYTHONWARNINGS": "error"}),
    ODD_NAME: Oddity(),
    "no C compiler": Oddity({"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "none"}),
    "one core": Oddity({}, lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})),
    "2 GB of memory": Oddity({}, lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30,) * 2)),
}

ONE_PROCESS = """
import sys
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock import cli
from penstock.cli import demo
from penstock.demo.model import DemoSize

demo.CPU_SIZE = DemoSize(width=8, blocks=2, heads=2, context=8, rows=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def build():
    return Net(), torch.randn(4, 4), torch.randn(4, 4), nn.MSELoss()


def command(line, *words):
    sys.argv = ["penstock", *line.split(), *words]
    print(*sys.argv, flush=True)
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    folder = Path(__file__).parent
    options = dict(chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    print("quick start", flush=True)
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    result = penstock.Pipe(layers, **options).step(torch.ones(4, 4), target=torch.ones(4, 4))
    print("any model", flush=True)
    model, x, target, _ = build()
    pipe = penstock.Pipe(model, example=x, **options)
    result = pipe.step(x, target=target)
    print("drawing", flush=True)
    penstock.draw.picture(result.timeline, folder / "step.svg", title="späces")
    print("saving", flush=True)
    pipe.save(folder / "saved")
    pipe.load(folder / "saved")
    command(f"check {Path(__file__).stem}:build --stages 2 --chunks 2 --schedules 1f1b")
    command("demo --steps 1 --chunks 2 --devices cpu,cpu --out", str(folder / "demo"))
"""
PROGRAMS = {
    "one process": "{folder}/one_process.py",
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2 "
    "{folder}/root/examples/train_processes.py --check --steps 2 --every 1 --save {folder}/saved",
}


def failure(program: str, oddities: Iterable[str], folder: Path) -> str:
    """Run a program in odd surroundings, and return its output if it fails or warns."""
    folder = folder / (ODD_NAME if ODD_NAME in oddities else "plain")
    folder.mkdir(parents=True)
    (folder / "root").symlink_to(ROOT)
    (folder / "one_process.py").write_text(ONE_PROCESS, encoding="utf-8")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder / "root" / "src"), str(folder)]),
        "TMPDIR": str(folder),
    }
    for name in oddities:
        environment |= ODDITIES[name].variables

    def prepare() -> None:
        for name in oddities:
            ODDITIES[name].prepare()

    done = subprocess.run(
        [sys.executable, *(word.format(folder=folder) for word in PROGRAMS[program].split())],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        preexec_fn=prepare,
        timeout=300,
        check=False,
    )
    # A warning of a destructor, such as a file left open, does not end the process.
    succeeded = done.returncode == 0 and "Warning" not in done.stdout
    return "" if succeeded else f"exit status {done.returncode}\n{done.stdout}"


def test_all_odd_surroundings_at_once(tmp_path: Path) -> None:
    """Without -O, for which Python would first compile all of torch again."""
    oddities = [name for name in ODDITIES if name != "python -O"]
    output = failure("one process", oddities, tmp_path / "all")
    if output:
        alone = [name for name in oddities if failure("one process", [name], tmp_path / name)]
        pytest.fail(f"fails in: {', '.join(alone) or 'all of them together'}\n{output}")


if os.environ.get("PENSTOCK_SURROUNDINGS"):

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("oddity", ODDITIES)
    def test_odd_surroundings_one_by_one(oddity: str, program: str, tmp_path: Path) -> None:
        assert not failure(program, [oddity], tmp_path)
