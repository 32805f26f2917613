"""A script for torchrun: train until the host with the store is lost, or another rank is killed.

    host_script.py stepping|saving|idle|loading FOLDER HEARTBEAT

Each rank writes its pid to FOLDER/pid-RANK once it has taken two steps, and the time and text of
its error to FOLDER/end-RANK. With "idle" it waits for FOLDER/go-RANK, with "loading" it reads
batches from the workers of a DataLoader.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import penstock
from tests.faults.training_run import CHUNKS, batch, no_fault, pipe_of


def batches(doing: str) -> Iterator[tuple[Tensor, Tensor]]:
    if doing != "loading":
        while True:
            yield batch(0)
    x, target = batch(0)
    rows = 2 * CHUNKS
    data = TensorDataset(x.repeat(10_000, 1), target.repeat(10_000, 1))
    loader = DataLoader(data, rows, num_workers=2, persistent_workers=True)
    for x, target in loader:
        yield x, target


def main(doing: str, folder: Path, heartbeat: float) -> None:
    """Run the training on this rank until it fails."""
    penstock.init()
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    pipe = pipe_of(no_fault, heartbeat=heartbeat, audit="off")
    try:
        for step, (x, target) in enumerate(batches(doing)):
            pipe.step(x, target=target)
            if step == 2:
                (folder / f"pid-{rank}").write_text(str(os.getpid()))
            if doing == "saving" and step > 2:
                pipe.save(folder / "run")
            if doing == "idle" and step > 2:
                while not (folder / f"go-{rank}").exists():
                    time.sleep(0.05)
            time.sleep(0.01)
    except penstock.RemoteError as error:
        (folder / f"end-{rank}").write_text(f"{time.time()} {error.message}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
