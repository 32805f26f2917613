"""Tests of pipes on a real GPU that is split into four virtual ones."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe
from penstock.device import device
from tests.gpu import support
from tests.gpu.support import BUSY, MODES, SCHEDULES, Sleep, batch, four, needs_gpu, no_hidden_waits
from tests.pairs import each_pair

pytestmark = needs_gpu


def layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return support.layers(dtype, norm=False)


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = nn.functional.mse_loss(model(x), y)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def pipe_of(model: nn.Sequential, **options: Any) -> Pipe:
    given = {"chunks": 6, "devices": four(), "loss_fn": nn.functional.mse_loss, **options}
    return Pipe(model, **given)


def worst(pipe: Pipe, expected: list[Tensor]) -> float:
    pairs = zip(pipe.parameters(), expected, strict=True)
    return max(float((p.grad - g).abs().max()) for p, g in pairs if p.grad is not None)


def test_virtual_devices_are_disjoint_parts_of_the_gpu() -> None:
    parts = penstock.virtual_devices("cuda:0", 4)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert sum(part.sms for part in parts) <= total
    assert len({part.sms for part in parts}) == 1
    assert penstock.virtual_devices("cuda:0", 4) == parts
    assert copy.deepcopy(parts[1]) is parts[1]
    with pytest.raises(penstock.ArgumentError, match="more than the"):
        penstock.virtual_devices("cuda:0", 4, sms=total)


@each_pair(schedule=SCHEDULES, mode=MODES, runtime=["threads", "inline"])
def test_step_on_gpu_equals_the_unsplit_model(schedule: str, mode: str, runtime: str) -> None:
    x, y = batch(1)
    loss, gradients = oracle(layers(), x, y)
    pipe = pipe_of(layers(), schedule=schedule, checkpoint=mode, runtime=runtime)
    for _ in range(3):
        pipe.zero_grad()
        result = pipe.step(x, target=y)
    assert abs(float(result.loss - loss)) < 1e-12
    assert worst(pipe, gradients) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_call_and_backward_on_gpu_equal_the_unsplit_model(mode: str) -> None:
    x, y = batch(1)
    _, gradients = oracle(layers(), x, y)
    pipe = pipe_of(layers(), checkpoint=mode)
    for _ in range(3):
        pipe.zero_grad()
        nn.functional.mse_loss(pipe(x), y).backward()
    assert worst(pipe, gradients) < 1e-12


def test_gradients_reach_the_input_on_gpu() -> None:
    x, y = batch(1)
    x.requires_grad_()
    model = layers()
    (expected,) = torch.autograd.grad(nn.functional.mse_loss(model(x * 2), y), x)
    pipe = pipe_of(layers())
    (found,) = torch.autograd.grad(nn.functional.mse_loss(pipe(x * 2), y), x)
    assert float((found - expected).abs().max()) < 1e-12
    pipe.step(x * 2, target=y)
    assert x.grad is not None
    assert float((x.grad - expected).abs().max()) < 1e-12


class Pixels(nn.Module):
    """A layer that views each row as an image, and convolves it down and up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(torch.relu(self.down(x.view(len(x), 2, 4, 4))))
        return out.flatten(1)


