# mypy: ignore-errors
"""Skips, masks, several inputs and partition_model of torch.distributed.pipeline.sync."""

import copy
import os
import socket
from typing import ClassVar

import torch
import torch.distributed.rpc
from torch import nn
from torch.distributed.pipeline.sync import NoChunk, Pipe, WithDevice
from torch.distributed.pipeline.sync.checkpoint import is_checkpointing, is_recomputing
from torch.distributed.pipeline.sync.pipe import PipeSequential
from torch.distributed.pipeline.sync.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)
from torch.distributed.pipeline.sync.skip.skippable import Skippable
from torch.distributed.pipeline.sync.utils import partition_model

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = str(port)
torch.distributed.rpc.init_rpc("worker", rank=0, world_size=1)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


@skippable(stash=["long"])
class Stash(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("long")
        return x + skip


class Masked(nn.Module):
    modes: ClassVar = set()

    def forward(self, x, mask):
        self.modes.add((is_checkpointing(), is_recomputing()))
        return x * mask, mask


class Unmasked(nn.Module):
    def forward(self, x, mask):
        return x / (mask + 1)


outer, inner = Namespace(), Namespace()
model = PipeSequential(
    Masked(),
    Unmasked(),
    Stash(4).isolate(outer),
    Stash(4).isolate(inner),
    WithDevice(nn.Tanh(), "cpu"),
    Pop().isolate(inner),
    nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    Pop().isolate(outer),
)
verify_skippables(model)
assert isinstance(model[2], Skippable)
plain = copy.deepcopy(model)
pipe = Pipe(model, chunks=3, checkpoint="always")
assert len(pipe) == 9
assert len(pipe.partitions) == 8
assert [key for key in pipe.state_dict() if key.endswith("weight")] == [
    "partitions.2.0.module.linear.weight",
    "partitions.3.0.module.linear.weight",
    "partitions.6.0.weight",
]

x, mask = torch.randn(6, 4, requires_grad=True), torch.rand(4)
y = x.detach().requires_grad_()
output = pipe(x, NoChunk(mask)).local_value()
expected = plain(y, mask)
torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
output.pow(2).sum().backward()
expected.pow(2).sum().backward()
torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-10)
for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
assert {(True, False), (False, True)} <= Masked.modes

layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
cut = Pipe(partition_model(layers, [3, 1], devices=["cpu", "cpu"]), chunks=2)
assert [len(partition) for partition in cut.partitions] == [3, 1]
x = torch.randn(5, 4)
torch.testing.assert_close(cut(x).local_value(), layers(x), rtol=0, atol=1e-12)
print("skipped")
