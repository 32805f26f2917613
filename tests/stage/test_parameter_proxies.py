"""Layers that do with their weights what they like: their gradients are the same in two halves."""

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
from penstock.stage import weight_grad as later_of
from penstock.stage.cell_graph import accumulate_grads
from penstock.stage.weight_grad import accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from tests.stage.halves import backward, forward, names_of, put_off
from tests.support import without_gc


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=bias, dtype=torch.float64)


def given(*shape: int, learns: bool = True) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64, requires_grad=learns)


# ---- the weight is used in other ways, too ------------------------------------------------


class Scaled(torch.autograd.Function):
    """A function of a weight that no table knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Anew(torch.autograd.Function):
    """Computes its forward again in its backward, with the weight it was given."""

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


class Swallows(torch.autograd.Function):
    """Gives no gradient."""

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
    "twice, and its norm": lambda m, x: m(m(x)) + m.weight.norm(),
    "beside a function": lambda m, x: Scaled.apply(m(x), m.weight),  # type: ignore[no-untyped-call]
    "a function that repeats": lambda m, x: Anew.apply(m(x), m.weight),  # type: ignore[no-untyped-call]
    "a view, a function": lambda m, x: Scaled.apply(m(x), m.weight.t()),  # type: ignore[no-untyped-call]
    "checkpoint": in_checkpoint(False),
    "checkpoint, reentrant": in_checkpoint(True),
    "hooks on saved tensors": under(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "saved on the CPU": under(save_on_cpu),
    "changed before its use": changed_under_no_grad,
    "data of its own": replaced_data,
    "looked at": looked_at,
    "initialized": initialized,
    "given out": lambda m, x: (m(x), m.weight, m.weight.t(), m.weight[1]),
    "in a list": lambda m, x: torch.cat([m.weight, m(x)]),
    "in a dict": lambda m, x: torch.stack(tensors=[m.weight, m.weight]).sum() * m(x),
    "vmap": by_rows,
    "torch.func.grad": gradient_of,
    "torch.func.grad beside": gradient_beside,
    "functional_call": a_call,
    "scripted": lambda m, x: torch.jit.script(scripted)(x, m.weight) + m(x),
    "no grad": lambda m, x: x * m(x).detach() + torch.no_grad()(m)(x),
    "no gradient comes": lambda m, x: Swallows.apply(m(x)) + x,  # type: ignore[no-untyped-call]
    "none comes, nor learns x": lambda m, x: Swallows.apply(m(x.data)) + x,  # type: ignore[no-untyped-call]
    "not used": lambda m, x: x * 2,
    "used for nothing": lambda m, x: (m(x), x * 2)[1],
    "output thrown away": lambda m, x: m(x).detach() + x,
    "in place, after the output": lambda m, x: m(x).add_(x).relu_(),
    "in place, on the sum": lambda m, x: (x * 2).add_(m(x)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
@pytest.mark.parametrize("way", WAYS)
def test_any_use_of_a_weight_is_exact(way: str) -> None:
    model = linear()
    put_off(model, given(), compute=WAYS[way])
    assert type(model.weight) is nn.Parameter


def test_a_parameter_that_is_replaced_in_the_forward_stays() -> None:
    model, twin = linear(), linear()
    before, x = model.weight, given()
    output, later = forward(model, x, compute=another_parameter)
    backward(output)
    accumulate_weight_grads(later)
    backward(another_parameter(twin, x.detach()))
    assert model.weight is not before
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight.grad, twin.weight.grad)  # type: ignore[arg-type]


# ---- other kinds of weights ---------------------------------------------------------------


class Adapted(nn.Module):
    """Like LoRA: a frozen matrix, and two thin ones that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + functional.linear(functional.linear(x, self.a), self.b)
        return y + functional.linear(x, self.base.weight + self.b @ self.a)


class Mine(nn.Parameter):
    """A parameter of a kind of its own."""


def of_my_kind() -> nn.Module:
    model = linear()
    model.weight = Mine(model.weight.detach())
    return model


