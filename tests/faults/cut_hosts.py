"""Lose the host that holds the store, under torchrun, on two hosts (network namespaces).

    python -m tests.faults.cut_hosts [--heartbeat 4] [--doing stepping saving idle]

          what is lost                                     expected within two heartbeats
    both  packets of both hosts                            both ranks end with the cause
    out   packets of the host with the store               the same
    in    packets to the host with the store               the same
    freeze  the host with the store: its processes stop    the rank of the other host ends

An idle rank on the host with the store has lost nothing that it needs. It must end within two
heartbeats of its next call.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.launch.forked_python import ForkedPython
from tests.launch.hosts import ROOT, Host, end, environment, kill, start_on, two_hosts

SCRIPT = str(ROOT / "tests" / "faults" / "host_script.py")
CUTS = ("both", "out", "in", "freeze")
LOST_CONTACT = "lost contact with host 10.79.0.1, which holds the store"


def lose_packets(source: Host, target: Host) -> None:
    """Let all packets from one host to the other go to an interface that does not exist."""
    words = ["ip", "-n", source.name, "neigh", "replace", target.address]
    words += ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
    subprocess.run(words, check=True, timeout=10)


def freeze(host: Host) -> None:
    """Stop all processes of a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, timeout=10, check=True
    )
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGSTOP)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Return the seconds until the condition holds, at most the given ones."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < seconds:
        time.sleep(0.02)
    return time.monotonic() - began


def lose_host(cut: str, doing: str, heartbeat: float) -> str:
    """Run one case, and return what was wrong, or an empty text."""
    with two_hosts() as (a, b), TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(OMP_NUM_THREADS="1")
        words = [SCRIPT, doing, name, str(heartbeat)]
        started = start_on((a, b), words, env, conf="timeout=60,read_timeout=600", restarts=0)
        try:
            return _cut(cut, doing, heartbeat, (a, b), folder, started)
        finally:
            kill(started)


def _cut(
    cut: str,
    doing: str,
    heartbeat: float,
    hosts: tuple[Host, Host],
    folder: Path,
    started: Sequence[ForkedPython],
) -> str:
    a, b = hosts
    files = [folder / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
    if not all(file.exists() for file in files):
        return f"did not start: {end(started)}"
    pids = [int(file.read_text()) for file in files]
    time.sleep(0.5)
    if cut in ("both", "out"):
        lose_packets(a, b)
    if cut in ("both", "in"):
        lose_packets(b, a)
    if cut == "freeze":
        freeze(a)
    limit = 2 * heartbeat
    seconds = [0.0, wait_until(lambda: not is_running(pids[1]), limit + 10)]
    if doing == "idle":
        (folder / "go-0").touch()
    if cut != "freeze":
        seconds[0] = wait_until(lambda: not is_running(pids[0]), limit + 10)
        seconds[0] += seconds[1] if doing != "idle" else 0
    kill(started)
    texts = ["", ""]
    for rank, process in enumerate(started):
        texts[rank] = process.communicate()[1]
    problems = [f"rank {rank}: {s:.1f} s" for rank, s in enumerate(seconds) if s > limit]
    if LOST_CONTACT not in texts[1]:
        problems.append(f"rank 1 wrote {texts[1][-2000:]}")
    if cut != "freeze" and "rank 1 died" not in texts[0]:
        problems.append(f"rank 0 wrote {texts[0][-2000:]}")
    print(f"{cut:7}{doing:10}", " ".join(f"rank {r}: {s:.1f} s" for r, s in enumerate(seconds)))
    return "; ".join(problems)


def main() -> None:
    """Run all cases, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heartbeat", type=float, default=4.0)
    parser.add_argument("--doing", nargs="*", default=["stepping", "saving", "idle"])
    parser.add_argument("--cuts", nargs="*", default=CUTS)
    given = parser.parse_args()
    cases = [(cut, doing) for cut in given.cuts for doing in given.doing]
    problems = {case: lose_host(*case, given.heartbeat) for case in cases}
    failed = {case: text for case, text in problems.items() if text}
    for case, text in failed.items():
        print("FAILED", *case, text)
    print(f"{len(cases) - len(failed)} of {len(cases)} cases")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
