# mypy: ignore-errors
"""A training loop around fairscale.nn.Pipe, as in its documentation."""

import argparse
import copy

import fairscale
import torch
import torch.nn.functional as F  # noqa: N812
from fairscale.nn import Pipe
from fairscale.nn.pipe.balance import balance_by_time
from fairscale.nn.pipe.skip import pop, skippable, stash
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--chunks", type=int, default=1)
parser.add_argument("--checkpoint", default="except_last")
args = parser.parse_args()


@skippable(stash=["input"])
class Keep(nn.Module):
    def forward(self, x):
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class Add(nn.Module):
    def forward(self, x):
        return x + (yield pop("input"))


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(
    Keep(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.BatchNorm1d(6), Add()
)
plain = copy.deepcopy(model)
measured = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
assert sum(balance_by_time(2, measured, torch.rand(4, 6), timeout=0.05, device="cpu")) == 3
model = fairscale.nn.Pipe(
    model, balance=[2, 4], devices=["cpu", "cpu"], chunks=args.chunks, checkpoint=args.checkpoint
)
assert isinstance(model, Pipe)
assert model.checkpoint == args.checkpoint
assert "partitions.1.4.running_mean" in model.state_dict()

optimizer = optim.SGD(params=model.parameters(), lr=0.001)
data, target = torch.rand(12, 6), torch.rand(12, 6)
optimizer.zero_grad()
loss = F.mse_loss(model(data), target.to(model.devices[-1]))
loss.backward()

# BatchNorm sees a micro-batch at a time.
pieces = zip(data.chunk(args.chunks), target.chunk(args.chunks), strict=True)
expected = sum(F.mse_loss(plain(x), y) for x, y in pieces) / args.chunks
expected.backward()
torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
optimizer.step()
print("trained with", args.chunks, "chunks,", args.checkpoint)
