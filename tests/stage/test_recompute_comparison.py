"""Every recomputation is compared with its forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, RunError
from penstock.stage.recompute import RepeatCheck, compute_product, multiply_by_fixed_vector
from penstock.stage.stage import Stage
from tests.support import Do, each_door, each_runtime

COUNT = {"calls": 0}


def closure() -> Callable[[], int]:
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick


def numbers() -> Iterator[int]:
    yield from itertools.count(1)


def generator() -> Callable[[], int]:
    source = numbers()
    return lambda: next(source)


def function_attribute() -> Callable[[], int]:
    def tick() -> int:
        tick.calls = getattr(tick, "calls", 0) + 1  # type: ignore[attr-defined]
        return int(tick.calls)  # type: ignore[attr-defined]

    return tick


def count_globally() -> int:
    COUNT["calls"] += 1
    return COUNT["calls"]


def global_dict() -> Callable[[], int]:
    COUNT["calls"] = 0
    return count_globally


TICKS = [closure, generator, function_attribute, global_dict]


@each_runtime
@each_door
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("make_tick", TICKS)
def test_state_that_is_not_put_back_is_refused_when_it_makes_a_difference(
    make_tick: Callable[[], Callable[[], int]], last: bool, door: str, runtime: str
) -> None:
    """Only the first recomputation of a stage was compared, and later gradients were wrong."""
    tick = make_tick()
    warm = Do(lambda x: x * max(1, tick() - 22))
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(2 if last else 1, warm)  # type: ignore[arg-type]
    pipe = Pipe(
        nn.Sequential(*layers),
        2,
        "always",
        stages=[1, 2] if last else [2, 1],
        devices=["cpu"] * 2,
        runtime=runtime,
        schedule="1f1b",
        loss_fn=torch.mean,
        audit="first",
    )
    stage = "stage 1" if last else "stage 0"

    def train() -> None:
        x = torch.ones(4, 4)
        for _ in range(9):
            pipe.step(x) if door == "step" else pipe(x).sum().backward()

    found_by_audit = "changes .*, and computes something else once it|advances an iterator"
    found_later = f"recomputation of {stage} .* for micro-batch [01] than"
    with pytest.raises(RunError, match=f"{found_by_audit}|{found_later}"):
        train()


class Scale(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.factor
        return result


@pytest.mark.parametrize("audit", ["first", "off"])
def test_attribute_that_changes_between_the_call_and_its_backward_is_refused(audit: str) -> None:
    layer = Scale()
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), layer), 2, stages=2, audit=audit)
    pipe(torch.ones(4, 4)).sum().backward()
    loss = pipe(torch.ones(4, 4)).sum()
    layer.factor = 5.0
    if audit == "off":  # only the first call is compared
        loss.backward()
        return
    with pytest.raises(RunError, match=r"stage 1 .* an attribute that was set after pipe\(x\)"):
        loss.backward()


# ---- outputs of every kind ---------------------------------------------------------------------

VALUES: dict[str, tuple[Tensor, Tensor | None]] = {  # an output, and another one
    "float64": (torch.arange(6.0).double(), torch.arange(6.0).double() * (1 + 1e-7)),
    "float32": (torch.arange(6.0), torch.arange(6.0) * 1.01),
    "bfloat16": (torch.arange(6.0).bfloat16(), torch.arange(6.0).bfloat16() * 2),
    "complex": (torch.arange(6.0) * 1j, torch.arange(6.0) * 1.01j),
    "integer": (torch.arange(600), torch.arange(600).roll(1)),
    "boolean": (torch.ones(600, dtype=torch.bool), torch.arange(600) > 0),
    "rows that change places": (torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2).flip(0)),
    "layer norm": (torch.tensor([[-1.0, 1.0]] * 4), torch.tensor([[1.0, -1.0]] * 4)),
    "transposed": (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(3, 2)),
    "long": (
        torch.ones(200_001),
        torch.ones(200_001).index_fill(0, torch.tensor([9, 150_001]), 99.0),
    ),
    "long half": (torch.ones(70_000).half(), torch.zeros(70_000).half()),
    "not a number": (torch.full((3,), torch.nan), torch.ones(3)),
    "infinite": (torch.tensor([torch.inf, 1.0]), torch.ones(2)),
    "empty": (torch.empty(0, 3), None),
    "sparse": (torch.eye(3).to_sparse(), None),
    "meta": (torch.empty(3, device="meta"), None),
}


def compare(first: Tensor, second: Tensor) -> None:
    check = RepeatCheck(Stage(0, ("0",), (), lambda _: {}, ("Linear",)), has_low_precision=False)
    check.compare(1, [compute_product(first)], [second])
    check.finish()


@pytest.mark.parametrize("kind", VALUES)
def test_outputs_of_each_kind_are_compared(kind: str) -> None:
    value, other = VALUES[kind]
    compare(value, value.clone())
    if other is not None:
        for pair in ((value, other), (other, value)):
            with pytest.raises(RunError, match=r"stage 0 \(layer 0: Linear\) gave another output"):
                compare(*pair)


@pytest.mark.parametrize("size", [100, 10_000])  # the small one is compared by its bytes
def test_rounding_is_no_difference(size: int) -> None:
    compare(torch.ones(size), torch.ones(size) + 1e-6 * torch.randn(size))
    compare(torch.ones(size).bfloat16(), torch.ones(size).bfloat16() * 1.01)


def test_small_outputs_of_other_strides_and_sizes_are_compared() -> None:
    """The bytes of one output are compared with the product of another one."""
    square = torch.arange(16.0).view(4, 4)
    compare(square, square.t().contiguous().t())
    compare(square.t(), square.t().contiguous())
    for pair in ((square, square.t()), (square.t(), square), (torch.ones(4), torch.ones(2000))):
        with pytest.raises(RunError, match="gave another output"):
            compare(*pair)


def test_small_outputs_of_other_dtypes_and_layouts_are_compared_by_their_numbers() -> None:
    """The bytes of the forward were read in the dtype of the recomputation."""
    halves = torch.tensor([1.0, 2.0, -0.5]).half()
    for output in (halves, halves.float()):
        compare(output, halves.bfloat16())
        with pytest.raises(RunError, match="gave another output"):
            compare(output, 3 * halves.bfloat16())
    compare(torch.eye(3), torch.eye(3).to_sparse())  # which is not compared


def test_numbers_on_a_device_are_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator nothing is read while the lanes run."""
    check = RepeatCheck(Stage(3, ("0",), (), lambda _: {}, ("Linear",)), has_low_precision=False)

    def compute_on_device(tensor: Tensor) -> Tensor:
        return multiply_by_fixed_vector(tensor.flatten())

    monkeypatch.setattr("penstock.stage.recompute.compute_product", compute_on_device)
    for factor in (1.0, 3.0):
        check.compare(2, [compute_on_device(torch.ones(4))], [torch.ones(4) * factor])
    with pytest.raises(RunError, match=r"stage 3 .* for micro-batch 2"):
        check.finish()
    check.finish()
