"""PyTorch releases without one of the private APIs that Penstock uses."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from penstock import torch_compat
from penstock.errors import TorchVersionError

SOURCE = Path(torch_compat.__file__)
resolve_name = pkgutil.resolve_name


def import_copy() -> ModuleType:
    """Import torch_compat.py once more, under another name."""
    spec = spec_from_file_location("torch_compat_copy", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_probed_paths() -> list[str]:
    resolve = Mock(side_effect=resolve_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve)
        import_copy().find_missing_apis()
    paths = dict.fromkeys(call.args[0] for call in resolve.call_args_list)
    owners = {path.rpartition(".")[0] for path in paths}
    return [path for path in paths if path not in owners]


PATHS = list_probed_paths()


@contextmanager
def without(missing: str) -> Iterator[None]:
    """Let PyTorch look as if it did not have the API at a path."""

    def resolve(path: str) -> Any:
        if path == missing:
            raise AttributeError(path)
        return resolve_name(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve)
        yield


@contextmanager
def penstock_without(missing: str) -> Iterator[Any]:
    """Import Penstock again for a PyTorch that lacks one API."""
    ours = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "penstock"}
    for name in ours:
        del sys.modules[name]
    try:
        with without(missing):
            import penstock

            penstock.Pipe  # noqa: B018 - imports the rest
        yield penstock
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
            del sys.modules[name]
        sys.modules.update(ours)


def train(package: Any, model: nn.Module, **options: Any) -> None:
    """Train one step as a pipe, and compare the gradients with those of the unsplit model."""
    torch.manual_seed(0)
    x, target = torch.randn(4, 3), torch.randn(4, 3)
    nn.functional.mse_loss(model(x), target).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    example = {} if isinstance(model, nn.Sequential) else {"example": x}
    pipe = package.Pipe(
        model,
        stages=2,
        chunks=2,
        devices=["cpu"] * 2,
        loss_fn=nn.functional.mse_loss,
        **example,
        **options,
    )
    pipe.step(x, target=target)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x)))) + x


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def convolutions() -> nn.Sequential:
    wide, narrow = nn.Unflatten(1, (1, 3)), nn.Flatten(1)
    return nn.Sequential(wide, nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1), narrow)


def call(package: Any) -> None:
    package.Pipe(layers(), stages=2, chunks=2, devices=["cpu"] * 2)(
        torch.ones(4, 3)
    ).sum().backward()


def convert(package: Any) -> None:
    package.Pipe(layers(), stages=2, chunks=2, devices=["cpu"] * 2).to(torch.float64)


USES: dict[str, Callable[[Any], None]] = {
    "sequential": lambda package: train(package, layers()),
    "zero bubble": lambda package: train(package, layers(), schedule="zb-h1"),
    "convolution": lambda package: train(package, convolutions(), schedule="zb-h1"),
    "traced": lambda package: train(package, Net()),
    "dropout": lambda package: train(package, nn.Sequential(*layers(), nn.Dropout(1e-9))),
    "call": call,
    "to": convert,
}

# APIs without which a dispatch mode finds the operations that draw.
DRAW_KERNELS = [
    "torch._C._dispatch_key_parse",
    "torch._C._dispatch_tls_set_dispatch_key_included",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C._dispatch_tls_set_dispatch_key_excluded",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._get_operation_overload",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._get_dispatch_mode",
    "torch._C._TorchDispatchModeKey",
    "torch._ops._higher_order_ops",
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
]

# The uses that raise without an API. All others compute the same numbers as before.
REFUSED = {
    "torch.autograd.Variable._execution_engine.run_backward": "",
    "torch._C._autograd._get_current_graph_task_keep_graph": "call",
    "torch._C._functorch.peek_interpreter_stack": "zero bubble, convolution, traced",
    "torch._C._functions.ConvolutionBackward0._saved_groups": "convolution",
    "torch.ops.aten.bernoulli.default._schema.arguments": "dropout",
    "torch._C._storage_Use_Count": "",
    "torch._subclasses.fake_tensor.FakeTensorMode": "traced",
    "torch._C._push_on_torch_function_stack": "traced",
    "torch.autograd.Function.apply": "traced",
    "torch.utils._python_dispatch._pop_mode": "sequential, zero bubble, convolution, traced, "
    "dropout, call",
}


@pytest.mark.parametrize("path", REFUSED)
def test_only_uses_of_a_missing_api_raise(path: str) -> None:
    problem = (
        f" needs {path}, which PyTorch {torch.__version__} does not have. Use PyTorch 2.10 to "
    )
    refused = {}
    with penstock_without(path) as package:
        for name, use in USES.items():
            try:
                use(package)
            except package.errors.TorchVersionError as error:
                refused[name] = str(error)
    assert ", ".join(refused) == REFUSED[path]
    assert all(problem in text for text in refused.values())
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("path", PATHS)
def test_torch_compat_imports_without_any_api_and_reports_it(path: str) -> None:
    with without(path):
        missing = import_copy().find_missing_apis()
    has_fallback = path in (
        "torch.autograd.Variable._execution_engine.run_backward",
        "torch._C._is_any_autocast_enabled",
        "torch._is_all_true",
        "torch._foreach_zero_",
        "torch._foreach_copy_",
        "torch.nn.modules.batchnorm._NormBase",
        "torch._C._ensureCUDADeviceGuardSet",
        "torch._C._DisableTorchDispatch",
        "torch.storage._warn_typed_storage_removal",
        "torch.cuda._sleep",
        "torch._fused_dropout",
        "torch._VF",
        "torch._VF.dropout",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._autograd._unsafe_set_version_counter",
        "torch._C._functorch.is_legacy_batchedtensor",
        "torch._C._is_fwd_grad_enabled",
        "torch.autograd.forward_ad._set_fwd_grad_enabled",
        *DRAW_KERNELS,
    )
    assert len(missing) == (not has_fallback)
    assert all(f" needs {path}, which PyTorch " in text for text in missing)


def test_plain_tensors_are_unwrapped_without_the_apis_of_transforms() -> None:
    """Audits of layers that use no torch.func were left out, with a note."""
    tensor = torch.ones(2)
    with without("torch._C._functorch.get_unwrapped"):
        found, batch_dims = import_copy().unwrap_transformed(tensor)
    assert found is tensor
    assert not batch_dims


def test_nothing_is_missing_here() -> None:
    assert torch_compat.find_missing_apis() == []


def test_function_with_other_parameters_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement of a function must take the arguments that PyTorch passes."""
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(torch.utils.checkpoint, f"{name}_impl"):  # PyTorch 2.14 and later
        name += "_impl"
    monkeypatch.setattr(torch.utils.checkpoint, name, lambda fn, context_fn: None)
    copy = import_copy()
    (text,) = copy.find_missing_apis()
    assert f"{name}, which PyTorch {torch.__version__} has with other parameters (fn, cont" in text
    with pytest.raises(TorchVersionError, match="Splitting a model that is not"):
        copy.install_call_handlers(lambda: None)


def test_method_that_moved_to_a_base_class_counts_as_missing() -> None:
    class Derived(torch.autograd.Function):
        pass

    def resolve(path: str) -> Any:
        return Derived if path == "torch.autograd.Function" else resolve_name(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve)
        (text,) = import_copy().find_missing_apis()
    assert f"Function.apply, which PyTorch {torch.__version__} has in another form." in text


def test_private_attribute_of_an_instance_that_is_missing() -> None:
    with pytest.raises(
        TorchVersionError, match=r"fully_shard needs object._is_root, which PyTorch"
    ):
        torch_compat.is_fsdp_root(object())


def test_every_private_name_is_probed() -> None:
    """Private names stand in the paths that are probed, never in code."""
    only_types = {"_BatchNorm", "_python_dispatch", "_subclasses"}
    allowed = {"_modules", "_pytree", "_to_copy", *only_types}  # documented by PyTorch
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        private = [n for n in names if n.startswith("_") and not n.startswith("__")]
        assert set(private) <= allowed, ast.unparse(node)
