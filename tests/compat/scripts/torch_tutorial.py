# mypy: ignore-errors
"""A language model trained as in PyTorch's tutorial on pipelines, compared with the plain model."""

import copy
import math
import tempfile

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.pipeline.sync import Pipe

TOKENS, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH, BATCH = 50, 16, 2, 32, 3, 5, 20


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = math.sqrt(WIDTH)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("position", torch.randn(LENGTH, 1, WIDTH))

    def forward(self, src):
        src = src.t()  # the batch comes first in a pipe, the position in the layers
        return self.embedding(src) * self.scale + self.position


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, inp):
        return self.linear(inp).permute(1, 0, 2)


class Layer(nn.TransformerEncoderLayer):
    """A layer with batch-first inputs and outputs, so that outputs are concatenated by rows."""

    def forward(self, inp):
        return super().forward(inp.transpose(0, 1)).transpose(0, 1)


class BatchFirst(nn.Module):
    def forward(self, inp):
        return inp.transpose(0, 1)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

tmpfile = tempfile.NamedTemporaryFile()  # noqa: SIM115
rpc.init_rpc(
    name="worker",
    rank=0,
    world_size=1,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmpfile.name}"),
)

layers = [Encoder(), BatchFirst()]
layers += [Layer(WIDTH, HEADS, HIDDEN, dropout=0.0) for _ in range(LAYERS)]
layers += [BatchFirst(), Decoder()]
plain = nn.Sequential(*copy.deepcopy(layers))
model = Pipe(nn.Sequential(*layers), chunks=8)


def get_total_params(module):
    return sum(param.numel() for param in module.parameters())


assert get_total_params(model) == get_total_params(plain)

criterion = nn.CrossEntropyLoss()
optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
losses = []
for _ in range(3):
    data = torch.randint(TOKENS, (BATCH, LENGTH))
    targets = torch.randint(TOKENS, (BATCH * LENGTH,))
    model.train()
    for optimizer in optimizers:
        optimizer.zero_grad()
    output = model(data).local_value()
    loss = criterion(output.reshape(-1, TOKENS), targets)
    loss.backward()
    expected = criterion(plain(data).reshape(-1, TOKENS), targets)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    data = torch.randint(TOKENS, (7, LENGTH))  # fewer rows than chunks
    torch.testing.assert_close(model(data).to_here(), plain(data), rtol=0, atol=1e-10)

print("trained:", *(f"{loss:.3f}" for loss in losses))
rpc.shutdown()
