"""Tests that the defects of `torch.distributed.pipeline.sync.Pipe` are not repeated here.

Defect 11, the overhead per cell, is measured by benchmarks instead.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, is_checkpointing, pop, skippable, stash, verify_skippables
from penstock.model.sequential import find_layer_device
from tests.support import (
    Do,
    Pop,
    Stash,
    Watch,
    batch,
    closely,
    crews,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    order_of_backwards,
    outcome,
    plain,
    trained,
    unsplit,
    whole,
)

Value = Callable[[Tensor], Tensor | None]

# ---- 1. a skipped integer or no-grad tensor, or one popped and not used, failed -----------


@skippable(stash=["far"])
class StashSome(nn.Module):
    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", self.value(x))
        return x


@skippable(pop=["far"])
class PopSome(nn.Module):
    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        return self.use(x, (yield pop("far")))


def multiplied(x: Tensor, far: Tensor) -> Tensor:
    return x * far


def ignored(x: Tensor, far: Any) -> Tensor:
    return x


@each_door
@each_checkpoint
@pytest.mark.parametrize(
    ("value", "use"),
    [
        (lambda x: (x > 0).long(), multiplied),
        (lambda x: x > 0, multiplied),
        (lambda x: x.detach() + 1, multiplied),
        (lambda x: x * 2, ignored),
        (lambda x: None, ignored),
    ],
    ids=["integers", "booleans", "without a gradient", "not used", "none"],
)
def test_1_skip_of_integer_unused_and_no_grad_tensors(
    value: Value, use: Callable[[Tensor, Any], Tensor], checkpoint: str, door: str
) -> None:
    layers = list(plain())
    model = nn.Sequential(layers[0], StashSome(value), *layers[1:3], PopSome(use), layers[3])
    x, target = batch(7)
    pipe = Pipe(
        copy.deepcopy(model),
        chunks=3,
        checkpoint=checkpoint,
        stages=[2, 1, 1, 2],
        loss_fn=functional.mse_loss,
    )
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []


# ---- 2. autocast and inference mode never reached the workers -----------------------------


@each_runtime
@each_checkpoint
@each_door
def test_2_autocast_reaches_the_workers(runtime: str, checkpoint: str, door: str) -> None:
    """Forward and recomputation run under autocast, with the results of the micro-batches."""
    seen: set[torch.dtype] = set()
    model = plain(torch.float32)
    pipe = Pipe(
        copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime, loss_fn=in_full_precision
    )
    pipe[2].register_forward_hook(lambda module, given, found: seen.add(found.dtype))
    x, target = batch(8, torch.float32)
    if door == "step":
        with torch.autocast("cpu", torch.bfloat16):
            found = trained(pipe, x, target, door)
    else:  # autocast has ended when the backward recomputes
        with torch.autocast("cpu", torch.bfloat16):
            output = pipe(x)
        loss = in_full_precision(output, target)
        loss.backward()
        found = outcome(pipe, x, loss, output)
    assert seen == {torch.bfloat16}
    expected = unsplit(
        model,
        x,
        target,
        in_full_precision,
        chunks=3,
        counts=[1] * 4,
        order=order_of_backwards(pipe, 3),
        door=door,
        under=torch.autocast("cpu", torch.bfloat16),
    )
    assert differences(found, expected) == []


def in_full_precision(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


@each_runtime
def test_2_inference_mode_reaches_the_workers(runtime: str) -> None:
    seen = []
    model = plain()
    look = Watch(lambda x: seen.append(torch.is_inference_mode_enabled()))
    pipe = Pipe(nn.Sequential(*model, look), chunks=2, stages=5, runtime=runtime)
    x, _ = batch(4)
    with torch.inference_mode():
        y = pipe(x)
    assert seen == [True, True]
    assert y.is_inference()
    assert closely(y.clone(), model(x).detach())


# ---- 3. worker threads leaked -------------------------------------------------------------


def test_3_deleted_pipes_leave_no_threads() -> None:
    gc.collect()
    before = crews()
    x, _ = batch(4)
    for _ in range(50):
        pipe = Pipe(plain(), chunks=2, stages=4)
        pipe(x).sum().backward()
    del pipe
    assert crews() == before


# ---- 4. a pipe could not be deep-copied or pickled ----------------------------------------


def saved_and_loaded(pipe: Pipe) -> Any:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
@pytest.mark.parametrize("used", [False, True])
def test_4_pipe_can_be_deepcopied_pickled_and_saved(
    again: Callable[[Pipe], Pipe], used: bool
) -> None:
    layers = list(plain())
    model = nn.Sequential(Stash(), nn.Dropout(0.0), *layers[:1], Do(_narrowed), Pop(), layers[3])
    x, target = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    model[2] = nn.Linear(8, 8).double()
    pipe = Pipe(model, chunks=2, stages=3, loss_fn=functional.mse_loss)
    if used:
        pipe(x).sum().backward()
        pipe.step(x, target=target)
        pipe.zero_grad()
    other = again(pipe)
    found = trained(other, x, target, "step")
    assert all(p.grad is None for p in pipe.parameters())
    assert all(p is not q for p, q in zip(pipe.parameters(), other.parameters(), strict=True))
    assert differences(found, trained(pipe, x, target, "step")) == []


def _narrowed(x: Tensor) -> Tensor:
    return x.tanh()


# ---- 5. under checkpointing, retain_graph and autograd.grad failed ------------------------


@each_runtime
@each_checkpoint
def test_5_retain_graph_allows_several_backwards(checkpoint: str, runtime: str) -> None:
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime)
    loss = functional.mse_loss(pipe(x), target)
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    expected = functional.mse_loss(model(x), target)
    expected.backward()
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert closely(p.grad, 3 * q.grad)
    with pytest.raises(RuntimeError, match="backward through"):
        loss.backward()


@each_runtime
@each_checkpoint
def test_5_autograd_grad_of_parameters(checkpoint: str, runtime: str) -> None:
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime)
    found = torch.autograd.grad(functional.mse_loss(pipe(x), target), list(pipe.parameters()))
    wanted = torch.autograd.grad(functional.mse_loss(model(x), target), list(model.parameters()))
    assert all(closely(f, w) for f, w in zip(found, wanted, strict=True))
    assert all(p.grad is None for p in pipe.parameters())


def test_5_autograd_grad_of_some_parameters_and_the_input() -> None:
    x, _ = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, stages=4)
    x.requires_grad_()
    found = torch.autograd.grad(pipe(x).sum(), [x, *pipe[2].parameters()])
    wanted = torch.autograd.grad(model(x).sum(), [x, *model[2].parameters()])
    assert all(closely(f, w) for f, w in zip(found, wanted, strict=True))


# ---- 6. except_last checkpointed every micro-batch of a small batch -----------------------


@each_runtime
@pytest.mark.parametrize(
    ("rows", "expected"), [(3, [True, True, False]), (1, [False]), (8, [True] * 7 + [False])]
)
def test_6_except_last_is_the_last_micro_batch_of_a_small_batch(
    rows: int, expected: list[bool], runtime: str
) -> None:
    seen = []
    look = Watch(lambda x: seen.append(is_checkpointing()))
    pipe = Pipe(nn.Sequential(nn.Linear(6, 2), look), 8, stages=2, runtime=runtime)
    pipe(torch.randn(rows, 6))
    assert seen == expected


# ---- 7. deferred BatchNorm then never updated ---------------------------------------------


@each_door
def test_7_a_small_batch_updates_deferred_batch_norm(door: str) -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 3)).double()
    pipe = Pipe(
        copy.deepcopy(model), 8, deferred_batch_norm=True, stages=3, loss_fn=functional.mse_loss
    )
    x, target = batch(6)  # micro-batches of one row would be too small to normalize
    x, target = x.repeat_interleave(2, 0), target.repeat_interleave(2, 0)
    found = trained(pipe, x, target, door)
    model(x)
    assert found.buffers["1.num_batches_tracked"] == 1
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert closely(found.buffers["1.running_mean"], norm.running_mean)
    assert closely(found.buffers["1.running_var"], norm.running_var)


# ---- 8. verify_skippables did not look into nested Sequentials ----------------------------


def test_8_nested_skippables_are_verified() -> None:
    with pytest.raises(TypeError, match=r"no layer pops 'far', which is stashed"):
        verify_skippables(nn.Sequential(nn.Sequential(nn.ReLU(), Stash())))
    with pytest.raises(TypeError, match=r"'0.1' \(Pop\) pops 'far'"):
        Pipe(nn.Sequential(nn.Sequential(nn.ReLU(), Pop())))
    verify_skippables(nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.ReLU(), Pop())))


@each_door
def test_8_nested_skippables_train_as_the_unsplit_model(door: str) -> None:
    layers = list(plain())
    model = nn.Sequential(
        nn.Sequential(layers[0], Stash()), nn.Sequential(layers[1], nn.Sequential(Pop())), layers[3]
    )
    x, target = batch(7)
    pipe = Pipe(copy.deepcopy(model), 3, stages=3, loss_fn=functional.mse_loss)
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []


# ---- 9. skippables with two inputs, dicts, lists or keywords failed -----------------------


@skippable(stash=["far"])
class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Generator[Any, Any, Any]:
        yield stash("far", a * b)
        return {"sum": a + b, "both": [a, b], "scale": scale}


class Keyword(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.inner(a, b=b, scale=2.0)


@skippable(pop=["far"])
class Join(nn.Module):
    def forward(self, found: dict[str, Any]) -> Generator[Any, Any, Any]:
        far = yield pop("far")
        a, b = found["both"]
        return [found["sum"] * found["scale"] + far, a - b]


@each_checkpoint
def test_9_skippables_with_several_inputs_dicts_lists_and_keywords(checkpoint: str) -> None:
    model = nn.Sequential(Keyword(Two()), Join())
    pipe = Pipe(model, 3, checkpoint, stages=2)
    a, b = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    first, second = pipe(a, b)
    assert closely(first, (a + b) * 2 + a * b)
    assert closely(second, a - b)
    (first.sum() + 2 * second.sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert closely(a.grad, 2 + b.detach() + 2)
    assert closely(b.grad, 2 + a.detach() - 2)


# ---- 10. a module with only buffers counted as CPU ----------------------------------------


def test_10_device_of_a_layer_with_only_buffers() -> None:
    layer = nn.Module()
    layer.register_buffer("table", torch.zeros(3, device="meta"))
    assert find_layer_device(layer) == torch.device("meta")
    assert find_layer_device(nn.BatchNorm1d(3, affine=False).to("meta")) == torch.device("meta")


# ---- 12. CPU stages never overlapped ------------------------------------------------------


def test_12_cpu_stages_overlap() -> None:
    """Each stage waits inside a layer until the other stage is inside one, too."""
    meeting = threading.Barrier(2)

    def meet(x: Tensor) -> Tensor:
        if x[0, 0] == first[threading.current_thread().name]:
            meeting.wait(timeout=20)
        return x

    # micro-batch 1 in stage 0 beside micro-batch 0 in stage 1
    first = {"penstock-0": 1, "penstock-1": 0}
    pipe = Pipe(nn.Sequential(Do(meet), Do(meet)), 2, stages=2)
    x = torch.tensor([[0.0], [1.0]])
    assert torch.equal(pipe(x), x)
