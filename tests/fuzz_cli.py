"""Random command lines of `penstock`: each ends with a known exit status and one clear message.

    python -m tests.fuzz_cli --cases 300            # a minute or two
    python -m tests.fuzz_cli --first 4711 --cases 1 # repeat one, and print what it wrote

A case is a valid command with some of its words replaced: by numbers of all kinds, by odd paths, by
factories that raise, exit or return nonsense. It runs in an odd environment, with a stdout that
breaks, or is interrupted. Each runs in a fork of a process that has imported PyTorch, because some
end their process at once. `find_problems` says what must hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO, TextIOWrapper
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from textwrap import dedent

from penstock import schedules
from tests.distributed.fork_server import forked

SILENCE = 10.0  # seconds within which a command ends or writes something
PATIENCE = 120.0  # seconds after which a command that writes is stopped, which is a problem
ESCAPE = "\x1b[31mred\x1b]0;title\x07"  # colours the terminal and renames its window

# ---- what the words are made of -----------------------------------------------------------------

_HUGE = "9" * 5000
_NUMBERS = """0 1 2 3 7 -1 -0 +2 03 1_000 0x10 2.5 1e3 1e308 1e999 1e-400 nan inf -inf NaN
    ٣ ² ½ two None true [1] 250001 1000000 99999999999 100000000000000000000000"""
NUMBERS = (*_NUMBERS.split(), "", " ", " 3 ", _HUGE, f"-{_HUGE[:50]}", ESCAPE)
NAMES = (*schedules.FAMILIES, "fit", "1f2b", "", "ALL", ",", "gpipe,,1f1b", "é", ESCAPE, _HUGE)
_PATHS = """. .. / - /dev/zero /dev/null /dev/full /proc/self/mem loop good.txt/out out.svg out.png
    missing.txt missing/deeper/out.svg unreadable.txt binary.txt escapes.txt huge.txt wide.txt
    deep.txt stuck.txt good.txt program.txt bom.txt empty.txt chunks.txt edges.txt long.txt"""
PATHS = (*_PATHS.split(), "x" * 300, f"{ESCAPE}.txt")
# Factories with which something is compared. With the others, status 0 would be a lie.
SOUND = {"good", "prints", "whole"}
_FAULTY = """number nothing raises exits exits_later deep_exit random_exit no_string interrupts base
    not_finite no_gradient side generator tensor recursive empty_batch no_batch"""
FACTORIES = (*sorted(SOUND), *_FAULTY.split())
_MODULES = "factories raising exiting printing syntax importing no_such .."
MODULES = (*_MODULES.split(), "")

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"COLUMNS": "0"},
    {"COLUMNS": "-5"},
    {"COLUMNS": "²"},
    {"COLUMNS": "100000"},
    {"TERM": "dumb", "NO_COLOR": "1"},
    {"FORCE_COLOR": "1"},
    {"LANG": "xx_YY.nonsense", "LC_ALL": "C"},
    {"RANK": "0"},
    {"RANK": "x", "WORLD_SIZE": "2"},
)
LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

# Commands that are valid, of which words are replaced. A word in braces names what replaces it.
COMMANDS = (
    "show {name:1f1b} --ranks {n:2} --chunks {n:3}",
    "show {name:fit} -p {n:2} -m {n:4} -v {n:1} --placement {name:loop} --memory {n:2}",
    "show {name:zb-v} -p {n:2} -m {n:2} --cost F={n:1},I={n:2},send={n:0} --skip {n:0}:{n:3}",
    "show {name:gpipe} -p {n:3} -m {n:2} --checkpoint {name:always} --width {n:80} --json",
    "show {name:gpipe} -p {n:2} -m {n:2} --save {path:saved.txt} --messages --trace {path:t.json}",
    "show 1f1b -p 2 -m 2 --svg {path:out.svg}",
    "show {path:good.txt} --memory {n:3} --skip {n:0}:{n:1}",
    "show {path:step.json} --plan {path:plan.json} --html {path:step.html}",
    "compare --ranks {n:2} --chunks {n:3} --stages-per-rank {n:1} --memory {n:4}",
    "compare -p {n:2} -m {n:2} --cost F={n:1},W={n:2} --checkpoint {name:never} --json",
    "compare -p 2 -m 2 --html {path:report.html}",
    "verify {path:good.txt} --memory {n:4} --skip {n:0}:{n:1}",
    "verify {path:program.txt}",
    "verify {path:huge.txt}",
    "studio missing.txt --port {n:0} --no-browser",  # with a file that exists, it would serve it
    "plan {path:profile.json} --devices {n:2} --memory {n:2}GB --solver-seconds {n:0}",
    "plan factories:{factory:good} --devices {n:2} --memory {n:1}GB --solver-seconds 0",
    "plan {module:factories}:{factory:exits} --optimizer {name:sgd} --solver-seconds 0 --devices 1",
    "split factories:{factory:good} --stages {n:2} --chunks {n:2} --balance {name:parameters}",
    "split {module:factories}:{factory:raises} --stages 2",
    "plan {path:good.txt} --objective {name:period} --save {path:p.json} --html {path:p.html}",
    "check factories:{factory:good} --stages {n:2} --chunks {n:2} --schedules {name:gpipe}",
    "check factories:{factory:exits} --stages 2 --chunks 2 --schedules 1f1b --json",
    "check {module:factories}:{factory:good} --tolerance {n:1e-10} --quick --stages 2",
    "check factories:{factory:good} --checkpoints {name:never} --runtimes {name:inline}",
    "check factories:{factory:good} --units {name:x} --stages 2 --schedules gpipe",
    "saved {path:run} --verify",
    "saved {path:pictures} --repair",
    "doctor --patience {n:1}",
    "doctor --json",
    "gallery --out {path:pictures} --ranks {n:2} --chunks {n:1}",
    "demo --steps {n:1} --seed {n:0} --chunks {n:2} --schedule {name:gpipe} --devices cpu,cpu",
    "demo --steps {n:1} --chunks 2 --out {path:demo} --devices cpu,{name:cpu}",
    "{name:nonsense}",
    "--help",
    "{name:show} --help",
)


@dataclass(frozen=True)
class CommandLine:
    """One case: the words after `penstock`, and what is odd around them."""

    seed: int
    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    stdout: str = "file"  # or "broken", "full", "closed"
    encoding: str = "utf-8"
    interrupt_after: float | None = None
    may_succeed: bool = True

    def __str__(self) -> str:
        env = " ".join(f"{name}={value!r}" for name, value in self.env.items())
        odd = [f"stdout {self.stdout}"] if self.stdout != "file" else []
        odd += [f"encoding {self.encoding}"] if self.encoding != "utf-8" else []
        odd += [f"Ctrl-C after {self.interrupt_after:.2f} s"] if self.interrupt_after else []
        words = " ".join(
            shlex.quote(word if len(word) < 80 else word[:77] + "...") for word in self.words
        )
        return f"{self.seed}: {env} penstock {ascii(words)[1:-1]} {', '.join(odd)}".replace(
            ":  ", ": "
        )


def make_case(seed: int) -> CommandLine:
    """Return the command line of a seed."""
    random = Random(seed)
    chosen = {"n": NUMBERS, "name": NAMES, "path": PATHS, "factory": FACTORIES, "module": MODULES}
    words, factory, module = [], None, "factories"
    odds = random.choice((0.0, 0.15, 0.3, 0.6))
    for word in random.choice(COMMANDS).split(" "):
        before, *fields = word.split("{")
        for piece in fields:
            kind, _, rest = piece.partition(":")
            default, _, after = rest.partition("}")
            value = random.choice(chosen[kind]) if random.random() < odds else default
            value = random.choice(FACTORIES) if kind == "factory" else value
            factory = value if kind == "factory" else factory
            module = value if kind == "module" else module
            before += value + after
        words.append(before)
    if random.random() < 0.15:
        words.insert(
            random.randrange(len(words) + 1),
            random.choice(("--no-such", "-z", "--", "-", "--ranks", "extra", ESCAPE, "--json=1")),
        )
    if random.random() < 0.1 and len(words) > 2:
        words.append(
            random.choice(words[1:])
        )  # an option that is repeated, or left without a value
    if random.random() < 0.05:
        words.pop(random.randrange(len(words)))
    env = dict(random.choice(ENVIRONMENTS)) if random.random() < 0.2 else {}
    if "doctor" in words and random.random() < 0.7:
        env |= LAUNCHED
        name = random.choice(list(LAUNCHED))
        env[name] = random.choice(
            ("", "x", "-1", "99999", "٣", "9" * 5000, "1", "0", str(10**9), "[/x]", ESCAPE)
            if name != "MASTER_ADDR"
            else (
                "",
                "localhost",
                "no.such.host.invalid",
                "[/x]",
                ESCAPE,
                "::1",
                "0.0.0.0",
                "x" * 300,
            )
        )
        env["NCCL_DEBUG"] = random.choice(("", "[/bold]", ESCAPE))
    stdout = random.choice(("broken", "full", "closed")) if random.random() < 0.15 else "file"
    encoding = random.choice(("ascii", "latin-1")) if random.random() < 0.1 else "utf-8"
    interrupt = random.random() if random.random() < 0.08 else None
    checks = "check" in words and "--help" not in words
    sound = (factory in SOUND and module == "factories") if checks else True
    return CommandLine(seed, words, env, stdout, encoding, interrupt, sound)


# ---- the folder that the commands run in --------------------------------------------------------

_FACTORIES = """
    import os, random, sys
    import torch
    from torch import nn

    def model(width=4):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, width))

    class Exits(nn.Module):
        calls = 0  # of all copies
        def __init__(self, at):
            super().__init__()
            self.weight, self.at = nn.Parameter(torch.ones(4)), at
        def forward(self, x):
            Exits.calls += 1
            if Exits.calls >= self.at:
                sys.exit(0)
            return x * self.weight

    class Unprintable(Exception):
        def __str__(self): raise KeyError("no text")

    x = torch.randn(4, 4)

    def good(): return model(), x
    def whole(): return nn.Sequential(*model(), nn.Identity()), (x,), x, nn.MSELoss()
    def number(): return 3
    def nothing(): return None
    def raises(): raise ValueError("\\x1b[31mred\\x1b]0;title\\x07" * 10_000)
    def exits(): sys.exit(0)
    def exits_later(): return nn.Sequential(Exits(1), *model()), x
    def deep_exit(): return nn.Sequential(Exits(9), *model()), x
    def random_exit(): return nn.Sequential(Exits(random.randrange(2, 40)), *model()), x
    def no_string(): raise Unprintable()
    def interrupts(): raise KeyboardInterrupt()
    def base(): raise type("Strange", (BaseException,), {})("strange")
    def prints():
        print("noise", flush=True)
        return model(), x
    def not_finite(): return model(), x * float("nan")
    def no_gradient(): return nn.Sequential(nn.Flatten(), nn.Flatten()), x * float("inf")
    def side(): return {"model": model(), "batch": x, "side": 3}
    def generator(): yield model(), x
    def tensor(): return x, x
    def empty_batch(): return model(), x[:0]
    def no_batch(): return model(), ()
    def recursive(): return recursive()
