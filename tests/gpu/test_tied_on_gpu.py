"""Tests of tied weights between CPU and GPU, and between virtual GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipe
from tests.pairs import each_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORDS, WIDTH = 23, 16
GPU = torch.device("cuda", 0)


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.embedding.weight, self.bias)


class Scaled(nn.Module):
    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def language(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    embedding, table = nn.Embedding(WORDS, WIDTH), torch.randn(WIDTH)
    linear = nn.Linear(WIDTH, WORDS)
    linear.weight = embedding.weight
    head = Head(embedding) if kind == "module" else linear
    middle = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(embedding, Scaled(table), *middle, Scaled(table), head).double()


def device_list(where: str) -> list[Any]:
    if where == "virtual":
        return list(penstock.virtual_devices("cuda:0", 4))
    return ["cpu", GPU, GPU, GPU] if where == "cpu first" else [GPU, "cpu", GPU, "cpu"]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(rows: int, device: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    x, y = (torch.randint(0, WORDS, (rows, 3)) for _ in range(2))
    return x.to(device), y


@each_pair(
    runtime=["threads", "inline"],
    door=["step", "call"],
    checkpoint=["never", "except_last", "always"],
    kind=["weight", "module", "frozen"],
    where=["cpu first", "gpu first", "virtual"],
)
def test_tied_weights_across_devices_train_as_the_unsplit_model(
    where: str, kind: str, checkpoint: str, door: str, runtime: str
) -> None:
    model = language(kind)
    if kind == "frozen":
        model[0].requires_grad_(False)
    pipe = Pipe(
        copy.deepcopy(model), 3, checkpoint,
        stages=[2, 2, 1, 2], devices=device_list(where), schedule="1f1b",
        runtime=runtime, loss_fn=cross_entropy,
    )  # fmt: skip
    devices = [pipe._placed_partition.stage_devices[stage] for stage in (0, 3)]
    assert pipe[0].weight.device == pipe[1].table.device == devices[0]
    assert pipe[6].bias.device == devices[1]
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (model, pipe)
    ]
    for rows in (7, 2, 8):
        x, target = tokens(rows, "cpu")
        cross_entropy(model(x), target).backward()
        if door == "step":
            pipe.step(x.to(devices[0]), target=target)
        else:
            output = pipe(x.to(devices[0]))
            cross_entropy(output, target.to(output.device)).backward()
        pairs = zip(pipe.parameters(), model.parameters(), strict=True)
        for p, q in pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-10, atol=1e-10)
        wanted = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5).cpu(), wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("where", ["cpu first", "gpu first", "virtual"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tied_weights_across_devices_without_gradients(mode: Any, where: str) -> None:
    model = language("module")
    pipe = Pipe(copy.deepcopy(model), 3, stages=[2, 2, 1, 2], devices=device_list(where))
    x, _ = tokens(7, "cpu")
    with mode():
        found = pipe(x.to(pipe[0].weight.device))
        torch.testing.assert_close(found.cpu(), model(x), rtol=1e-10, atol=1e-10)


def test_hooks_of_tied_weights_see_the_sum_on_the_device_of_the_parameter() -> None:
    model = language("weight")
    pipe = Pipe(copy.deepcopy(model), 3, stages=[2, 2, 1, 2], devices=device_list("cpu first"))
    x, target = tokens(7, "cpu")
    seen: list[list[Tensor]] = [[], []]
    for module, found in zip((model, pipe), seen, strict=True):
        module.get_parameter("0.weight").register_hook(found.append)
        output = module(x)
        cross_entropy(output, target.to(output.device)).backward()
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("runtime", ["threads", "graph"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_clip_the_gradient_of_the_batch(kind: str, runtime: str) -> None:
    """The clip begins in the last steps, which are replayed in a graph."""

    def clip(value: Any) -> Tensor | None:
        if kind == "register_hook":
            return value.clamp(-0.01, 0.01)  # type: ignore[no-any-return]
        value.grad.clamp_(-0.01, 0.01)
        return None

    model = language("weight").to(GPU)
    devices = device_list("virtual")
    pipe = Pipe(copy.deepcopy(model), 3, stages=[2, 2, 1, 2], devices=devices, runtime=runtime)
    for module in (pipe, model):
        for parameter in module.parameters():
            getattr(parameter, kind)(clip)
    for scale in (1e-3, 1e-3, 1e-3, 10.0, 10.0):
        x, target = (tensor.to(GPU) for tensor in tokens(7, GPU))
        for module in (pipe, model):
            module.zero_grad(set_to_none=False)
        pipe.step(x, target=target, loss_fn=cross_entropy, scale=scale)
        (scale * cross_entropy(model(x), target)).backward()
        for found, expected in zip(pipe.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-10)


def test_tied_weights_of_layers_placed_by_the_user() -> None:
    model = language("weight")
    layers = list(copy.deepcopy(model))[:5]
    for layer in layers[2:]:
        layer.to(GPU)
    head = nn.Linear(WIDTH, WORDS).to(GPU, torch.float64)
    head.load_state_dict(model[6].state_dict())
    head.weight = layers[0].get_parameter("weight")
    pipe = Pipe(nn.Sequential(*layers, head), 3, loss_fn=cross_entropy)
    assert [str(pipe._placed_partition.stage_devices[stage]) for stage in (0, 1)] == [
        "cpu",
        "cuda:0",
    ]
    unsplit = nn.Sequential(*list(model)[:5], model[6])
    x, target = tokens(7, "cpu")
    cross_entropy(unsplit(x), target).backward()
    pipe.step(x, target=target)
    for p, q in zip(pipe.parameters(), unsplit.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-10, atol=1e-10)
