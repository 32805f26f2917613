# mypy: ignore-errors
"""A small U-Net written for torchgpipe: skips, namespaces, balance_by_time, a saved state_dict."""

import copy
import io
import sys
from collections import OrderedDict

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torchgpipe import GPipe, is_recomputing
from torchgpipe.balance import balance_by_time
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
recomputed = 0


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, input):
        global recomputed
        recomputed += is_recomputing()
        output = self.conv(input)
        yield stash("skip", output)
        return F.max_pool2d(output, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, input):
        skip = yield pop("skip")
        return self.conv(torch.cat([F.interpolate(input, scale_factor=2.0), skip], dim=1))


def unet(depth, channels):
    spaces = [Namespace() for _ in range(depth)]
    layers = OrderedDict()
    for i, space in enumerate(spaces):
        layers[f"down{i}"] = Down(channels).isolate(space)
    layers["bottom"] = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU())
    for i, space in reversed(list(enumerate(spaces))):
        layers[f"up{i}"] = Up(channels).isolate(space)
    return nn.Sequential(layers)


model = unet(depth=2, channels=3)
verify_skippables(model)
plain = copy.deepcopy(model)
partitions = int(sys.argv[1])
flat = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(5)))
balance = balance_by_time(partitions, flat, torch.rand(8, 3, 8, 8), timeout=0.1, device="cpu")
assert sum(balance) == 5
assert len(balance) == partitions

model = GPipe(model, balance, devices=["cpu"] * partitions, chunks=4, checkpoint="except_last")
assert model.balance == balance
assert model.chunks == 4
in_device, out_device = model.devices[0], model.devices[-1]
assert len(model) == 5
assert list(model)[-1] is model[4]
first = [key for key in model.state_dict() if key.startswith("partitions.0.")]
assert first[:2] == ["partitions.0.down0.module.conv.weight", "partitions.0.down0.module.conv.bias"]

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reference = torch.optim.SGD(plain.parameters(), lr=0.1)
for batch in (8, 6, 3):
    input = torch.rand(batch, 3, 8, 8).to(in_device, non_blocking=True)
    target = torch.rand(batch, 3, 8, 8).to(out_device, non_blocking=True)
    for network, step in ((model, optimizer), (plain, reference)):
        step.zero_grad()
        F.mse_loss(network(input), target).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    optimizer.step()
    reference.step()
assert recomputed

saved = io.BytesIO()
torch.save(model.state_dict(), saved)
saved.seek(0)
again = GPipe(unet(2, 3), balance, devices=["cpu"] * partitions, chunks=2)
again.load_state_dict(torch.load(saved))
again.eval()
with torch.no_grad():
    input = torch.rand(5, 3, 8, 8)
    torch.testing.assert_close(again(input), plain(input), rtol=0, atol=1e-10)
print("segmented by", len(balance), "partitions")
