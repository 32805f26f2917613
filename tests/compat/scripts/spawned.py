# mypy: ignore-errors
"""A pipe in each of two spawned processes, synchronised by DistributedDataParallel."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.pipeline.sync import Pipe
from torch.nn.parallel import DistributedDataParallel


class Local(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def forward(self, x):
        return self.pipe(x).local_value()


def run_worker(rank, world_size, folder):
    rpc.init_rpc(
        f"worker{rank}",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rpc{rank}",
            _transports=["uv"],  # the default one polls, and keeps a core busy
        ),
    )
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=f"file://{folder}/ddp"
    )
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    batch = torch.randn(8, 3, dtype=torch.float64)
    expected = torch.autograd.grad(layers(batch).mean(), list(layers.parameters()))
    model = DistributedDataParallel(Local(Pipe(layers, chunks=2, checkpoint="never")))
    model(batch.chunk(world_size)[rank]).mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)
    dist.destroy_process_group()
    rpc.shutdown()


if __name__ == "__main__":
    assert sys.argv[1:] == ["--flag", "two words"]
    assert os.path.dirname(os.path.abspath(__file__)) == sys.path[0]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_worker, args=(2, folder), nprocs=2, join=True)
    print("spawned")
