"""Tests of the operations that defer their weight gradients to W, and of these gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.stage.weight_grad_ops import WeightProxy
from tests.stage.halves import backward, check_deferred_grads, forward
from tests.support import Doubled


@pytest.fixture(autouse=True)
def _in_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def randn(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


class FunctionModule(nn.Module):
    """A module with named weights and a function of them and the input."""

    def __init__(self, function: Callable[..., Any], **weights: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight.detach()))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def function_module(function: Callable[..., Any], *shape: int) -> FunctionModule:
    return FunctionModule(function, weight=torch.randn(*shape))


# ---- linear -------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Tensor]] = {
    "1-D": lambda: randn(4),
    "2-D": lambda: randn(3, 4),
    "3-D": lambda: randn(2, 3, 4),
    "4-D": lambda: randn(2, 3, 2, 4),
    "transposed": lambda: randn(2, 4, 3).detach().mT.requires_grad_(),
    "sliced": lambda: randn(2, 6, 8).detach()[:, ::2, ::2].requires_grad_(),
    "expanded": lambda: randn(4).detach().expand(2, 3, 4).requires_grad_(),
    "of no rows": lambda: randn(0, 4),
    "of no rows, 3-D": lambda: randn(2, 0, 4),
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("bias", ["learns", "frozen", "none"])
@pytest.mark.parametrize("learns", [True, False])
def test_linear_defers_its_weight_gradient(given: str, bias: str, learns: bool) -> None:
    layer = nn.Linear(4, 5, bias=bias != "none")
    if bias == "frozen":
        layer.bias.requires_grad_(False)
    x = INPUTS[given]().detach().requires_grad_(learns)
    assert check_deferred_grads(layer, x) == ["weight"]


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_followed_by_in_place_operations(given: str, bias: bool) -> None:
    """The output of a linear may be a view of the computed result.

    An in-place change must reach the result.
    """
    model = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(inplace=True))
    assert check_deferred_grads(model, INPUTS[given]()) == ["0.weight"]

    def compute(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model[0](x)
        y += 1
        y.mul_(2)
        y[..., :2] *= 3
        return y

    assert check_deferred_grads(model, INPUTS[given](), compute=compute) == ["0.weight"]


def test_linear_with_keyword_arguments_and_unusual_shapes() -> None:
    named = function_module(lambda m, x: functional.linear(weight=m.weight, input=x), 5, 4)
    assert check_deferred_grads(named, randn(3, 4)) == ["weight"]
    vector = FunctionModule(
        lambda m, x: functional.linear(x, m.weight[0]), weight=torch.randn(5, 4)
    )
    assert check_deferred_grads(vector, randn(3, 4)) == []
    matrix = function_module(lambda m, x: functional.linear(x, m.weight, torch.ones(3, 5)), 5, 4)
    assert check_deferred_grads(matrix, randn(3, 4)) == ["weight"]
    empty = function_module(lambda m, x: functional.linear(x, m.weight), 3, 0)
    assert check_deferred_grads(empty, randn(2, 5, 0)) == ["weight"]


# ---- products -----------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], bool]] = {
    "x @ w": (lambda w, x: x @ w, (4, 5), (3, 4), True),
    "x @ w, 3-D": (lambda w, x: x @ w, (4, 5), (2, 3, 4), True),
    "x @ w, both 3-D": (lambda w, x: x @ w, (2, 4, 5), (2, 3, 4), True),
    "x @ w.T": (lambda w, x: x @ w.T, (5, 4), (3, 4), True),
    "x @ w.mT": (lambda w, x: x @ w.mT, (2, 5, 4), (2, 3, 4), True),
    "matmul": (lambda w, x: torch.matmul(x, w), (4, 5), (2, 2, 3, 4), True),
    "matmul by name": (lambda w, x: torch.matmul(input=x, other=w), (4, 5), (3, 4), True),
    "x.matmul": (lambda w, x: x.matmul(w), (4, 5), (3, 4), True),
    "mm": (lambda w, x: torch.mm(x, w), (4, 5), (3, 4), True),
    "mm by name": (lambda w, x: torch.mm(x, mat2=w), (4, 5), (3, 4), True),
    "x.mm": (lambda w, x: x.mm(w), (4, 5), (3, 4), True),
    "bmm": (lambda w, x: torch.bmm(x, w), (2, 4, 5), (2, 3, 4), True),
    "bmm by name": (lambda w, x: torch.bmm(input=x, mat2=w), (2, 4, 5), (2, 3, 4), True),
    "x.bmm": (lambda w, x: x.bmm(w), (2, 4, 5), (2, 3, 4), True),
    "addmm": (lambda w, x: torch.addmm(x[:, :1], x, w), (4, 5), (3, 4), True),
    "addmm of a matrix": (lambda w, x: torch.addmm(x, x, w), (4, 4), (3, 4), True),
    "addmm to a constant": (
        lambda w, x: torch.addmm(torch.ones(5), x, w), (4, 5), (3, 4), True,
    ),
    "no rows": (lambda w, x: x @ w, (4, 5), (0, 4), True),
    "a vector": (lambda w, x: x @ w, (4, 5), (4,), False),
    "from the left": (lambda w, x: w @ x, (5, 4), (4, 3), False),
    "from the left, 3-D": (lambda w, x: torch.bmm(w, x), (2, 5, 4), (2, 4, 3), False),
    "weight broadcast": (lambda w, x: x @ w, (1, 4, 5), (2, 3, 4), False),
    "input broadcast": (lambda w, x: x @ w, (2, 4, 5), (3, 4), False),
    "4-D": (lambda w, x: x @ w, (2, 2, 4, 5), (2, 2, 3, 4), False),
    "alpha and beta": (lambda w, x: torch.addmm(x, x, w, alpha=2, beta=3), (4, 4), (3, 4), False),
    "addmm with beta": (lambda w, x: torch.addmm(x, x, w, beta=3), (4, 4), (3, 4), False),
    "baddbmm": (lambda w, x: torch.baddbmm(x, x, w), (2, 4, 4), (2, 3, 4), False),
    "einsum": (lambda w, x: torch.einsum("bi,io->bo", x, w), (4, 5), (3, 4), False),
    "with itself": (lambda w, x: x @ (w @ w), (4, 4), (3, 4), False),
    "with itself, transposed": (lambda w, x: x.sum() * torch.mm(w, w.t()), (4, 5), (3,), False),
}  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS)
def test_matrix_products_that_defer_weight_gradients(product: str) -> None:
    function, weight, given, is_deferred = PRODUCTS[product]
    model = function_module(lambda m, x: function(m.weight, x), *weight)
    assert check_deferred_grads(model, randn(*given)) == ["weight"] * is_deferred
    without_input_grad = function_module(lambda m, x: function(m.weight, x), *weight)
    assert (
        check_deferred_grads(without_input_grad, randn(*given).detach()) == ["weight"] * is_deferred
    )


def test_matrix_product_with_out_argument_is_an_error() -> None:
    model = function_module(lambda m, x: torch.mm(x, m.weight, out=torch.empty(3, 5)), 4, 5)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        check_deferred_grads(model, randn(3, 4))


# ---- convolutions -------------------------------------------------------------------------

CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv1d(4, 6, 3),
    "without bias": lambda: nn.Conv1d(4, 6, 3, bias=False),
    "stride": lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv1d(4, 6, 3, dilation=2, padding=2),
    "groups": lambda: nn.Conv1d(4, 6, 3, groups=2),
    "valid": lambda: nn.Conv1d(4, 6, 3, padding="valid"),
    "reflect": lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 3),
    "transposed, all": lambda: nn.ConvTranspose1d(
        4, 6, 3, stride=3, padding=2, output_padding=1, groups=2, dilation=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", CONVOLUTIONS)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("rows", [3, 0])
def test_convolutions_defer_their_weight_gradient(layer: str, learns: bool, rows: int) -> None:
    x = torch.randn(rows, 4, 9, requires_grad=learns)
    assert check_deferred_grads(CONVOLUTIONS[layer](), x) == ["weight"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_convolutions_in_2d_and_3d(n: int, transposed: bool) -> None:
    made = getattr(nn, f"Conv{'Transpose' * transposed}{n}d")
    layer = made(2, 4, 2, stride=2, groups=2)
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    assert check_deferred_grads(model, randn(2, 2, *[4] * n)) == ["0.weight"]
    last = torch.channels_last if n == 2 else torch.channels_last_3d
    assert check_deferred_grads(layer.to(memory_format=last), randn(2, 2, *[4] * n)) == ["weight"]


def test_convolutions_that_pad_or_reshape_their_input_are_not_deferred() -> None:
    assert check_deferred_grads(nn.Conv1d(4, 6, 3), randn(4, 9)) == []
    assert check_deferred_grads(nn.Conv1d(4, 6, 3, padding="same"), randn(3, 4, 9)) == []
    x = torch.randn(3, 4, 9, dtype=torch.complex128, requires_grad=True)
    assert check_deferred_grads(nn.Conv1d(4, 6, 3, dtype=torch.complex128), x) == []


def test_convolutions_with_keyword_arguments() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        f = functional.conv1d
        a = f(stride=2, bias=None, weight=model.weight, input=x, padding=(1,))
        return a + f(x, model.weight, None, 2, padding=1) + f(x, model.weight, None, 2, (1,))

    assert check_deferred_grads(function_module(compute, 6, 4, 3), randn(2, 4, 9)) == ["weight"]


# ---- embeddings ---------------------------------------------------------------------------

INDICES = torch.tensor([[1, 2, 2], [0, 6, 1]])


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 2}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=str,
)
def test_embeddings_defer_their_weight_gradient(options: Any) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 4))
    assert check_deferred_grads(model, INDICES) == ["0.weight", "1.weight"]
    assert check_deferred_grads(nn.Embedding(7, 4, **options), INDICES[:, :0]) == ["weight"]


def test_embedding_output_changed_in_place() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Embedding(7, 4))

    def compute(model: Any, indices: Tensor) -> Tensor:
        y = model[0](indices)
        y *= 2
        y[:, 0].add_(1)
        return model[1](y) + model[2](indices).relu_()  # type: ignore[no-any-return]

    assert check_deferred_grads(model, INDICES, compute=compute) == [
        "0.weight",
        "1.weight",
        "2.weight",
    ]


def test_tied_embedding_and_linear_defer_one_weight() -> None:
    """The weight is an embedding table, a matrix, and an input of an undeferred operation."""
    both = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    both[1].weight = both[0].weight

    def compute(model: Any, indices: Tensor) -> Tensor:
        return model(indices) + model[0].weight.norm()  # type: ignore[no-any-return]

    assert check_deferred_grads(both, INDICES) == ["0.weight"]
    assert check_deferred_grads(both, INDICES, compute=compute) == ["0.weight"]


# ---- modules ------------------------------------------------------------------------------


def masks(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "embedding bag": (lambda: nn.EmbeddingBag(7, 4), lambda: (INDICES,)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), lambda: (randn(2, 3), randn(2, 4))),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, dropout=0.3), lambda: (randn(3, 2, 4),)),
    "GRU": (lambda: nn.GRU(4, 5, bidirectional=True), lambda: (randn(3, 2, 4),)),
    "RNN cell": (lambda: nn.RNNCell(4, 5), lambda: (randn(2, 4),)),
    "a norm of matrices": (lambda: nn.LayerNorm([3, 4]), lambda: (randn(2, 3, 4),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_get_their_weight_gradients_in_i(name: str) -> None:
    model, inputs = OTHERS[name]
    assert check_deferred_grads(model(), *inputs()) == []


def test_parameter_lists_and_dicts_are_deferred() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
            self.dict = nn.ParameterDict({"w": torch.randn(5, 4)})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.list:
                x = x @ weight
            return functional.linear(x, self.dict["w"])

    assert check_deferred_grads(Listed(), randn(3, 4)) == ["list.0", "list.1", "dict.w"]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"dropout": 0.2},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"batch_first": True},
    ],
    ids=str,
)
def test_multihead_attention_defers_its_weight_gradients(options: Any, need_weights: bool) -> None:
    x, y = randn(3, 3, 4), randn(3, 3, 4)

    def to_itself(model: Any, x: Tensor) -> Any:
        return model(x, x, x, need_weights=need_weights, attn_mask=masks(3))

    def to_another(model: Any, x: Tensor, y: Tensor) -> Any:
        return model(x, y, y, need_weights=need_weights, key_padding_mask=masks(3))

    def to_others(model: Any, x: Tensor, y: Tensor) -> Any:
        return model(x, y, y + x, need_weights=need_weights)

    model = nn.MultiheadAttention(4, 2, **options)
    for compute, given in ((to_itself, (x,)), (to_another, (x, y)), (to_others, (x, y))):
        assert check_deferred_grads(model, *given, compute=compute) == [
            "in_proj_weight",
            "out_proj.weight",
        ]


def test_multihead_attention_with_separate_projection_weights() -> None:
    model = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    weights = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    assert check_deferred_grads(model, randn(3, 2, 4), randn(6, 2, 3), randn(6, 2, 5)) == weights


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_layers_defer_all_their_matrices(norm_first: bool, activation: str) -> None:
    options: Any = {"dropout": 0.2, "norm_first": norm_first, "activation": activation}
    for layer, inputs in (
        (nn.TransformerEncoderLayer(4, 2, 8, **options), (randn(3, 2, 4),)),
        (nn.TransformerDecoderLayer(4, 2, 8, **options), (randn(3, 2, 4), randn(5, 2, 4))),
    ):
        matrices = [name for name, p in layer.named_parameters() if p.dim() > 1]
        assert check_deferred_grads(layer, *inputs) == matrices
        assert len(matrices) == len(inputs) * 2 + 2


def test_replaced_scaled_dot_product_attention_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library may replace PyTorch's function at any time."""
    model = nn.MultiheadAttention(4, 2)
    x = randn(3, 2, 4)
    compute = lambda model, x: model(x, x, x, need_weights=False)  # noqa: E731
    check_deferred_grads(model, x, compute=compute)
    original = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *given, **more: 2 * original(*given, **more),
    )
    assert check_deferred_grads(model, x, compute=compute) == ["in_proj_weight", "out_proj.weight"]


