"""The main function of a worker process: join the group, then run functions until the parent ends.

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and so on are set as torchrun sets them.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from tests.distributed.fork_server import ENVIRONMENT, show_gpus

SHOW = signal.SIGUSR1  # makes the process write the stack of every thread to its log
GRACE = 15.0  # seconds after which a case whose parent has gone ends itself


@dataclass(frozen=True)
class Returned:
    """The value that the function returned on this rank."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The traceback of the function that failed on this rank, and what it wrote to the terminal."""

    traceback: str
    written: str = ""


Answer = Returned | Raised


def serve(
    rank: int, size: int, port: int, connection: Connection, log: Path, gpus: str | None
) -> None:
    """Run one function after another, until the parent closes the connection."""
    show_gpus(gpus)
    threading.Thread(target=_end_with_parent, args=(log.parent,), daemon=True).start()
    written = _redirected(log)
    faulthandler.enable(sys.stderr)
    faulthandler.register(SHOW, sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(_as_torchrun(rank, size, port))
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
        connection.send_bytes(packed(Returned(os.getpid())))
    except Exception:
        connection.send_bytes(packed(Raised(traceback.format_exc())))
        return
    gc.collect()
    gc.freeze()  # makes the garbage collection after each case fast
    modules = len(sys.modules)
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        os.ftruncate(written, 0)
        answer = _answer(task)
        gc.collect()
        if len(sys.modules) > modules:  # the case has imported a library
            gc.freeze()
            modules = len(sys.modules)
        connection.send_bytes(answer)


def _answer(task: bytes) -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # peft asks transformers 5.23 for it.
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
            within, function, arguments = unpacked(task)
            faulthandler.dump_traceback_later(within + GRACE, exit=True)
            random.seed(0)
            torch.default_generator.manual_seed(0)
            return packed(Returned(function(*arguments)))
    except BaseException:
        return packed(Raised(traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()


def _as_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **ENVIRONMENT,
    }


def _redirected(log: Path) -> int:
    """Redirect everything written to the terminal to a file, and return its file descriptor."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return file


def _end_with_parent(folder: Path) -> None:
    """End this process when its parent ends, even while it waits for a message."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# ---- values that the processes exchange ---------------------------------------------------

# PyTorch's own ways to send a tensor to another process open files, and take as long as a test
# case. Here tensors are pickled as raw bytes.


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a dense leaf tensor to its bytes. Everything else is pickled as usual."""
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_leaf:
            return NotImplemented
        numbers = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (numbers, value.dtype, tuple(value.shape), value.requires_grad)


def _tensor(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...], learns: bool) -> Tensor:
    flat = (
        torch.frombuffer(bytearray(numbers), dtype=dtype) if numbers else torch.empty(0).to(dtype)
    )
    return flat.reshape(shape).requires_grad_(learns)


def packed(value: Any) -> bytes:
    """Return the value as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Return the value that `packed` turned into bytes. Its tensors are new ones."""
    return pickle.loads(content)
