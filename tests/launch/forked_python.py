"""Run Python programs, `torchrun` among them, in forks of a process that has imported PyTorch.

A new interpreter takes seconds to import PyTorch. The launcher of `torchrun`, its rendezvous and
its restarts are those of `torch.distributed.run`; only its ranks are forks too.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from tests.distributed.fork_server import forked

_PDEATHSIG = 1  # PR_SET_PDEATHSIG, an option of prctl
_CLONE_NEWNET = 0x40000000


def end_with_parent() -> None:
    """Let this process receive SIGTERM if its parent ends first, however that happens."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


class ForkedPython:
    """A forked `python words`, with the interface of `subprocess.Popen`.

    Args:
        words: What follows the interpreter on a command line: `-c code`, `-m module`, or a script.
        env: Its environment.
        namespace: The network namespace that it enters.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], namespace: str | None = None
    ) -> None:
        self._folder = Path(mkdtemp(prefix="penstock-forked-"))
        self._files = [self._folder / "out", self._folder / "err"]
        files = list(map(str, self._files))
        self._process = forked().Process(
            target=_run, args=(list(words), dict(env), namespace, files)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Wait for the end, and return what was written to stdout and stderr."""
        self._process.join()
        out, err = (file.read_text() if file.exists() else "" for file in self._files)
        shutil.rmtree(self._folder, ignore_errors=True)
        return out, err


def _run(words: list[str], env: dict[str, str], namespace: str | None, files: list[str]) -> None:
    end_with_parent()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as place:
            assert ctypes.CDLL(None).setns(place.fileno(), _CLONE_NEWNET) == 0
    with patch.object(torchrun, "elastic_launch", _launch_forks):
        code = _run_program(words)
    threading._shutdown()  # type: ignore[attr-defined]
    _flush()
    os._exit(code)


def _launch_forks(config: Any, entrypoint: str) -> Callable[..., Any]:
    """Return a launcher, as `elastic_launch` does, that forks its ranks."""
    assert entrypoint == sys.executable
    config.start_method = "fork"

    def launch(*words: str) -> Any:
        folder = Path(mkdtemp(prefix="penstock-forked-"))

        def run_rank(unbuffered: str, *words: str) -> None:
            assert unbuffered == "-u"
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # a fork has the handlers of the launcher
            _wait_for_all_forks(folder)
            _run_rank(list(words))

        try:
            return elastic_launch(config=config, entrypoint=run_rank)(*words)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return launch


def _wait_for_all_forks(folder: Path) -> None:
    """Wait until the launcher has forked all ranks of this host.

    A thread of the launcher serves the store, and looks up the host name of each rank that connects
    to it. A rank that is forked meanwhile has a copy of a locked resolver, which nobody unlocks: it
    hangs when it resolves a name itself.
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{attempt}-{os.getpid()}").touch()
    end = time.monotonic() + 60
    while len(list(folder.glob(f"{attempt}-*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
        assert time.monotonic() < end, "a rank was not forked within a minute"
        time.sleep(0.002)


def _run_rank(words: list[str]) -> None:
    # The launcher waits for a fork to return, unless its exit code says that it failed.
    with patch.object(os, "_exit", _exit_or_return):
        code = _run_program(words)
    _flush()
    if code:
        os._exit(code)


def _exit_or_return(code: int, exit_at_once: Any = os._exit) -> None:
    if code == 0 and threading.current_thread() is threading.main_thread():
        sys.exit(0)
    exit_at_once(code)


def _flush() -> None:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _run_program(words: list[str]) -> int:
    """Run `python words`, as far as it matters here, in this process, and return its exit code."""
    try:
        if words[:2] == ["-m", "torch.distributed.run"]:
            torchrun.main(words[2:])
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
