"""Tests that weights may be used in any way under a backward split into I and W.

The gradients are those of an ordinary backward.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.errors import RunError
from penstock.stage import weight_grad
from penstock.stage.cell_graph import accumulate_grads
from penstock.stage.weight_grad import accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from tests.stage.halves import backward, check_deferred_grads, forward, names_of
from tests.support import without_gc


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=bias, dtype=torch.float64)


def given(*shape: int, learns: bool = True) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64, requires_grad=learns)


# ---- unusual uses of a weight -------------------------------------------------------------


class UnknownProduct(torch.autograd.Function):
    """An autograd function of a weight that the deferral does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class RecomputedLinear(torch.autograd.Function):
    """An autograd function that repeats its forward in its backward, with the saved weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = functional.linear(x, weight).tanh()
        return torch.autograd.grad(y, (x, weight), gradient)


class DropsGradient(torch.autograd.Function):
    """An autograd function whose backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None


def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def in_checkpoint(reentrant: bool) -> Callable[..., Any]:
    def compute(m: Any, x: Tensor) -> Any:
        weight = m.weight
        inner = checkpoint(lambda x: (x @ weight).tanh() @ m.weight, x, use_reentrant=reentrant)
        return inner + m(x)

    return compute


def under(hooks: Any) -> Callable[..., Any]:
    def compute(m: Any, x: Tensor) -> Any:
        with hooks():
            y = m(x).tanh()
        return m(y)

    return compute