# ---- views --------------------------------------------------------------------------------

VIEWS: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "t": (lambda w, x: x @ w.t(), True),
    "torch.t": (lambda w, x: x @ torch.t(w), True),
    "T": (lambda w, x: x @ w.T, True),
    "mT": (lambda w, x: x @ w.mT, True),
    "transpose": (lambda w, x: x @ w.transpose(0, 1), True),
    "transpose by name": (lambda w, x: x @ torch.transpose(input=w, dim0=0, dim1=1), False),
    "permute": (lambda w, x: x @ w.permute(1, 0), True),
    "chunk": (lambda w, x: [functional.linear(x, part) for part in w.chunk(3)], True),
    "split": (lambda w, x: [functional.linear(x, part) for part in w.split([1, 2, 3])], True),
    "torch.split": (lambda w, x: [x @ part.t() for part in torch.split(w, 4)], True),
    "only one chunk": (lambda w, x: functional.linear(x, w.chunk(3)[1]), True),
    "unbind": (lambda w, x: [x @ part.view(4, 1) for part in w.unbind()], True),
    "slices": (lambda w, x: functional.linear(x, w[1:5:2]), True),
    "integers": (lambda w, x: functional.linear(x, w[2]), False),
    "ellipsis": (lambda w, x: functional.linear(x[..., :2], w[..., 2:]), True),
    "indices": (lambda w, x: functional.linear(x, w[torch.tensor([1, 1, 4])]), True),
    "booleans": (lambda w, x: functional.linear(x, w[torch.tensor([True, False] * 3)]), True),
    "view": (lambda w, x: torch.bmm(x.expand(2, 3, 4), w.view(2, 3, 4).mT), True),
    "reshape": (lambda w, x: x @ w.t().reshape(4, 6), True),
    "to": (lambda w, x: x.float() @ w.to(torch.float32).t(), True),
    "to the same dtype": (lambda w, x: x @ w.to(x.dtype).t(), True),
    "a view twice": (lambda w, x: [functional.linear(x, w[1:]) + (x * 2) @ w[1:].t()], True),
    "a copy twice": (
        lambda w, x: (lambda part: [x @ part.t(), 2 * x @ part.t()])(w[torch.tensor([1, 1])]),
        True,
    ),
    "detached": (lambda w, x: x @ w.detach().t() + w.sum(), False),
    "data": (lambda w, x: x @ w.data.t() + w.sum(), False),
    "view as integers": (lambda w, x: x * w.view(torch.int64).sign().sum() + w.sum(), False),
    "cloned": (lambda w, x: x @ w.clone().t(), False),
    "scaled": (lambda w, x: x @ (w * 2).t(), False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_weights_are_deferred(view: str) -> None:
    function, is_deferred = VIEWS[view]
    assert (
        check_deferred_grads(function_module(lambda m, x: function(m.weight, x), 6, 4), randn(3, 4))
        == ["weight"] * is_deferred
    )


def test_attribute_of_a_parameter_is_that_of_its_proxy() -> None:
    weight: Any = nn.Parameter(torch.zeros(2, 2))
    weight.scale = 3.0
    recorder: Any = None
    proxy: Any = WeightProxy.wrap(weight, weight, recorder)
    assert proxy.scale == 3.0
    assert not hasattr(proxy, "other")


# ---- dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex128])
def test_weight_grad_deferral_with_each_dtype(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 5, dtype=dtype)
    assert check_deferred_grads(layer, randn(3, 4, dtype=dtype)) == ["weight"]
    assert check_deferred_grads(layer, randn(2, 3, 4, dtype=dtype)) == ["weight"]
    product = FunctionModule(lambda m, x: x @ m.weight, weight=torch.randn(2, 4, 5, dtype=dtype))
    assert check_deferred_grads(product, randn(2, 3, 4, dtype=dtype)) == ["weight"]
    if not dtype.is_complex:
        conv = nn.Conv1d(4, 5, 2, dtype=dtype)
        assert check_deferred_grads(conv, randn(2, 4, 6, dtype=dtype)) == ["weight"]


AUTOCAST: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda m, x: functional.linear(x, m.weight), (5, 4), (3, 4)),
    "linear, 3-D": (lambda m, x: functional.linear(x, m.weight), (5, 4), (2, 3, 4)),
    "matmul": (lambda m, x: x @ m.weight, (4, 5), (2, 3, 4)),
    "mm": (lambda m, x: torch.mm(x, m.weight), (4, 5), (3, 4)),
    "bmm": (lambda m, x: torch.bmm(x, m.weight), (2, 4, 5), (2, 3, 4)),
    "addmm": (lambda m, x: torch.addmm(torch.ones(5), x, m.weight), (4, 5), (3, 4)),
    "conv": (lambda m, x: functional.conv1d(x, m.weight), (5, 4, 2), (2, 4, 6)),
    "conv 2": (lambda m, x: functional.conv2d(x, m.weight), (5, 4, 2, 2), (2, 4, 6, 6)),
    "conv 3": (lambda m, x: functional.conv3d(x, m.weight), (2, 1, 2, 2, 2), (1, 1, 3, 3, 3)),
    "transposed": (lambda m, x: functional.conv_transpose1d(x, m.weight), (4, 5, 2), (2, 4, 6)),
    "transposed 2": (
        lambda m, x: functional.conv_transpose2d(x, m.weight), (4, 5, 2, 2), (2, 4, 6, 6),
    ),
    "transposed 3": (
        lambda m, x: functional.conv_transpose3d(x, m.weight), (1, 1, 2, 2, 2), (1, 1, 3, 3, 3),
    ),
    "embedding": (lambda m, x: functional.embedding(INDICES, m.weight), (7, 4), (1,)),
    "tied": (
        lambda m, x: functional.linear(functional.linear(x, m.weight), m.weight), (4, 4), (3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("learns", [True, False])
def test_weight_grad_deferral_under_autocast(name: str, learns: bool) -> None:
    function, weight, given = AUTOCAST[name]

    def compute(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(model, x.tanh())

    torch.set_default_dtype(torch.float32)
    x = torch.randn(*given, requires_grad=learns)
    assert check_deferred_grads(function_module(function, *weight), x, compute=compute) == [
        "weight"
    ]


def test_small_view_does_not_keep_its_base_until_w() -> None:
    doubled = Doubled()

    def use_a_quarter(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(doubled(x)[:, :2])
        return y

    output, pending = forward(nn.Linear(2, 2), randn(4, 8), compute=use_a_quarter)
    assert doubled.alive == 1
    backward(output)
    del output
    assert pending
    assert doubled.alive == 0
