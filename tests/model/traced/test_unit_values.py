"""Tests of what a unit hands to the forward around it besides tensors that depend on data.

Stages that do not run the unit go on with what the trace has: structure, numbers, None, metadata.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe
from tests.models.architecture import squares


class Deciding(nn.Module):
    """A unit that makes its output from a tensor, a decision about its input, and the input."""

    def __init__(self, make: Callable[[Tensor, bool, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor, info: Any = None) -> Any:
        is_large = bool(x.detach().abs().max() > 1)
        if info is not None:
            info["large"] = is_large
        return self.make(self.linear(x), is_large, x)


class Model(nn.Module):
    """A model with a deciding unit, whose output is used around the units."""

    def __init__(self, make: Any, use: Any, at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.use, self.at = nn.Linear(4, 4), use, at
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[at] = Deciding(make)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = self.use(block(x)) if index == self.at else block(x)
        return x


SMALL = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double() * 1e-3
LARGE = SMALL * 1e6


def _pipe(model: nn.Module, stages: int = 4, **options: Any) -> Pipe:
    devices = ["cpu"] * stages
    options = {"runtime": "inline", "balance": "parameters", "example": SMALL, **options}
    return Pipe(model, stages=stages, devices=devices, **options)


def _assert_equal_on(pipe: Pipe, model: nn.Module, unsplit: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    unsplit.zero_grad()
    expected = squares(unsplit(x))
    expected.backward()
    torch.testing.assert_close(pipe.step(x, loss_fn=squares).loss, expected, rtol=1e-10, atol=0)
    for mine, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=0)


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


def _scale(result: Any) -> Any:
    return result[0] * result[1]


def _pick(pairs: Any) -> tuple[Any, Any]:
    """Return a unit that returns one of two values, and a use of it that branches."""
    small, large = pairs
    return (
        lambda y, is_large, x: (y, large if is_large else small),
        lambda result: result[0] * 2 if result[1] == large else result[0],
    )


OUTPUTS: dict[str, tuple[Any, Any]] = {
    "float": (lambda y, is_large, x: (y, 1.0 + is_large), _scale),
    "int": (lambda y, is_large, x: (y, 1 + is_large), _scale),
    "bool": _pick((False, True)),
    "string": _pick(("small", "large")),
    "enum": _pick((Size.SMALL, Size.LARGE)),
    "1 or True": (
        lambda y, is_large, x: (y, True if is_large else 1),
        lambda result: result[0] * 2 if result[1] is True else result[0],
    ),
    "object": (
        lambda y, is_large, x: (y, SimpleNamespace(factor=1 + is_large)),
        lambda result: result[0] * result[1].factor,
    ),
    "tensor or None": (
        lambda y, is_large, x: (y, None if is_large else x),
        lambda result: result[0] + (0 if result[1] is None else result[1]),
    ),
    "None or tensor": (
        lambda y, is_large, x: (y, x if is_large else None),
        lambda result: result[0] + (0 if result[1] is None else result[1]),
    ),
    "key of a dict": (
        lambda y, is_large, x: {"y": y, **({"x": x} if is_large else {})},
        lambda result: result["y"] + result.get("x", 0),
    ),
    "length of a tuple": (lambda y, is_large, x: (y, x) if is_large else (y,), sum),
    "list or tuple": (
        lambda y, is_large, x: [y, x] if is_large else (y, x),
        lambda result: result[0] * 2 if isinstance(result, list) else result[0],
    ),
    "number in a list": (
        lambda y, is_large, x: (y, [1, 1 + is_large]),
        lambda result: result[0] * result[1][1],
    ),
    "tensor or tuple": (
        lambda y, is_large, x: (y, x) if is_large else y,
        lambda result: result if isinstance(result, Tensor) else sum(result),
    ),
    "None alone": (
        lambda y, is_large, x: None if is_large else y,
        lambda result: torch.ones(4, 4).double() if result is None else result,
    ),
    "shape": (
        lambda y, is_large, x: (y, x.detach()[: 1 + is_large]),
        lambda result: result[0] * len(result[1]),
    ),
    "number of dims": (
        lambda y, is_large, x: (y, x.detach() if is_large else x.detach().flatten()),
        lambda result: result[0] * result[1].dim(),
    ),
    "dtype": (
        lambda y, is_large, x: (y, x.detach().float() if is_large else x.detach()),
        lambda result: result[0] * (2 if result[1].dtype == torch.float32 else 1),
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_output_of_a_unit_that_other_stages_would_take_from_the_trace_is_refused(kind: str) -> None:
    model = Model(*OUTPUTS[kind])
    unsplit = copy.deepcopy(model)
    pipe = _pipe(model)
    _assert_equal_on(pipe, model, unsplit, SMALL)
    with pytest.raises(CutError, match=r"unit 'blocks\.0' returned .*, but the trace has"):
        pipe.step(LARGE, loss_fn=squares)


@pytest.mark.parametrize("kind", ["float", "object", "tensor or None", "key of a dict"])
def test_output_of_a_unit_may_differ_where_only_its_own_stage_uses_it(kind: str) -> None:
    model = Model(*OUTPUTS[kind], at=2)
    unsplit = copy.deepcopy(model)
    pipe = _pipe(model)
    for x in (SMALL, LARGE):
        _assert_equal_on(pipe, model, unsplit, x)


def test_error_says_what_the_unit_returned() -> None:
    pipe = _pipe(Model(*OUTPUTS["float"]))
    with pytest.raises(CutError, match=r"returned \(tensor, 2\.0\), but .* \(tensor, 1\.0\) for"):
        pipe.step(LARGE, loss_fn=squares)


def test_nan_in_the_output_of_a_unit_is_equal_to_itself() -> None:
    model = Model(lambda y, is_large, x: (y, float("nan")), lambda result: result[0])
    _assert_equal_on(_pipe(model), model, copy.deepcopy(model), LARGE)


# ---- arguments that come back -------------------------------------------------------------------


def _skip(y: Tensor, is_large: bool, x: Tensor) -> Tensor:
    return x if is_large else y


@pytest.mark.parametrize("first", [SMALL, LARGE], ids=["layer first", "skipped first"])
def test_unit_that_returns_its_input_for_some_data(first: Tensor) -> None:
    """Stages after it went on with the unit's input, if the dry run had skipped the layer."""
    model = Model(_skip, lambda y: y)
    unsplit = copy.deepcopy(model)
    pipe = _pipe(model)
    for x in (first, SMALL, LARGE):
        _assert_equal_on(pipe, model, unsplit, x)