"""


def write_folder(folder: Path) -> None:
    """Write the files that the command lines name."""
    good = schedules.one_f_one_b(2, 3)
    files: dict[str, str | bytes] = {
        "factories.py": dedent(_FACTORIES),
        "raising.py": "raise RuntimeError('at import')",
        "exiting.py": "import sys; sys.exit(0)",
        "printing.py": "print('noise')\ndef good(): return 1",
        "syntax.py": "def good(:\n",
        "importing.py": "import no_such_module_at_all",
        "good.txt": "".join(" ".join(map(str, lane)) + "\n" for lane in good.lanes),
        "program.txt": "edges: 0>1\n0F0 !0>1:0 ?1>0:0 0B0\n?0>1:0 1F0 1B0 !1>0:0\n",
        "bom.txt": b"\xef\xbb\xbf0F0 0B0\n",
        "empty.txt": "",
        "binary.txt": bytes(range(256)) * 100,
        "escapes.txt": f"{ESCAPE} 0F0 {ESCAPE * 1000}\n" * 50,
        "huge.txt": "nonsense " * 2_000_000,
        "long.txt": "x" * 5_000_000,
        "wide.txt": "".join(f"{s}F0 {s}B0\n" for s in range(20_000)),
        "stuck.txt": "".join(f"{s}B0 {s}F0\n" for s in range(20_000)),
        "deep.txt": " ".join(f"0F{m} 0B{m}" for m in range(50_000)),
        "chunks.txt": "chunks: 999999999\n0F0 0B0\n",
        "edges.txt": "edges: " + "0>1 " * 50_000 + "\n0F0 0B0\n1F0 1B0\n",
        f"{ESCAPE}.txt": f"{ESCAPE}\n",
    }
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    (folder / "unreadable.txt").touch(mode=0)
    (folder / "loop").symlink_to("loop")


# ---- running one --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a command line did. `status` is negative for a signal, or None if it was stopped."""

    status: int | None
    out: str
    err: str
    seconds: float
    first_silence: float  # seconds until it wrote something or ended


