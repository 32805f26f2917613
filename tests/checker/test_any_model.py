"""Tests of `penstock.check` for models that are not a Sequential.

They have keyword inputs, compute their own loss, or draw random numbers between units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import CutError, Report
from penstock.checker.report import Refused

WAYS: dict[str, Any] = {
    "stages": 3,
    "chunks": 3,
    "schedules": ["1f1b", "zb-h1"],
    "runtimes": ["inline"],
    "quiet": True,
}


def checked(model: nn.Module, *inputs: Any, **options: Any) -> Report:
    return penstock.check(model, *inputs, **{**WAYS, **options})


class Net(nn.Module):
    """A model that draws between units, ties its ends, and returns a loss if it gets labels."""

    def __init__(self, chance: float = 0.3) -> None:
        super().__init__()
        self.chance = chance
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        first = x = functional.dropout(self.embed(ids), self.chance, self.training)
        for block in self.blocks:
            x = functional.dropout(torch.tanh(block(x)), self.chance, self.training)
        # This dropout runs on another stage than the unit that produced its input.
        x = x * scale + functional.dropout(first, self.chance, self.training)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


IDS = torch.arange(35).reshape(7, 5) % 12


IGNORED = IDS.clone()
IGNORED[0] = -100
IGNORED[3, 2:] = -100


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("chance", "inputs", "options"),
    [
        (0.3, {"ids": IDS, "labels": IDS}, {}),  # the loss is inside the model
        (0.0, {"ids": IDS}, {"scale": 2.0, "labels": IGNORED}),
        (0.3, {"ids": IDS, "labels": IGNORED}, {}),
        (0.3, IDS, {"target": IDS, "loss_fn": cross_entropy}),
        (0.3, IDS, {}),  # no loss
        (0.0, {"ids": IDS, "labels": IDS}, {"units": nn.Linear, "stages": 2}),
    ],
)
def test_check_of_a_traced_model(chance: float, inputs: Any, options: dict[str, Any]) -> None:
    report = checked(Net(chance), inputs, **options)
    assert report.ok, str(report)
    assert "units; 7 rows" in report.model


def test_check_of_a_unit_that_runs_on_two_stages() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))

        def forward(self, x: Tensor) -> Any:
            return self.one(self.two(self.one(x)))

    report = checked(Twice(), torch.randn(6, 6), stages=[1, 1, 1])
    assert report.ok, str(report)


def test_check_names_the_line_that_prevents_a_cut() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
                x = x if x.mean() > 0 else -x
            return x

    with pytest.raises(
        CutError, match=r"test_any_model\.py:\d+, in forward, __bool__ reads a value"
    ):
        checked(Decides(), torch.randn(6, 6))


@pytest.fixture
def wrong_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stage change the values that it sends."""
    from penstock.model.traced.stage_forward import StageForward

    computed = StageForward.__call__

    def losing(self: StageForward, arrived: Any) -> Any:
        found = computed(self, arrived)
        return {
            dst: tuple(v * 1.001 if isinstance(v, Tensor) else v for v in values)
            for dst, values in found.items()
        }

    monkeypatch.setattr(StageForward, "__call__", losing)


@pytest.mark.usefixtures("wrong_stages")
def test_check_finds_a_stage_with_wrong_values() -> None:
    report = checked(Net(0.0), {"ids": IDS, "labels": IDS}, schedules=["1f1b"])
    assert not report.ok


@pytest.mark.usefixtures("wrong_stages")
def test_check_blames_the_pipe_if_a_model_draws_in_eval_mode_too() -> None:
    report = penstock.check(Autoencoder(), torch.randn(4, 6), stages=2, quick=True, quiet=True)
    assert not report.ok
    assert any("the pipe is wrong" in hint for hint in report.hints), report.hints


def test_check_refuses_only_the_schedules_that_do_not_fit() -> None:
    report = checked(Net(0.0), {"ids": IDS, "labels": IDS}, schedules=["1f1b", "zb-v"])
    assert [type(run.result) is Refused for run in report.rows] == [False, False, True, True]
    assert report.ok


# ---- random numbers between units --------------------------------------------------------------


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


class Autoencoder(nn.Module):
    """A variational autoencoder: it draws between encoder and decoder, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([block(), block()])
        self.mean, self.scale = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decoder = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = x
        for layer in self.encoder:
            h = layer(h)
        mean, scale = self.mean(h), self.scale(h).exp()
        h = mean + scale * torch.randn_like(mean)
        for layer in self.decoder:
            h = layer(h)
        return {"loss": (h - x).square().mean() + scale.mean(), "output": h}


class Blocks(nn.Module):
    """Blocks, and a way to draw numbers before, between or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(4)])


class Diffusion(Blocks):
    """A diffusion model: times and noise come before the first block, the noise counts at the end.

    It returns its loss, so the reference runs the model while it asks the pipe for its targets.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        times = torch.randint(1, 10, (len(x), 1)).to(x) / 10
        noise = torch.randn_like(x)
        h = x * times + noise * (1 - times)
        for layer in self.blocks:
            h = layer(h)
        return h, functional.mse_loss(h, noise)


class Gumbel(Blocks):
    """A model with a random choice after each block."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + functional.gumbel_softmax(layer(x), tau=0.7)
        return x


class UnusedLayerDrop(Blocks):
    """The layer drop of transformers, switched off: it draws for each block, whatever follows."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.blocks:
            chance = torch.rand([])
            if self.training and chance < 0.0:
                continue
            x = functional.dropout(layer(x), 0.2, self.training)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("kind", [Autoencoder, Diffusion, Gumbel, UnusedLayerDrop])
def test_check_of_models_that_draw_between_units(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    report = penstock.check(kind(), torch.randn(7, 6), stages=3, quick=True, quiet=True)
    assert report.ok, str(report)


# ---- arguments and outputs ---------------------------------------------------------------------


class Masked(Blocks):
    """A model with two inputs, whose output has rows on dim 1 as well."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.blocks:
            x = layer(x) * mask
        return x, x.T[:, :, None].expand(6, -1, 2)


def test_check_takes_a_tuple_of_inputs_and_says_which_loss_it_used() -> None:
    report = checked(Masked(), (torch.rand(8, 6), torch.rand(8, 1)), schedules=["1f1b"])
    assert report.ok, str(report)
    assert report.loss.startswith("a stand-in, the mean over all outputs that have rows")


class Logits(Blocks):
    """A model that returns (logits, loss), as nanoGPT does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.blocks:
            x = layer(x)
        return x, x.square().mean()


def test_check_takes_the_loss_that_a_model_returns_after_its_logits() -> None:
    report = penstock.check(Logits(), torch.rand(8, 6), quick=True, quiet=True)
    assert report.ok
    assert report.loss == "the one that the model returns"
    assert "not tried: all other schedules" in str(report)
    assert [str(run.case) for run in report.rows] == [
        "1f1b, checkpoint always, threads",
        "zb-h1, checkpoint never, inline",
    ]
