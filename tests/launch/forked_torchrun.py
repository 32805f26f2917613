"""Run `torchrun` in a fork of a process that has imported PyTorch, and its ranks in forks of that.

The launcher, its rendezvous and its restarts are those of `torch.distributed.run`. Only the ranks
are not started as new interpreters, each of which takes seconds to import PyTorch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
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


class ForkedTorchrun:
    """A forked launcher, with the interface of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], namespace: str | None = None
    ) -> None:
        self._folder = Path(mkdtemp(prefix="penstock-torchrun-"))
        self._files = [self._folder / "out", self._folder / "err"]
        files = list(map(str, self._files))
        self._process = forked().Process(
            target=_launch, args=(list(words), dict(env), namespace, files)
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


def _launch(words: list[str], env: dict[str, str], namespace: str | None, files: list[str]) -> None:
    end_with_parent()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as place:
            assert ctypes.CDLL(None).setns(place.fileno(), _CLONE_NEWNET) == 0

    def launch_forks(config: Any, entrypoint: str) -> Any:
        assert entrypoint == sys.executable
        config.start_method = "fork"
        return elastic_launch(config=config, entrypoint=_run_script)

    with patch.object(torchrun, "elastic_launch", launch_forks):
        torchrun.main(words)


def _run_script(unbuffered: str, *words: str) -> None:
    """Run `python -u words`, as far as it matters here, in this process."""
    assert unbuffered == "-u"
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(1)