class Sparse(nn.Module):
    """Learns by a sparse matrix."""

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
    "a kind of its own": (of_my_kind, []),
    "sparse": (Sparse, []),
    "a hook": (lambda: hooked("register_hook"), []),
    "a hook after": (lambda: hooked("register_post_accumulate_grad_hook"), []),
    "a leaf of its own": (with_a_leaf_of_its_own, ["weight"]),
    "in place": (
        lambda: nn.Sequential(linear(True), nn.ReLU(inplace=True), linear(True)),
        ["0.weight", "2.weight"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_other_kinds_of_weights_are_exact(kind: str) -> None:
    made, waits = MODELS[kind]

    def copied(model: nn.Module) -> nn.Module:
        twin = made()
        twin.load_state_dict(model.state_dict())
        return twin

    torch.manual_seed(0)
    model = made()
    assert put_off(model, given(), copied=copied) == waits
    assert put_off(model, given(learns=False), copied=copied) == waits


def test_a_module_that_is_initialized_in_its_forward() -> None:
    model = nn.LazyLinear(4, dtype=torch.float64)
    x = given()
    output, later = forward(model, x)
    backward(output)
    accumulate_weight_grads(later)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin(x.detach()))
    assert torch.equal(model.weight.grad, twin.weight.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_scripted_modules_learn_in_i() -> None:
    made = linear(bias=True)
    inside: Any = torch.jit.script(linear(bias=True))
    model = nn.Sequential(inside, linear())
    x = given()
    output, later = forward(model, x)
    assert names_of(model, later) == ["1.weight"]
    backward(output)
    accumulate_weight_grads(later)
    backward(linear()(made(x.detach())))
    assert torch.allclose(inside.weight.grad, made.weight.grad, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["wrapped", "in place", "a function"])
def test_compiled_layers_are_exact(how: str) -> None:
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
        output, later = forward(model, x)
        backward(output)
        accumulate_weight_grads(later)
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
def test_hooks_that_change_gradients(compute: Any, shape: tuple[int, ...]) -> None:
    assert put_off(linear(bias=True), given(*shape), compute=compute) == ["weight"]


def test_hooks_of_modules() -> None:
    model = nn.Sequential(linear(bias=True), linear(bias=True))
    before: Any = lambda module, gradients: (gradients[0] * 3,)  # noqa: E731
    after: Any = lambda module, of_inputs, gradients: (of_inputs[0] * 5,)  # noqa: E731
    model[0].register_full_backward_pre_hook(before)
    model[1].register_full_backward_hook(after)
    model[1].register_forward_hook(lambda m, args, output: output * 2)
    assert put_off(model, given()) == ["0.weight", "1.weight"]


# ---- what must fail -----------------------------------------------------------------------


def test_an_input_that_is_changed_after_its_use_is_an_error_as_ever() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = x * 2
        y: Tensor = m(h)
        h.add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(compute(linear(), given()))
    output, later = forward(linear(), given(), compute=compute)
    backward(output)
    with pytest.raises(RunError, match=r"shape \(3, 4\).*changed in place by a later operation"):
        accumulate_weight_grads(later)


def test_a_gradient_that_is_changed_in_place_is_noticed() -> None:
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

    output, later = forward(linear(), given(), compute=compute)
    output.backward(torch.ones_like(output))
    with pytest.raises(RunError, match="changed in place by a later operation"):
        accumulate_weight_grads(later)


def penalty(m: Any, x: Tensor) -> Any:
    y = m(x).tanh()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.sum() + slope.square().sum()


def slope_of_the_weight(m: Any, x: Tensor) -> Any:
    y: Tensor = m(x)
    (slope,) = torch.autograd.grad(y.sum(), m.weight, create_graph=True, allow_unused=True)
    return y.sum() + slope.sum()


@pytest.mark.parametrize("compute", [penalty, slope_of_the_weight])
def test_gradients_that_a_forward_asks_for_are_refused(compute: Any) -> None:
    model = linear()
    with pytest.raises(RunError, match=r"computes gradients in its forward.*1f1b.*checkpoint"):
        forward(model, given(), compute=compute)
    assert type(model.weight) is nn.Parameter


def test_gradients_in_a_forward_under_checkpoint_are_exact() -> None:
    def compute(m: Any, x: Tensor) -> Any:
        return checkpoint(penalty, m, x, use_reentrant=False)

    assert put_off(linear(), given(), compute=compute) == []


def test_after_an_error_the_parameters_are_back() -> None:
    model = nn.Sequential(linear(), nn.Identity(), linear())
    before = dict(model.named_parameters())
    model[1].register_forward_hook(lambda m, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, given())
    assert all(p is before[name] for name, p in model.named_parameters())


# ---- stand-ins that outlive their forward -------------------------------------------------


def test_a_view_of_a_weight_that_a_layer_keeps_steps_aside_later() -> None:
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
        output, later = forward(model, x)
        backward(output)
        accumulate_weight_grads(later)
    expected = linear()
    for _ in range(3):
        backward(expected(x.detach()))
    assert torch.equal(model.weight.grad, expected.weight.grad)  # type: ignore[arg-type]


def test_a_module_that_two_threads_use_at_once() -> None:
    """Whoever finds the other's stand-in learns in I; both find the parameter again."""
    model, x = linear(), given()
    other: list[Any] = []

    def compute(m: Any, x: Tensor) -> Any:
        thread = threading.Thread(target=lambda: other.extend(forward(m, x)))
        thread.start()
        thread.join()
        return m(x)

    output, later = forward(model, x, compute=compute)
    assert type(model.weight) is nn.Parameter
    assert (len(later), len(other[1])) == (1, 0)
    for made, pairs in ((output, later), other):
        backward(made)
        accumulate_weight_grads(pairs)
    expected = linear()
    for _ in range(2):
        backward(expected(x.detach()))
    assert torch.equal(model.weight.grad, expected.weight.grad)  # type: ignore[arg-type]


# ---- memory -------------------------------------------------------------------------------


def test_nothing_keeps_a_weight_alive() -> None:
    with without_gc():
        model, x = linear(), given()
        gone = weakref.ref(model.weight)
        deferral = WeightGradDeferral([model])
        with deferral.activate() as later:
            output = model(x)
        backward(output)
        accumulate_weight_grads(later)
        del model, deferral, output
        assert gone() is None
    assert gc.isenabled()


def test_an_input_and_a_gradient_do_not_keep_what_they_are_a_part_of() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear(bias=True)

        def forward(self, x: Tensor) -> Tensor:
            wide = torch.cat([x] * 10, 1)
            return torch.cat([self.inner(wide[:, :4]), wide], 1)

    output, later = forward(Narrow(), given())
    backward(output)
    (pair,) = later
    for kept in (pair._op_input, pair._output_grad):
        assert kept is not None
        assert kept.untyped_storage().nbytes() == kept.nbytes
    assert put_off(Narrow(), given()) == ["inner.weight"]


def test_a_stopped_operation_keeps_its_inputs_alone() -> None:
    model = nn.Embedding(10, 4, dtype=torch.float64)
    output, later = forward(model, torch.tensor([1, 2]))
    gone = weakref.ref(output.untyped_storage())
    backward(output * 2)
    del output
    assert gone() is None
    accumulate_weight_grads(later)
    assert model.weight.grad is not None


def test_large_gradients_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """But parts of one gradient do, as each alone would be as large as the whole."""
    calls: list[int] = []

    def counted(roots: Any, gradients: Any, retain_graph: bool) -> None:
        calls.append(len(roots))
        accumulate_grads(roots, gradients, retain_graph)

    monkeypatch.setattr(later_of, "accumulate_grads", counted)
    monkeypatch.setattr(later_of, "_MAX_BATCHED_ELEMENTS", 20)
    model = nn.Sequential(*(linear() for _ in range(5)))
    assert len(put_off(model, given())) == 5
    assert calls == [2, 2, 1]
    calls.clear()
    parts = lambda m, x: [functional.linear(x, part) for part in m.weight.chunk(4)]  # noqa: E731
    monkeypatch.setattr(later_of, "_MAX_BATCHED_ELEMENTS", 1)
    put_off(linear(), given(), compute=parts)
    assert calls == [4]


def test_a_part_of_a_weight_that_is_used_again_after_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backward is not to free what the next one needs."""
    monkeypatch.setattr(later_of, "_MAX_BATCHED_ELEMENTS", 1)

    def compute(m: Any, x: Tensor) -> Any:
        part = m[0].weight[torch.tensor([1, 0, 1, 2])]
        return x @ part @ m[1].weight @ part

    model = nn.Sequential(linear(), linear())
    assert put_off(model, given(), compute=compute) == ["0.weight", "1.weight"]