def test_unit_that_returns_its_input_for_some_data_before_a_change_in_place() -> None:
    class Adding(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.blocks[0](h)
            y += 1
            return self.blocks[2](self.blocks[1](y)) + h  # type: ignore[no-any-return]

    model = Adding(_skip, None)
    pipe = _pipe(model)
    _assert_equal_on(pipe, model, copy.deepcopy(model), SMALL)
    with pytest.raises(CutError, match="returned one of its arguments or a view of it, but the"):
        pipe.step(LARGE, loss_fn=squares)


# ---- containers and attributes -------------------------------------------------------------------


class Informed(Model):
    """A model whose unit writes a decision into a dict that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        info: dict[str, Any] = {}
        x = self.blocks[0](self.first(x), info)
        x = x * (2 if info["large"] else 1)
        return self.blocks[2](self.blocks[1](x))  # type: ignore[no-any-return]


def test_number_that_a_unit_puts_into_a_dict_of_its_caller_is_refused() -> None:
    model = Informed(lambda y, is_large, x: y, None)
    pipe = _pipe(model)
    _assert_equal_on(pipe, model, copy.deepcopy(model), SMALL)
    with pytest.raises(CutError, match=r"unit 'blocks\.0' returned .*, but the trace has"):
        pipe.step(LARGE, loss_fn=squares)


class Flagged(nn.Module):
    """A unit that leaves a decision about its input in an attribute, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.flag: Any = False
        self.log: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        is_large = bool(x.detach().abs().max() > 1)
        if self.way == "attribute":
            self.flag = is_large
        elif self.way == "inner":
            self.inner.flag = is_large  # type: ignore[assignment]
        elif is_large:
            self.log.append(is_large)
        return self.inner(x)  # type: ignore[no-any-return]

    def is_flagged(self) -> bool:
        if self.way == "inner":
            return bool(getattr(self.inner, "flag", False))
        return bool(self.flag or self.log)


class Asking(nn.Module):
    """A model that asks its unit what it has left there."""

    def __init__(self, way: str, at: int, is_before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[at] = Flagged(way)
        self.at, self.is_before = at, is_before
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        asked: Any = self.blocks[self.at]
        factor = 1 + asked.is_flagged() if self.is_before else 1
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.at and not self.is_before:
                factor = 1 + asked.is_flagged()
            x = x * factor
        return x


@pytest.mark.parametrize("is_before", [False, True], ids=["after the call", "before the call"])
@pytest.mark.parametrize(("way", "name"), [("attribute", "flag"), ("container", "log")])
def test_attribute_that_a_unit_sets_and_the_forward_reads_is_refused(
    way: str, name: str, is_before: bool
) -> None:
    """Other stages found what another micro-batch had left."""
    model = Asking(way, 2 if is_before else 0, is_before)
    pipe = _pipe(model, stages=3)
    _assert_equal_on(pipe, model, copy.deepcopy(model), SMALL)
    with pytest.raises(CutError, match=rf"changes its attribute '{name}' from (False|\[\])"):
        pipe.step(LARGE, loss_fn=squares)


def test_attribute_of_a_module_inside_a_unit_that_the_forward_reads_is_refused() -> None:
    model = Asking("inner", 0, False)
    model.blocks[0].inner.flag = False  # type: ignore[union-attr]
    pipe = _pipe(model, stages=3)
    with pytest.raises(CutError, match=r"changes its attribute 'inner\.flag' from False to True"):
        pipe.step(LARGE, loss_fn=squares)


@pytest.mark.parametrize("way", ["attribute", "container"])
def test_attribute_of_a_unit_may_change_where_only_its_own_stage_reads_it(way: str) -> None:
    model = Asking(way, 2, False)
    unsplit = copy.deepcopy(model)
    pipe = _pipe(model, stages=3, checkpoint="never")
    for x in (SMALL, LARGE, SMALL):
        _assert_equal_on(pipe, model, unsplit, x)


def test_attribute_of_a_unit_may_be_changed_between_steps() -> None:
    model = Asking("none", 0, False)
    unsplit = copy.deepcopy(model)
    pipe = _pipe(model, stages=3)
    for flag in (False, True):
        model.blocks[0].flag = unsplit.blocks[0].flag = flag  # type: ignore[assignment]
        _assert_equal_on(pipe, model, unsplit, SMALL)
