"""The example models have the published sizes and compute the same in a pipeline."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import resnet101
import train_images
from amoebanet import amoebanet_d
from tests.runtime.cuda_graph.support import emulate, recordings
from unet import unet

CLASSES = 5


class Small(NamedTuple):
    """A small model with the shapes of its images and its output, and a loss."""

    build: Callable[[], nn.Sequential]
    images: tuple[int, ...]
    output: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        images = torch.randn(self.images, dtype=torch.float64)
        if len(self.output) == 4:
            return images, torch.rand(self.output, dtype=torch.float64)
        return images, torch.randint(CLASSES, (self.images[0],))

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.build().double()


MODELS = {
    "unet": Small(
        partial(unet, B=2, C=4, levels=2, outputs=2),
        images=(6, 3, 16, 16),
        output=(6, 2, 16, 16),
        loss=functional.binary_cross_entropy_with_logits,
    ),
    "resnet101": Small(
        partial(resnet101.resnet101, [1, 2], width=4, classes=CLASSES),
        images=(6, 3, 32, 32),
        output=(6, CLASSES),
        loss=functional.cross_entropy,
    ),
    "amoebanet": Small(
        partial(amoebanet_d, L=3, D=16, classes=CLASSES),
        images=(6, 3, 32, 32),
        output=(6, CLASSES),
        loss=functional.cross_entropy,
    ),
}


@pytest.fixture(params=MODELS)
def small(request: pytest.FixtureRequest) -> Small:
    return MODELS[request.param]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums are computed in one order everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the models ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (partial(unet, 6, 72), "362.2M"),
        (partial(unet, 11, 128), "2.21B"),
        (partial(unet, 24, 128), "4.99B"),
        (partial(unet, 24, 160), "7.80B"),
        (resnet101.resnet101, "44.5M"),
        (partial(amoebanet_d, 18, 208), "81.5M"),
        (partial(amoebanet_d, 18, 416), "319.0M"),
        (partial(amoebanet_d, 18, 544), "542.7M"),
        (partial(amoebanet_d, 72, 512), "1.84B"),
    ],
)
def test_example_model_parameter_count_equals_torchgpipe(
    build: Callable[[], nn.Sequential], count: str
) -> None:
    with torch.device("meta"):
        found = sum(parameter.numel() for parameter in build().parameters())
    assert count in (f"{found / 1e6:.1f}M", f"{found / 1e9:.2f}B")


@pytest.mark.parametrize("pixels", [17, 18, 19])
def test_unet_takes_sizes_that_do_not_halve_evenly(pixels: int) -> None:
    output = unet(B=2, C=4, levels=2)(torch.randn(1, 3, pixels, pixels))
    assert output.shape == (1, 1, pixels, pixels)


def test_amoebanet_takes_sizes_that_do_not_halve_evenly() -> None:
    assert amoebanet_d(L=3, D=16, classes=CLASSES)(torch.randn(2, 3, 75, 50)).shape == (2, CLASSES)


def test_example_model_gives_every_parameter_a_gradient(small: Small) -> None:
    model, (images, target) = small.model(), small.batch()
    output = model(images)
    assert output.shape == small.output
    torch.autograd.backward(small.loss(output, target))
    untouched = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert untouched == []


def by_hand(model: nn.Sequential, x: Tensor) -> Tensor:
    """Run the model with its skip connections written out on a plain stack."""
    kept: list[Tensor] = []
    for name, layer in model.named_children():
        if name.endswith(("_stash", "_split")):
            kept.append(x)
        elif name.endswith("_join"):
            skip = kept.pop()
            if isinstance(layer, resnet101.Join):
                x = x + layer.shortcut(skip)
            else:
                x = torch.cat([functional.interpolate(x, size=skip.shape[2:]), skip], dim=1)
        else:
            x = layer(x)
    return x


@pytest.mark.parametrize("name", ["unet", "resnet101"])
def test_example_model_skips_equal_a_plain_stack(name: str) -> None:
    small = MODELS[name]
    images, target = small.batch()
    model, reference = small.model(), small.model()
    torch.autograd.backward(small.loss(model(images), target))
    torch.autograd.backward(small.loss(by_hand(reference, images), target))
    assert_equal(model, reference)


@pytest.mark.parametrize(("B", "levels"), [(1, 2), (2, 0)])
def test_unet_refuses_too_few_levels_or_blocks(B: int, levels: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        unet(B=B, C=4, levels=levels)


@pytest.mark.parametrize(("L", "D"), [(4, 16), (0, 16), (3, 20), (3, 0)])
def test_amoebanet_refuses_invalid_depth_or_width(L: int, D: int) -> None:
    with pytest.raises(ValueError, match=f"L={L}, D={D}"):
        amoebanet_d(L, D)


# ---- in a pipeline ------------------------------------------------------------------------


def unsplit(small: Small, chunks: int, *, last_first: bool) -> tuple[Tensor, nn.Sequential]:
    """Return the loss and the model after a backward for each micro-batch.

    Sums of floats depend on their order, so the backwards run in the order of the schedule.
    """
    model, (images, target) = small.model(), small.batch()
    losses = [
        small.loss(model(x), y) * (len(x) / len(images))
        for x, y in zip(images.chunk(chunks), target.chunk(chunks), strict=True)
    ]
    for loss in reversed(losses) if last_first else losses:
        torch.autograd.backward(loss)
    return torch.stack(losses).detach().sum(), model


def assert_equal(model: nn.Module, reference: nn.Sequential) -> None:
    """Require bitwise equal gradients, parameters and running statistics."""
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    differ = [name for name in expected if not state[name].equal(expected[name])]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        gradient = gradients[name]
        assert parameter.grad is not None
        if gradient is None or not gradient.equal(parameter.grad):
            differ.append(f"{name}.grad")
    assert differ == []


@pytest.mark.parametrize(("schedule", "checkpoint"), [("gpipe", "always"), ("1f1b", "except_last")])
def test_example_model_in_three_stages_equals_the_unsplit_model(
    small: Small, schedule: str, checkpoint: str
) -> None:
    loss, model = unsplit(small, chunks=3, last_first=schedule == "gpipe")
    images, target = small.batch()
    pipe = penstock.Pipe(
        small.model(),
        chunks=3,
        checkpoint=checkpoint,
        stages=3,
        devices=["cpu"] * 3,
        schedule=schedule,
        loss_fn=small.loss,
    )
    result = pipe.step(images, target=target)
    torch.testing.assert_close(result.loss, loss, rtol=1e-14, atol=0)
    assert_equal(pipe, model)


def test_example_model_cut_at_every_other_layer_equals_the_unsplit_model(small: Small) -> None:
    """This includes cuts inside a bottleneck, and before a sum or an in-place ReLU."""
    _, model = unsplit(small, chunks=2, last_first=True)
    images, target = small.batch()
    for cut in range(1, len(model), 2):
        pipe = penstock.Pipe(
            small.model(),
            chunks=2,
            checkpoint="always",
            stages=[cut, len(model) - cut],
            devices=["cpu"] * 2,
            loss_fn=small.loss,
        )
        pipe.step(images, target=target)
        assert_equal(pipe, model)


# ---- the scripts --------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_train_images_script(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train_images.py", "--model", model, "--steps", "2", "--batch", "8", "--chunks", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    train_images.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [["step", str(i), "loss"] for i in (1, 2)]
    assert lines[-1].startswith("bubble of the last step: ")


def test_papers_benchmark_on_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(Path(__file__).parents[2] / "benchmarks" / "papers.py")
    argv = [script, "--cpu", "--models", "unet", "--ranks", "2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(script, run_name="__main__")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| U-Net")]
    assert [row.split(" | ")[2:4] for row in rows] == [["1", "1"], ["2", "4"]]


# ---- captured steps -------------------------------------------------------------------------


def test_example_model_is_captured(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of AmoebaNet-D share lists of functions, which once counted as changed."""
    emulate(monkeypatch)
    images, target = small.batch()
    pipe = penstock.Pipe(
        small.model(),
        chunks=2,
        stages=2,
        devices=["cpu"] * 2,
        loss_fn=small.loss,
        runtime="graph",
    )
    losses = [pipe.step(images, target=target).loss for _ in range(3)]
    assert recordings(pipe) == [2]
    # Batch norm in training: its running averages do not enter the loss.
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-12, atol=1e-12)