def run_case(case: CommandLine, folder: Path) -> Outcome:
    """Run a command line in a fork, and return what it did."""
    files = [folder / f".{case.seed}.{name}" for name in ("out", "err", "ready")]
    for file in files[:2]:
        file.write_bytes(b"")
    process = forked().Process(target=_run, args=(case, str(folder), list(map(str, files))))
    process.start()
    while not files[2].exists() and process.exitcode is None:
        time.sleep(0.002)
    began = time.monotonic()
    if case.interrupt_after is not None:
        process.join(case.interrupt_after)
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
    first, limit = None, SILENCE
    while process.exitcode is None and time.monotonic() - began < limit:
        process.join(0.05)
        if first is None and any(file.stat().st_size for file in files[:2]):
            first, limit = time.monotonic() - began, PATIENCE
    seconds = time.monotonic() - began
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    out, err = (file.read_bytes().decode(case.encoding, "replace") for file in files[:2])
    # `penstock doctor` switches these notes off before it imports PyTorch, which the fork has done.
    err = re.sub(r"\[[WE]\d.*?\n\n", "", err, flags=re.DOTALL)
    for file in files:
        file.unlink(missing_ok=True)
    return Outcome(status, out, err, seconds, seconds if first is None else first)


def _run(case: CommandLine, folder: str, files: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update({"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", **case.env})
    _open_stdout(case.stdout, files[0])
    os.dup2(os.open(files[1], os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout = None if case.stdout == "closed" else TextIOWrapper(FileIO(1, "w"), case.encoding)
    sys.stderr = TextIOWrapper(
        FileIO(2, "w"), case.encoding, "backslashreplace", write_through=True
    )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["penstock", *case.words]
    os._exit(_main(files[2]))


def _open_stdout(kind: str, file: str) -> None:
    if kind == "broken":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full" if kind == "full" else file, os.O_WRONLY | os.O_APPEND)
    os.dup2(writer, 1)
    if kind == "closed":
        os.close(1)


def _main(ready: str) -> int:
    """Run the command line as an interpreter would, and return the exit status."""
    from penstock.__main__ import main

    try:
        Path(ready).touch()
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {error}", file=sys.stderr)
        return 120
    return status


# ---- what must hold -----------------------------------------------------------------------------


def find_problems(case: CommandLine, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with the end of a command line."""
    status, err = outcome.status, outcome.err
    if outcome.first_silence >= SILENCE:
        yield f"silent for {outcome.first_silence:.0f} s"
    elif status is None:
        yield f"did not end within {PATIENCE:.0f} s"
    elif status not in (0, 1, 2, 130):
        yield f"exit status {status}"
    for text in ("Traceback", "Exception ignored", "Exception in thread", "defect of Penstock"):
        if text in outcome.out + err:
            yield f"says {text!r}"
    is_colored = "FORCE_COLOR" in case.env
    for stream, text in (("stdout", outcome.out), ("stderr", err)):
        control = [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]
        if (control and not is_colored) or "\x07" in text:
            yield f"writes control characters to {stream}: {sorted(set(control))}"
    if status == 2 and "penstock: " not in err:
        yield "exit status 2 without a message"
    if status == 1 and not (outcome.out or err or case.stdout != "file"):
        yield "exit status 1 without a word"
    if err.count("\n") > 25 or len(err) > 20_000:
        yield f"a message of {err.count(chr(10))} lines and {len(err)} characters"
    if status == 0 and not case.may_succeed:
        yield "exit status 0, but nothing sound was compared"
    prints_json = {"check", "--json"} <= {*case.words} and case.stdout == "file"
    if status == 0 and prints_json and json.loads(outcome.out)["ok"] is not True:
        yield "exit status 0, but the report is not ok"
    if status == 0 and case.stdout in ("broken", "full"):
        yield "exit status 0, but nothing could be written"


def main() -> None:
    """Run many command lines, and print those that end badly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    slowest = 0.0
    with TemporaryDirectory() as name:
        write_folder(Path(name))
        for seed in range(arguments.first, arguments.first + arguments.cases):
            case = make_case(seed)
            outcome = run_case(case, Path(name))
            problems = list(find_problems(case, outcome))
            slowest = max(slowest, outcome.first_silence)
            key = "stopped" if outcome.status is None else str(outcome.status)
            counts[key] = counts.get(key, 0) + 1
            if problems or arguments.cases == 1:
                counts["wrong"] = counts.get("wrong", 0) + bool(problems)
                print(case, *problems, sep="\n    ")
                print(
                    ascii(f"{outcome.status} {outcome.out[-300:]} | {outcome.err[-700:]}"),
                    flush=True,
                )
    print(f"{arguments.cases} command lines: {counts}; longest silence {slowest:.1f} s")
    sys.exit(bool(counts.get("wrong")))


if __name__ == "__main__":
    main()