def changed_under_no_grad(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m.weight.mul_(0.5)
    return m(x)


def replaced_data(m: Any, x: Tensor) -> Any:
    m.weight.data = m.weight.data * 2
    return m(x).tanh() @ m.weight


def another_parameter(m: Any, x: Tensor) -> Any:
    y = m(x)
    m.weight = nn.Parameter(m.weight.detach() * 2)
    return y + m(x)


def initialized(m: Any, x: Tensor) -> Any:
    nn.init.normal_(m.weight)
    return m(x)


def looked_at(m: Any, x: Tensor) -> Any:
    w = m.weight
    assert isinstance(w, nn.Parameter)
    assert isinstance(w, Tensor)
    assert w.grad is None
    assert w.is_leaf
    assert w.grad_fn is None
    assert (w.shape, w.dtype, w.device.type) == ((4, 4), torch.float64, "cpu")
    assert (w.dim(), w.size(0), len(w), w.requires_grad) == (2, 4, 4, True)
    assert type(copy.deepcopy(w)) is nn.Parameter
    assert type(copy.deepcopy(m).weight) is nn.Parameter
    assert torch.equal(w.detach(), m.state_dict()["weight"])
    assert w.data_ptr() == m.state_dict()["weight"].data_ptr()
    return m(x) * w.std().item()


def by_rows(m: Any, x: Tensor) -> Any:
    return torch.vmap(lambda row: functional.linear(row, m.weight).tanh() @ m.weight)(x)


def gradient_of(m: Any, x: Tensor) -> Any:
    loss = lambda weight: functional.linear(x, weight).tanh().sum()  # noqa: E731
    return torch.func.grad(loss)(m.weight) @ x.t() + m(x).sum()


def gradient_beside(m: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda x: functional.linear(x, m.weight).tanh().sum())(x)


def a_call(m: Any, x: Tensor) -> Any:
    doubled = {name: 2 * p for name, p in m.named_parameters()}
    return functional_call(m, dict(m.named_parameters()), x) + functional_call(m, doubled, x)


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "twice": lambda m, x: m(m(x).tanh()),
    "twice, plus its norm": lambda m, x: m(m(x)) + m.weight.norm(),
    "in an autograd function": lambda m, x: UnknownProduct.apply(m(x), m.weight),  # type: ignore[no-untyped-call]
    "in an autograd function that recomputes": lambda m, x: RecomputedLinear.apply(m(x), m.weight),  # type: ignore[no-untyped-call]
    "a view in an autograd function": lambda m, x: UnknownProduct.apply(m(x), m.weight.t()),  # type: ignore[no-untyped-call]
    "checkpoint": in_checkpoint(False),
    "checkpoint, reentrant": in_checkpoint(True),
    "hooks on saved tensors": under(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "saved on the CPU": under(save_on_cpu),
    "changed before its use": changed_under_no_grad,
    "data replaced": replaced_data,
    "metadata read": looked_at,
    "initialized": initialized,
    "returned": lambda m, x: (m(x), m.weight, m.weight.t(), m.weight[1]),
    "in a list": lambda m, x: torch.cat([m.weight, m(x)]),
    "in a dict": lambda m, x: torch.stack(tensors=[m.weight, m.weight]).sum() * m(x),
    "vmap": by_rows,
    "torch.func.grad": gradient_of,
    "torch.func.grad of the input": gradient_beside,
    "functional_call": a_call,
    "scripted": lambda m, x: torch.jit.script(scripted)(x, m.weight) + m(x),
    "no grad": lambda m, x: x * m(x).detach() + torch.no_grad()(m)(x),
    "no gradient arrives": lambda m, x: DropsGradient.apply(m(x)) + x,  # type: ignore[no-untyped-call]
    "no gradient arrives, input detached": lambda m, x: DropsGradient.apply(m(x.data)) + x,  # type: ignore[no-untyped-call]
    "not used": lambda m, x: x * 2,
    "used for nothing": lambda m, x: (m(x), x * 2)[1],
    "output detached": lambda m, x: m(x).detach() + x,
    "in place, after the output": lambda m, x: m(x).add_(x).relu_(),
    "in place, on the sum": lambda m, x: (x * 2).add_(m(x)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
@pytest.mark.parametrize("way", WAYS)
def test_split_backward_with_any_use_of_a_weight(way: str) -> None:
    model = linear()
    check_deferred_grads(model, given(), compute=WAYS[way])
    assert type(model.weight) is nn.Parameter


def test_parameter_replaced_in_the_forward_is_kept() -> None:
    model, reference = linear(), linear()
    before, x = model.weight, given()
    output, pending = forward(model, x, compute=another_parameter)
    backward(output)
    accumulate_weight_grads(pending)
    backward(another_parameter(reference, x.detach()))
    assert model.weight is not before
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight.grad, reference.weight.grad)  # type: ignore[arg-type]


# ---- other types of weights ---------------------------------------------------------------


class Adapted(nn.Module):
    """A LoRA-like layer: a frozen matrix plus two thin trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + functional.linear(functional.linear(x, self.a), self.b)
        return y + functional.linear(x, self.base.weight + self.b @ self.a)


class CustomParameter(nn.Parameter):
    """A subclass of Parameter."""


def with_custom_parameter() -> nn.Module:
    model = linear()
    model.weight = CustomParameter(model.weight.detach())
    return model


class Sparse(nn.Module):
    """A layer with a sparse weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(self.weight, x.t())
        return y


def hooked(register: str) -> nn.Module:
    model = linear()
    getattr(model.weight, register)(lambda tensor: None)
    return model


def with_a_leaf_of_its_own() -> nn.Module:
    model = linear()
    model.other = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    model.register_forward_hook(lambda m, args, output: output @ m.other)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "LoRA": (Adapted, ["a", "b"]),
    "frozen": (lambda: linear(bias=True).requires_grad_(False), []),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), []),
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()), []),
    "orthogonal": (lambda: parametrizations.orthogonal(linear()), []),
    "old weight norm": (lambda: weight_norm(linear()), []),
    "old spectral norm": (lambda: nn.utils.spectral_norm(linear()), []),
    "pruned": (lambda: prune.l1_unstructured(linear(), "weight", 3), []),
    "Parameter subclass": (with_custom_parameter, []),
    "sparse": (Sparse, []),
    "tensor hook": (lambda: hooked("register_hook"), []),
    "post-accumulate-grad hook": (lambda: hooked("register_post_accumulate_grad_hook"), []),
    "unregistered leaf": (with_a_leaf_of_its_own, ["weight"]),
    "in place": (
        lambda: nn.Sequential(linear(True), nn.ReLU(inplace=True), linear(True)),
        ["0.weight", "2.weight"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_split_backward_with_other_types_of_weights(kind: str) -> None:
    make_model, deferred = MODELS[kind]

    def make_copy(model: nn.Module) -> nn.Module:
        reference = make_model()
        reference.load_state_dict(model.state_dict())
        return reference

    torch.manual_seed(0)
    model = make_model()
    assert check_deferred_grads(model, given(), make_copy=make_copy) == deferred
    assert check_deferred_grads(model, given(learns=False), make_copy=make_copy) == deferred


def test_split_backward_of_a_lazy_module() -> None:
    model = nn.LazyLinear(4, dtype=torch.float64)
    x = given()
    output, pending = forward(model, x)
    backward(output)
    accumulate_weight_grads(pending)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    backward(reference(x.detach()))
    assert torch.equal(model.weight.grad, reference.weight.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_scripted_modules_get_their_weight_gradients_in_i() -> None:
    reference = linear(bias=True)
    scripted_layer: Any = torch.jit.script(linear(bias=True))
    model = nn.Sequential(scripted_layer, linear())
    x = given()
    output, pending = forward(model, x)
    assert names_of(model, pending) == ["1.weight"]
    backward(output)
    accumulate_weight_grads(pending)
    backward(linear()(reference(x.detach())))
    assert torch.allclose(scripted_layer.weight.grad, reference.weight.grad, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["wrapped", "in place", "a function"])
def test_split_backward_of_compiled_layers(how: str) -> None:
    inner = nn.Sequential(linear(bias=True), nn.Tanh())
    torch._dynamo.reset()
    if how == "wrapped":
        compiled: Any = torch.compile(inner, backend="aot_eager")
        model = nn.Sequential(compiled, linear())
    elif how == "in place":
        inner.compile(backend="aot_eager")
        model = nn.Sequential(inner, linear())
    else:
        product = torch.compile(lambda x, w: (x @ w).tanh(), backend="aot_eager")
        model = nn.Sequential(linear())
        model.forward = lambda x: product(x, model[0].weight)  # type: ignore[method-assign]
    x = given()
    for _ in range(3):
        model.zero_grad()
        output, pending = forward(model, x)
        backward(output)
        accumulate_weight_grads(pending)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        backward(model(x.detach()))
        expected = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(found) == len(expected) == len(list(model.parameters()))
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


# ---- hooks --------------------------------------------------------------------------------


def hook_on_the_output(m: Any, x: Tensor) -> Any:
    y = m(x)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def hook_on_the_node(m: Any, x: Tensor) -> Any:
    y = m(x)
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    return y


def hook_on_the_input(m: Any, x: Tensor) -> Any:
    x = x * 2
    x.register_hook(lambda gradient: gradient * 3)
    return m(x)


@pytest.mark.parametrize("compute", [hook_on_the_output, hook_on_the_node, hook_on_the_input])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_split_backward_with_hooks_that_change_gradients(
    compute: Any, shape: tuple[int, ...]
) -> None:
    assert check_deferred_grads(linear(bias=True), given(*shape), compute=compute) == ["weight"]


def test_split_backward_with_module_hooks() -> None:
    model = nn.Sequential(linear(bias=True), linear(bias=True))
    before: Any = lambda module, gradients: (gradients[0] * 3,)  # noqa: E731
    after: Any = lambda module, of_inputs, gradients: (of_inputs[0] * 5,)  # noqa: E731
    model[0].register_full_backward_pre_hook(before)
    model[1].register_full_backward_hook(after)
    model[1].register_forward_hook(lambda m, args, output: output * 2)
    assert check_deferred_grads(model, given()) == ["0.weight", "1.weight"]


# ---- errors -------------------------------------------------------------------------------


def test_input_changed_in_place_after_its_use_is_an_error() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = x * 2
        y: Tensor = m(h)
        h.add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(compute(linear(), given()))
    output, pending = forward(linear(), given(), compute=compute)
    backward(output)
    with pytest.raises(RunError, match=r"shape \(3, 4\).*changed in place by a later operation"):
        accumulate_weight_grads(pending)


def test_gradient_changed_in_place_before_w_is_an_error() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient.mul_(2)

    def compute(m: Any, x: Tensor) -> Any:
        beside: Tensor = Careless.apply(x * 2)  # type: ignore[no-untyped-call]
        return beside + m(x)

    output, pending = forward(linear(), given(), compute=compute)
    output.backward(torch.ones_like(output))
    with pytest.raises(RunError, match="changed in place by a later operation"):
        accumulate_weight_grads(pending)


def penalty(m: Any, x: Tensor) -> Any:
    y = m(x).tanh()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.sum() + slope.square().sum()


def slope_of_the_weight(m: Any, x: Tensor) -> Any:
    y: Tensor = m(x)
    (slope,) = torch.autograd.grad(y.sum(), m.weight, create_graph=True, allow_unused=True)
    return y.sum() + slope.sum()


@pytest.mark.parametrize("compute", [penalty, slope_of_the_weight])
def test_autograd_grad_inside_a_forward_is_refused(compute: Any) -> None:
    model = linear()
    with pytest.raises(RunError, match=r"computes gradients in its forward.*1f1b.*checkpoint"):
        forward(model, given(), compute=compute)
    assert type(model.weight) is nn.Parameter


def test_autograd_grad_inside_a_checkpointed_forward_is_exact() -> None:
    def compute(m: Any, x: Tensor) -> Any:
        return checkpoint(penalty, m, x, use_reentrant=False)

    assert check_deferred_grads(linear(), given(), compute=compute) == []


def test_parameters_are_restored_after_an_error_in_the_forward() -> None:
    model = nn.Sequential(linear(), nn.Identity(), linear())
    before = dict(model.named_parameters())
    model[1].register_forward_hook(lambda m, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, given())
    assert all(p is before[name] for name, p in model.named_parameters())


# ---- proxies that outlive their forward ---------------------------------------------------


def test_weight_view_kept_by_a_layer_across_forwards() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = linear().weight
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.kept or [self.weight.t()]
            return x @ self.kept[0]

    model, x = Keeps(), given()
    for _ in range(3):
        output, pending = forward(model, x)
        backward(output)
        accumulate_weight_grads(pending)
    expected = linear()
    for _ in range(3):
        backward(expected(x.detach()))
    assert torch.equal(model.weight.grad, expected.weight.grad)  # type: ignore[arg-type]


def test_module_used_by_two_threads_at_once() -> None:
    """The thread that meets the proxy of the other computes its weight gradients in I.

    After both forwards the module has its parameter again.
    """
    model, x = linear(), given()
    other: list[Any] = []

    def compute(m: Any, x: Tensor) -> Any:
        thread = threading.Thread(target=lambda: other.extend(forward(m, x)))
        thread.start()
        thread.join()
        return m(x)

    output, pending = forward(model, x, compute=compute)
    assert type(model.weight) is nn.Parameter
    assert (len(pending), len(other[1])) == (1, 0)
    for result, deferred in ((output, pending), other):
        backward(result)
        accumulate_weight_grads(deferred)
    expected = linear()
    for _ in range(2):
        backward(expected(x.detach()))
    assert torch.equal(model.weight.grad, expected.weight.grad)  # type: ignore[arg-type]


# ---- memory -------------------------------------------------------------------------------


def test_deferral_does_not_keep_a_weight_alive() -> None:
    with without_gc():
        model, x = linear(), given()
        weight_ref = weakref.ref(model.weight)
        deferral = WeightGradDeferral([model])
        with deferral.activate() as pending:
            output = model(x)
        backward(output)
        accumulate_weight_grads(pending)
        del model, deferral, output
        assert weight_ref() is None
    assert gc.isenabled()


def test_pending_weight_grad_does_not_keep_larger_storage_alive() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear(bias=True)

        def forward(self, x: Tensor) -> Tensor:
            wide = torch.cat([x] * 10, 1)
            return torch.cat([self.inner(wide[:, :4]), wide], 1)

    output, deferred = forward(Narrow(), given())
    backward(output)
    (pending,) = deferred
    for kept in (pending._op_input, pending._output_grad):
        assert kept is not None
        assert kept.untyped_storage().nbytes() == kept.nbytes
    assert check_deferred_grads(Narrow(), given()) == ["inner.weight"]


def test_pending_weight_grad_keeps_only_the_inputs_of_its_operation() -> None:
    model = nn.Embedding(10, 4, dtype=torch.float64)
    output, pending = forward(model, torch.tensor([1, 2]))
    storage_ref = weakref.ref(output.untyped_storage())
    backward(output * 2)
    del output
    assert storage_ref() is None
    accumulate_weight_grads(pending)
    assert model.weight.grad is not None


def test_large_weight_gradients_are_accumulated_in_separate_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of one gradient are accumulated together.

    Each part alone would need as much memory as the whole gradient.
    """
    calls: list[int] = []

    def counted(roots: Any, gradients: Any, retain_graph: bool) -> None:
        calls.append(len(roots))
        accumulate_grads(roots, gradients, retain_graph)

    monkeypatch.setattr(weight_grad, "accumulate_grads", counted)
    monkeypatch.setattr(weight_grad, "_MAX_BATCHED_ELEMENTS_ON_CPU", 20)
    model = nn.Sequential(*(linear() for _ in range(5)))
    assert len(check_deferred_grads(model, given())) == 5
    assert calls == [2, 2, 1]
    calls.clear()
    parts = lambda m, x: [functional.linear(x, part) for part in m.weight.chunk(4)]  # noqa: E731
    monkeypatch.setattr(weight_grad, "_MAX_BATCHED_ELEMENTS_ON_CPU", 1)
    check_deferred_grads(linear(), given(), compute=parts)
    assert calls == [4]


def test_weight_part_used_twice_with_separate_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward must not free what the second one needs."""
    monkeypatch.setattr(weight_grad, "_MAX_BATCHED_ELEMENTS_ON_CPU", 1)

    def compute(m: Any, x: Tensor) -> Any:
        part = m[0].weight[torch.tensor([1, 0, 1, 2])]
        return x @ part @ m[1].weight @ part

    model = nn.Sequential(linear(), linear())
    assert check_deferred_grads(model, given(), compute=compute) == ["0.weight", "1.weight"]
