"""A pipe answers what training frameworks ask of a model."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.errors import ArgumentError
from penstock.model.framework_attributes import explain_model_method

CPUS = ["cpu", "cpu"]


class Regression(nn.Module):
    """A model with a config, and with a child called `stages`."""

    accepts_loss_kwargs = True

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.config = {"hidden_size": 4}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for stage in self.stages:
            x = stage(x)
        return x if labels is None else ((x - labels).square().mean(), x)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def merge(self) -> None:
        """Change the layers."""

    @property
    def parts(self) -> int:
        raise RuntimeError("not asked for")


def make_pipe(**options: Any) -> tuple[Regression, Pipe]:
    model = Regression()
    return model, Pipe(model, 2, stages=2, devices=CPUS, example=torch.ones(4, 4), **options)


def make_sequential(**options: Any) -> Pipe:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return Pipe(layers, stages=2, devices=CPUS, **options)


def test_forward_has_the_signature_of_the_model() -> None:
    model, pipe = make_pipe()
    assert inspect.signature(pipe.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(make_sequential().forward).parameters) == [
        "inputs",
        "keyword_inputs",
    ]
    assert "whole batch" in str(pipe.forward.__doc__)


def test_replaced_forward_runs_and_keeps_the_signature() -> None:
    # accelerate puts autocast around `model.forward` in this way.
    _, pipe = make_pipe()
    before = pipe.forward

    class Wrapper:
        __wrapped__ = before

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) + 1

    expected = pipe(torch.ones(4, 4)) + 1
    pipe.forward = Wrapper()
    assert torch.equal(pipe(torch.ones(4, 4)), expected)
    assert list(inspect.signature(pipe.forward).parameters) == ["x", "labels"]


def test_model_attributes_are_those_of_the_model() -> None:
    model, pipe = make_pipe()
    assert pipe.config is model.config
    assert pipe.accepts_loss_kwargs is True
    assert not hasattr(pipe, "generation_config")  # the model has none
    assert not hasattr(make_sequential(), "config")
    assert pipe.num_parameters() == 80  # with which the Trainer counts operations
    vars(pipe)["_topology"] = object()  # as over processes, where the model has some of them only
    assert not hasattr(pipe, "num_parameters")
    assert pipe.accepts_loss_kwargs is True
    assert pipe._get_name() == "Regression"
    assert make_sequential()._get_name() == "Pipe"


def test_pipe_attributes_tell_how_the_model_is_split() -> None:
    pipe = make_sequential(schedule="1f1b")
    assert (pipe.stages, pipe.schedule) == (2, "1f1b")
    assert pipe.devices == (torch.device("cpu"), torch.device("cpu"))
    assert pipe.partition.counts == (2, 1)
    assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)
    assert pipe.half().dtype == torch.float16
    assert pipe.hf_device_map == {"": "cpu"}
    assert pickle.loads(pickle.dumps(pipe)).stages == 2
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = pipe.nothing


def test_method_of_the_model_is_called_on_the_model() -> None:
    _, pipe = make_pipe()
    assert not hasattr(pipe, "merge")
    with pytest.raises(AttributeError, match=r"a method of Regression: write model\.merge\("):
        pipe.merge()
    assert "on a loaded copy" in explain_model_method(pipe, "merge", is_partial=True)
    for name in ("_merge", "merged"):  # nothing is asked of the model
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
            getattr(pipe, name)
    with pytest.raises(AttributeError, match=r"read and write model\.parts"):
        _ = pipe.parts  # a property, whose function is not called


def test_child_with_the_name_of_an_attribute_comes_first() -> None:
    model, pipe = make_pipe()
    assert pipe.stages is model.stages
    assert pipe.get_parameter("stages.0.weight") is model.stages[0].weight


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(device="cpu"),
        lambda pipe: pipe.to(torch.device("cpu"), torch.float32),
        lambda pipe: pipe.to(torch.zeros(1)),
        lambda pipe: pipe.cpu(),
        lambda pipe: nn.Sequential(pipe).to("cpu")[0],
    ],
)
def test_move_that_changes_nothing_is_accepted(move: Any) -> None:
    _, pipe = make_pipe()
    weights = [p.detach().clone() for p in pipe.parameters()]
    assert move(pipe) is pipe
    assert all(torch.equal(p, q) for p, q in zip(pipe.parameters(), weights, strict=True))


def test_n_microbatches_is_another_name_of_chunks() -> None:
    assert make_sequential(n_microbatches=4).chunks == 4
    with pytest.raises(ArgumentError, match="are two names of one number"):
        make_sequential(chunks=2, n_microbatches=4)
    with pytest.raises(ArgumentError, match="must be a positive integer"):
        make_sequential(n_microbatches=0)
