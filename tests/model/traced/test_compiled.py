"""Tests that separately compiled blocks run compiled, inside and outside a pipe."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError
from tests.model.traced.splitting import assert_same, batches, piped

# The warnings come from PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(self.inner(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_compiled_blocks_stay_compiled_after_tracing() -> None:
    """If the compiler saw the dry run, it would never compile the blocks again."""
    runs: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs["compiled"] += 1
            return graph(*args)

        return run

    model = Stack().double()
    for block in model.blocks:
        block.compile(backend=backend, dynamic=False)
    (x,) = batches(5)
    pipe = piped(model, x, stages=3)
    assert not runs
    with torch.no_grad():
        pipe(x)
    assert runs["compiled"] == 3 * 2


class Scripted(Stack):
    """A model with TorchScript blocks, whose parameters are not in a Python dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_scripted(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))


def _scripted(block: nn.Module, count: int = 4) -> list[nn.Module]:
    return [torch.jit.script(copy.deepcopy(block)) for _ in range(count)]


def test_scripted_blocks_in_a_traced_model() -> None:
    """Preserving their state raised an AttributeError."""
    assert_same(Scripted)


class CompiledForward(Stack):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("decorated", [True, False])
def test_compiled_forward_of_a_model_that_is_cut(decorated: bool) -> None:
    """The stages ran the compiled forward, which calls no units."""
    model = CompiledForward() if decorated else Stack()
    (x,) = batches(5)
    with torch.no_grad():
        expected = Stack.forward(model.double(), x)
        if not decorated:
            model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
        torch.testing.assert_close(piped(model, x, stages=3)(x), expected, rtol=0, atol=1e-12)


class AsksCompiler(Stack):
    """A model that skips an operation while something is compiled, as the masks of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x = x * (x == x)
        return super().forward(x)


def test_error_names_the_compiler_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one flag for all threads, so a step may fail while another stage compiles."""
    model = AsksCompiler().double()
    (x,) = batches(5)
    pipe = piped(model, x, stages=3)
    pipe(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(CutError, match=r"Another thread compiles .* runtime='inline'"):
        pipe(x)
    monkeypatch.undo()
    assert torch.equal(pipe(x), model(x))