class Attends(nn.Module):
    """A layer that views each row as a sentence of four words, with position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.place = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        words = x.view(len(x), 4, 8) + self.place(torch.arange(4, device=x.device))
        out: Tensor = self.attention(words, words, words, need_weights=False)[0]
        return out.flatten(1)


def many_kinds(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(32, 32), Pixels(), nn.LayerNorm(32), Attends(), nn.Linear(32, 32)]
    more = [nn.GELU(), Pixels(), nn.Linear(32, 8)]
    return nn.Sequential(*parts, *more).to("cuda:0", dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v", "dualpipe-v"])
def test_zero_bubble_with_convolutions_attention_and_embeddings(schedule: str, mode: str) -> None:
    x, y = batch(1)
    loss, gradients = oracle(many_kinds(), x, y)
    pipe = pipe_of(many_kinds(), schedule=schedule, checkpoint=mode)
    result = pipe.step(x, target=y)
    assert abs(float(result.loss - loss)) < 1e-12
    assert worst(pipe, gradients) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_bubble_under_autocast_on_gpu(dtype: torch.dtype) -> None:
    x, y = (t.float() for t in batch(1))
    found = []
    for schedule in ("1f1b", "zb-h1"):
        pipe = pipe_of(many_kinds(torch.float32), schedule=schedule, checkpoint="never")
        with torch.autocast("cuda", dtype):
            pipe.step(x, target=y)
        found.append([p.grad for p in pipe.parameters() if p.grad is not None])
    assert all(gradient.dtype is torch.float32 for gradient in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_wait_for_slow_copies(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device.copy_to_device

    def slow(tensor: Tensor, device: torch.device) -> Tensor:
        torch.cuda._sleep(BUSY // 4)
        found = plain(tensor, device)
        torch.cuda._sleep(BUSY // 4)
        return found

    x, y = batch(1)
    _, gradients = oracle(layers(), x, y)
    pipe = pipe_of(layers(), schedule=schedule)
    pipe.step(x, target=y)
    monkeypatch.setattr(device, "copy_to_device", slow)
    monkeypatch.setattr(device, "shares_memory", lambda sender, receiver: False)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target=y)
    assert worst(pipe, gradients) < 1e-12
    pipe.zero_grad()
    nn.functional.mse_loss(pipe(x), y).backward()
    assert worst(pipe, gradients) < 1e-12


def test_streams_wait_for_a_slow_caller_and_slow_stages() -> None:
    x, y = batch(1)
    model = nn.Sequential(*list(layers())[:3], Sleep(), *list(layers())[3:], Sleep())
    _, gradients = oracle(model, x, y)
    pipe = pipe_of(copy.deepcopy(model), schedule="1f1b")
    for _ in range(3):
        pipe.zero_grad()
        torch.cuda._sleep(BUSY)
        late = x * 0 + x  # ready only after the stream of the caller has slept
        pipe.step(late, target=y * 1)
        del late
        torch.randn(4096, 32, device="cuda:0")  # must not reuse the memory of the batch
    assert worst(pipe, gradients) < 1e-12


def test_step_never_synchronizes_the_host() -> None:
    x, y = batch(1)
    pipe = pipe_of(layers(), schedule="1f1b")
    # The first call of each kind compares its recomputations with their forwards.
    pipe.step(x, target=y)
    pipe(x).sum().backward()
    with no_hidden_waits():
        for _ in range(3):
            pipe.step(x, target=y)
        nn.functional.mse_loss(pipe(x), y).backward()
        with torch.no_grad():
            pipe(x)


def test_optimizer_sees_finished_gradients_on_gpu() -> None:
    x, y = batch(1)
    model, pipe = layers(), pipe_of(layers(), schedule="1f1b")
    optimizers = [torch.optim.Adam(module.parameters(), 1e-2) for module in (model, pipe)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        pipe.step(x, target=y)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(pipe.parameters(), model.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 1e-9


def wide(**options: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
    x = torch.randn(32 * 512, 512, device="cuda:0")
    pipe = Pipe(model, 16, devices=four(), loss_fn=lambda out: out.square().mean(), **options)
    return lambda: pipe.step(x)


def test_gpu_memory_does_not_grow_over_steps() -> None:
    run = wide(schedule="1f1b", checkpoint="never")
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        run()
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.on and self.seen == 3:
            raise LookupError("planted")
        return x


def test_pipe_on_gpu_works_after_an_error() -> None:
    x, y = batch(1)
    model = layers()
    _, gradients = oracle(model, x, y)
    fails = Fails()
    pipe = pipe_of(nn.Sequential(*list(layers())[:4], fails, *list(layers())[4:]), schedule="1f1b")
    threads = threading.active_count()
    with pytest.raises(LookupError, match="planted") as caught:
        pipe.step(x, target=y)
    assert any("micro-batch 2" in note for note in caught.value.__notes__)
    del caught
    fails.on = False
    pipe.zero_grad()
    pipe.step(x, target=y)
    assert worst(pipe, gradients) < 1e-12
    del pipe
    gc.collect()
    assert threading.active_count() < threads + 5
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock")]


def test_dropout_on_gpu_is_equal_for_every_schedule_and_checkpoint_mode() -> None:
    x, y = batch(1)
    found = []
    for schedule in ("gpipe", "1f1b", "naive"):
        for mode in MODES:
            torch.manual_seed(0)
            parts = [nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5)]
            model = nn.Sequential(*parts, nn.Linear(32, 8)).to("cuda:0", torch.float64)
            pipe = pipe_of(model, schedule=schedule, checkpoint=mode, stages=4)
            torch.manual_seed(7)
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, target=y)
            found.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            assert float((one - other).abs().max()) < 1e-12


def test_autocast_reaches_the_stages_on_gpu() -> None:
    x, _ = batch(1)
    pipe = pipe_of(layers(torch.float32), checkpoint="always")
    with torch.autocast("cuda", torch.bfloat16):
        out = pipe(x.float())
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in pipe.parameters())


def test_stages_on_cpu_and_gpu_mixed() -> None:
    x, y = batch(1)
    _, gradients = oracle(layers(), x, y)
    pipe = pipe_of(layers(), devices=["cpu", "cuda:0", "cpu"], stages=3, schedule="1f1b")
    result = pipe.step(x.cpu(), target=y)
    pairs = zip(pipe.parameters(), gradients, strict=True)
    assert all(
        float((p.grad - g.to(p.device)).abs().max()) < 1e-10 for p, g in pairs if p.grad is not None
    )
    assert result.loss.device.type == "cpu"
    assert len(result.timeline.spans) > 0


class Gated(nn.Module):
    """A layer with a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * gate
        return y


@pytest.mark.parametrize("door", ["call", "step"])
def test_keyword_inputs_are_moved_to_the_stages_that_use_them(door: str) -> None:
    """They go from the CPU to stages on CPU and GPU, and their gradients come back."""
    torch.manual_seed(0)
    model = penstock.PipeSequential(Gated(), Gated(), Gated()).double()
    x, gate = torch.randn(6, 8).double(), torch.rand(6, 1, dtype=torch.float64, requires_grad=True)
    expected = model(x, gate=gate).sum()
    expected.backward()
    assert gate.grad is not None
    wanted, gate.grad = gate.grad, None
    devices = ["cpu", "cuda:0", "cpu"]
    pipe = Pipe(copy.deepcopy(model), 3, stages=3, devices=devices, reduction="sum")
    if door == "call":
        loss = pipe(x, gate=gate).sum()
        loss.backward()
    else:
        loss = pipe.step(x, gate=gate, loss_fn=torch.sum).loss
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gate.grad, wanted, rtol=1e-10, atol=1e-10)
