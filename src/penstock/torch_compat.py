"""Every private PyTorch API that Penstock uses, one function each.

PyTorch may change any of these in any release. Each entry says why the public API is not enough.
No other module of Penstock names a private PyTorch API, so a new PyTorch release is a matter of
this file. `make versions` runs the tests with each release.

`_probe` finds each API by its path, once, when this module is imported. If one is missing, or takes
other parameters than it did, the module still imports: whatever uses that API raises a
`TorchVersionError` that names the feature, and `penstock doctor` lists it. Where a public API does
the same and only takes longer, it is the fallback.

Attributes that every `nn.Module` and `Tensor` has had since PyTorch 1 and that PyTorch's own
documentation shows (`_parameters`, `_buffers`, `_modules`, `_forward_hooks`, `_backward_hooks`) are
used where they are needed.
"""

from __future__ import annotations

import inspect
import logging
import math
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributions
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

# `torch.utils._pytree` is private in name only: PyTorch tells users to register their classes with
# it, and its public counterpart does not exist in all supported releases.
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as _torch_checkpoint

from penstock.errors import TorchVersionError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNormBase",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "pytree",
]

FunctionMode = TypeVar("FunctionMode", bound=TorchFunctionMode)
P = ParamSpec("P")
R = TypeVar("R")

TORCH_VERSION: str = torch.__version__
TORCH_DIRECTORY = str(Path(torch.__file__).parent)
DISTRIBUTIONS_DIRECTORY = str(Path(torch.distributions.__file__).parent)

# The releases that `make versions` tests.
TESTED_VERSIONS = "2.10 to 2.15"

# For error messages that tell the user how to register a container class.
REGISTER_PYTREE_NODE = "torch.utils._pytree.register_pytree_node"


# ---- probing -------------------------------------------------------------------------------------

_NO_FALLBACK = object()
_missing_apis: dict[str, str] = {}  # path: the text of its error


class _StandIn(type):
    """The class of stand-ins for missing APIs.

    Each stand-in is a class, because some APIs are base classes or errors in `except` clauses, and
    it raises when it is called, iterated over, or passed to `isinstance`.
    """

    path: str

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TorchVersionError(_missing_apis[cls.path])

    def __iter__(cls) -> NoReturn:
        raise TorchVersionError(_missing_apis[cls.path])

    def __instancecheck__(cls, _instance: object) -> NoReturn:
        raise TorchVersionError(_missing_apis[cls.path])


def _probe(
    path: str,
    feature: str,
    *,
    parameters: Sequence[str] = (),
    patched: bool = False,
    fallback: Any = _NO_FALLBACK,
) -> Any:
    """Return the object at a dotted path, or its fallback, or a stand-in that raises when used.

    Args:
        path: Modules and attributes, such as "torch._C._functorch.peek_interpreter_stack".
        feature: What does not work without it, as the beginning of an error message.
        parameters: The first parameters of a function, where Penstock depends on their order.
        patched: Whether Penstock replaces it, so that its owner has to define it itself.
        fallback: What to use instead.
    """
    try:
        api = pkgutil.resolve_name(path)
        owner, _, name = path.rpartition(".")
        names = list(inspect.signature(api).parameters) if parameters else []
        if names[: len(parameters)] != list(parameters):
            problem = f"has with other parameters ({', '.join(names)})"
        elif patched and name not in vars(pkgutil.resolve_name(owner)):
            problem = "has in another form"
        else:
            return api
    except (ImportError, AttributeError):
        problem = "does not have"
    if fallback is not _NO_FALLBACK:
        return fallback
    _missing_apis[path] = _describe_missing(path, feature, problem)
    return _StandIn("missing", (Exception,), {"path": path})


def _probe_together(paths: Iterable[str], feature: str, fallback: Any = _NO_FALLBACK) -> list[Any]:
    """Return the objects at these paths, or one stand-in for all of them if one is missing."""
    apis = [_probe(path, feature, fallback=fallback) for path in paths]
    if fallback is not _NO_FALLBACK:
        return [fallback] * len(apis) if any(api is fallback for api in apis) else apis
    missing = next((api for api in apis if isinstance(api, _StandIn)), None)
    return apis if missing is None else [missing] * len(apis)


def _probe_reader(owner: str, names: Sequence[str], feature: str) -> Callable[[Any], Any]:
    """Return a function that reads private attributes of instances of the class at a path."""
    api: Any = _probe_together([f"{owner}.{name}" for name in names], feature)[0]
    return api if isinstance(api, _StandIn) else attrgetter(*names)


def is_parametrization_cached() -> bool:
    """Return whether the caller is inside `torch.nn.utils.parametrize.cached()`.

    PyTorch counts the open contexts in a private variable. Without it, the answer is False.
    """
    return bool(getattr(torch.nn.utils.parametrize, "_cache_enabled", 0))


def _describe_missing(path: str, feature: str, problem: str) -> str:
    return (
        f"{feature} needs {path}, which PyTorch {TORCH_VERSION} {problem}. Use PyTorch "
        f"{TESTED_VERSIONS}, which have it."
    )


def _get(owner: Any, name: str, feature: str) -> Any:
    """Return a private attribute that only instances have, so that no path leads to it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        path = f"{type(owner).__qualname__}.{name}"
        raise TorchVersionError(_describe_missing(path, feature, "does not have")) from None


def find_missing_apis() -> list[str]:
    """Return the error of each private API that this PyTorch lacks.

    Importing `fully_shard` takes long, so its APIs are found when a stage uses it, or here.
    """
    _probe("torch.distributed.fsdp.FSDPModule._get_fsdp_state", FULLY_SHARD)
    state = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
    _probe(f"{state}._root_post_backward_final_callback", FULLY_SHARD)
    return list(_missing_apis.values())


A_PIPE = "A pipe"
TRACING = "Splitting a model that is not an nn.Sequential"
SPLIT_BACKWARD = "A schedule with a split backward"
RANDOM_NUMBERS = "A layer that draws random numbers"
CUDA_GRAPH = "runtime='graph'"
FULLY_SHARD = "A stage in fully_shard"
DDP = "A stage in DistributedDataParallel"


# ---- torch.compile -------------------------------------------------------------------------------


def is_dynamo_loaded() -> bool:
    """Return whether the compiler has been imported.

    Importing it takes seconds. As long as no code has imported it, no module is compiled, and
    Penstock skips its precautions for compiled code.
    """
    return "torch._dynamo" in sys.modules


def force_eager() -> AbstractContextManager[object]:
    """Run compiled modules as they were written, for the duration of the context."""
    if not is_dynamo_loaded():
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Keep fake tensors from logging each operation that fails on them, with its traceback.

    The error itself says the same, and some operations fail and are then run on real tensors.
    Tested with 2.10 to 2.13; without a logger of this name, nothing is kept back.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_compiled_by_dynamo(module: nn.Module) -> bool:
    """Return whether `torch.compile` compiled the module: in place, wrapped, or its forward alone.

    There is no public way to ask. Where an attribute is missing, the module counts as not compiled.
    """
    return (
        getattr(module, COMPILED_CALL_ATTRIBUTE, None) is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def get_eager_function(function: Any) -> Any:
    """Return the function that `torch.compile` has decorated, or None for any other object.

    There is no public way to ask. Where the attribute is missing, nothing counts as compiled.
    """
    # Each step asks for its loss. A module takes 2 us to say that it has no such attribute.
    if isinstance(function, nn.Module):
        return vars(function).get("_torchdynamo_orig_callable")
    return getattr(function, "_torchdynamo_orig_callable", None)


def unwrap_compiled(module: Any) -> Any:
    """Return the module that `torch.compile(module)` wraps, or the argument itself."""
    if isinstance(module, nn.Module) and not is_compiled_wrapper(module):
        return module  # sooner than by asking for an attribute: see `get_eager_function`
    return getattr(module, "_orig_mod", module)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether the module is the wrapper that `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules


# The attribute in which `module.compile()` keeps the compiled forward of a module. A copy of the
# module whose forward is to be traced sets it to None, or its calls would run compiled code.
COMPILED_CALL_ATTRIBUTE = "_compiled_call_impl"

# `torch.compile` puts this into the names of parameters; PyTorch's checkpoints leave it out.
COMPILED_NAME_PREFIX = "_orig_mod."


def skip_compilation(functions: Iterable[FunctionType]) -> None:
    """Tell the compiler to run these functions, and those defined inside them, as written.

    `torch.compiler.disable` wraps a function and adds a Python call to it; this marks the code. If
    the private function is missing, the compiler tries to compile the functions, which costs time
    once and changes no result.
    """
    skip_code = _probe("torch._dynamo.eval_frame.skip_code", "Compilation", fallback=lambda _: None)
    for function in functions:
        nested = (const for const in function.__code__.co_consts if isinstance(const, CodeType))
        for code in (function.__code__, *nested):
            skip_code(code)


def mark_as_not_compilable(function: Any) -> None:
    """Keep the compiler from tracing into a function that is not wrapped by it yet."""
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method so that the compiler does not trace into it, and return it.

    It does its work in a function that `outside_compiler` returns.
    """
    mark_as_not_compilable(method)
    return method


# Functions, and the same functions with the compiler switched off.
_disabled_functions: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs as written, even if its caller is compiled as a whole.

    `torch.compiler.disable` does this, but it imports the compiler. So it is called only once the
    compiler is loaded.
    """
    if not is_dynamo_loaded():
        return function
    if function not in _disabled_functions:
        _disabled_functions[function] = torch.compiler.disable(function)
    return _disabled_functions[function]


def disable_compile(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method that runs as written, even if its caller is compiled as a whole."""

    @wraps(method)
    def run_eagerly(*args: P.args, **kwargs: P.kwargs) -> R:
        return outside_compiler(method)(*args, **kwargs)

    return not_compiled(run_eagerly)


def keep_fake_cuda_guard() -> None:
    """Let this thread own the device guard that PyTorch uses where it has CUDA but no GPU is here.

    The compiler makes the guard when it first runs. In 2.10 and 2.11 it belongs to the thread that
    made it, and when that thread ends, the next compilation in the process crashes; 2.12 keeps it.
    This thread starts the workers and usually outlives them. Without the private function there is
    no guard.
    """
    if not torch.cuda.is_available():
        _ensure_cuda_guard()


_ensure_cuda_guard = _probe(
    "torch._C._ensureCUDADeviceGuardSet", "torch.compile", fallback=lambda: None
)


# ---- autograd ------------------------------------------------------------------------------------


def _run_backward_publicly(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    if accumulate_grad:
        return torch.autograd.backward(roots, gradients, retain_graph, create_graph)
    return torch.autograd.grad(
        roots, inputs, gradients, retain_graph, create_graph, allow_unused=allow_unreachable
    )


# The engine itself. `torch.autograd.backward` checks and converts its arguments again for each
# cell, which costs more than the backward of a small stage.
# The code of the public functions, by which a walk of the stack finds calls of them.
AUTOGRAD_GRAD_CODE, AUTOGRAD_BACKWARD_CODE = (
    function.__code__ for function in (torch.autograd.grad, torch.autograd.backward)
)
run_backward: Callable[..., Any] = _probe(
    "torch.autograd.Variable._execution_engine.run_backward",
    "A backward",
    fallback=_run_backward_publicly,
)


# The class of autograd nodes that are written in Python, as a `torch.autograd.Function`.
PythonNode = BackwardCFunction


# Whether the backward that is running was called with `retain_graph=True`. A
# `torch.autograd.Function` cannot find out through the public API.
keeps_graph: Callable[[], bool] = _probe(
    "torch._C._autograd._get_current_graph_task_keep_graph", "A backward through pipe(x)"
)

# Sets the numbers of writes that autograd has counted for tensors. Without it, a layer that writes
# to its parameters is refused where an audit ran between its forward and its backward.
set_version_counters: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _probe(
    "torch._C._autograd._unsafe_set_version_counter",
    "The audit of layers that write to parameters",
    fallback=lambda tensors, versions: None,
)

_get_graph_task_id = _probe("torch._C._current_graph_task_id", "penstock.add_loss")


def is_in_backward() -> bool:
    """Return whether this thread is running a node of a backward."""
    return bool(_get_graph_task_id() != -1)


# PyTorch switches forward-mode differentiation off in the forward of an `autograd.Function`, and
# `no_grad` does not. Without these APIs, every operation counts as one inside of such a forward.
_is_forward_ad_enabled: Callable[[], bool] = _probe(
    "torch._C._is_fwd_grad_enabled", "Recomputation", fallback=lambda: False
)
_set_forward_ad_enabled: Callable[[bool], AbstractContextManager[object]] = _probe(
    "torch.autograd.forward_ad._set_fwd_grad_enabled", "Recomputation", fallback=nullcontext
)


def is_inside_autograd_function() -> bool:
    """Return whether this thread runs the forward of an `autograd.Function`."""
    return not _is_forward_ad_enabled()


def outside_autograd_function() -> AbstractContextManager[object]:
    """Return a context in which only an `autograd.Function` that is called there counts as one."""
    return _set_forward_ad_enabled(True)


# PyTorch's own functions behind `get_saved_tensor_hooks` and `is_functorch_active`, for code that
# runs for each operation. The first one is called with True: with False, PyTorch hides the hooks
# while it traces.
top_saved_tensor_hooks: Callable[[bool], Any] = _probe(
    "torch._C._autograd._top_saved_tensors_default_hooks", A_PIPE
)
peek_functorch_stack: Callable[[], Any] = _probe(
    "torch._C._functorch.peek_interpreter_stack", f"{TRACING}, or a split backward,"
)


def get_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks on saved tensors of this thread.

    `torch.autograd.graph.saved_tensors_hooks` can set them, and nothing public can read them.
    """
    hooks: tuple[Any, Any] | None = top_saved_tensor_hooks(True)
    return hooks


def are_checkpoint_hooks(hooks: tuple[Any, Any] | None) -> bool:
    """Return whether hooks on saved tensors are those of `torch.utils.checkpoint`."""
    return hooks is not None and sys.modules.get(hooks[0].__module__) is _torch_checkpoint


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return whether a node of a graph is that of a `torch.utils.checkpoint` that is reentrant.

    Its backward runs another one inside, which PyTorch allows only if the outer adds to `.grad`.
    """
    function = getattr(node, "_forward_cls", None)
    return function is not None and function is _torch_checkpoint.CheckpointFunction


# The `f_globals` of stack frames that run code of `torch.utils.checkpoint`. A walk of the stack
# compares it with each frame; a function call per frame would double the time of the walk.
TORCH_CHECKPOINT_GLOBALS: dict[str, Any] = _torch_checkpoint.__dict__


def close_failed_checkpoints(error: BaseException) -> None:
    """Take the hooks of the `torch.utils.checkpoint` calls that an error left off this thread.

    PyTorch 2.10 to 2.12 leave them to the generator of the call, which the error keeps alive. The
    thread would go on with these hooks, and the thread that drops the error could not remove them.
    2.13 has closed the generator by then, and nothing happens here.
    """
    generators = [
        frame.f_locals.get("gen")
        for frame, _ in walk_tb(error.__traceback__)
        if frame.f_globals is TORCH_CHECKPOINT_GLOBALS
    ]
    for generator in reversed(generators):
        if generator is not None:
            with suppress(Exception):  # of a context that the user gave to the call
                generator.close()


# Whether autocast is on for any type of device. It is called for each operation.
is_any_autocast_enabled: Callable[[], bool] = _probe(
    "torch._C._is_any_autocast_enabled",
    "autocast",
    fallback=lambda: any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps", "hpu"))),
)


# Whether autocast caches weights that it has cast without a graph, and uses them with one, where
# they get no gradient. 2.11 has mended that.
AUTOCAST_CACHE_LACKS_GRAPH = TORCH_VERSION.startswith("2.10.")


def is_functorch_active() -> bool:
    """Return whether this thread runs a transform of `torch.func`, such as `vmap` or `grad`."""
    return peek_functorch_stack() is not None


# What a transform of `torch.func` hands to its function: a tensor for one row of many, say. It must
# not be used after the transform has ended. There is no public way to look inside.
_is_transformed, _is_batched, _get_batch_dim, _get_transform_level, _get_unwrapped = (
    _probe_together(
        [
            f"torch._C._functorch.{name}"
            for name in (
                *("is_functorch_wrapped_tensor", "is_batchedtensor", "maybe_get_bdim"),
                *("maybe_get_level", "get_unwrapped"),
            )
        ],
        "A layer that uses torch.func",
    )
)


def unwrap_transformed(tensor: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the tensor that the transforms of `torch.func` have begun with.

    Returns:
        The tensor, and for each `vmap` its level and the dim that it takes apart.
    """
    batch_dims: list[tuple[int, int]] = []
    if not is_functorch_active():  # works without the functions above
        return tensor, batch_dims
    while _is_transformed(tensor):
        if _is_batched(tensor):
            batch_dims.append((_get_transform_level(tensor), _get_batch_dim(tensor)))
        tensor = _get_unwrapped(tensor)
    return tensor, batch_dims


# From the autograd node of a convolution to its settings, in the order in which
# `convolution_backward` takes them. There is no public way to read what a node has saved.
_CONVOLUTION_SETTINGS = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
read_convolution_settings: Callable[[Any], tuple[Any, ...]] = _probe_reader(
    "torch._C._functions.ConvolutionBackward0",
    [f"_saved_{name}" for name in _CONVOLUTION_SETTINGS],
    SPLIT_BACKWARD,
)


# A context without the dispatch modes of this thread.
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _probe(
    "torch._C._DisableTorchDispatch", A_PIPE, fallback=nullcontext
)


def read_saved_number(node: Any, name: str) -> Tensor | float:
    """Return a number that an autograd node has saved: a tensor with one element, or nan.

    There is no public way to read what a node has saved. A tensor with hooks is left alone: those
    of `torch.utils.checkpoint` would compute it again.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None:
        value = getattr(node, f"_saved_{name}", None)
        return float(value) if isinstance(value, int | float) else math.nan
    if getattr(saved, "unpack_hook", None) is not None:
        return math.nan
    value = getattr(node, f"_saved_{name}")
    if type(value) is not Tensor or value.numel() != 1:
        return math.nan
    return value.detach() if value.requires_grad else value


def read_saved_tensor(node: Any, name: str) -> Tensor | None:
    """Return a tensor that an autograd node has saved, detached, or None if it cannot be read."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or getattr(saved, "unpack_hook", None) is not None:
        return None
    value = getattr(node, f"_saved_{name}")
    return value.detach() if type(value) is Tensor else None


def get_input_numel(node: Any) -> float:
    """Return how many elements the first input of an autograd node has, or nan.

    Only the metadata of the node of that input knows, if the input itself was not saved.
    """
    function, index = node.next_functions[0]
    metadata = getattr(function, "_input_metadata", None)
    return math.nan if metadata is None else float(math.prod(metadata[index].shape))


def is_number(function: Any, index: int) -> bool:
    """Return whether an input of an autograd node has no dims.

    `function` and `index` are one of its `next_functions`. As above, the metadata knows.
    """
    metadata = getattr(function, "_input_metadata", None)
    return metadata is not None and len(metadata[index].shape) == 0


# ---- operators -----------------------------------------------------------------------------------


# From an ATen operator to its arguments, with their names and default values. It is called for each
# random operation.
get_schema_arguments: Callable[[Any], Sequence[Any]] = _probe_reader(
    "torch.ops.aten.bernoulli.default", ["_schema.arguments"], RANDOM_NUMBERS
)


# The tracer compares functions with these. `torch.distributions` uses the last one.
PACK_PADDED_SEQUENCE: Any = _probe("torch._VF._pack_padded_sequence", f"{TRACING}, with an RNN,")
PAD_PACKED_SEQUENCE: Any = _probe("torch._VF._pad_packed_sequence", f"{TRACING}, with an RNN,")
IS_ALL_TRUE: Any = _probe("torch._is_all_true", TRACING, fallback=None)

TO_COPY_OPERATOR: Any = torch.ops.aten._to_copy.default  # one of the documented core ATen operators

_foreach_zero = _probe(
    "torch._foreach_zero_", CUDA_GRAPH, fallback=lambda tensors: [t.zero_() for t in tensors]
)
_foreach_copy = _probe(
    "torch._foreach_copy_",
    CUDA_GRAPH,
    fallback=lambda targets, sources, non_blocking: [
        target.copy_(source, non_blocking) for target, source in zip(targets, sources, strict=True)
    ],
)


def foreach_zero_(tensors: Sequence[Tensor]) -> None:
    """Zero all tensors in a few kernels. `torch.optim` is built on the same functions."""
    _foreach_zero(list(tensors))


def foreach_copy_(
    targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
) -> None:
    """Copy each source into its target in a few kernels."""
    _foreach_copy(list(targets), list(sources), non_blocking=non_blocking)


_legacy_get_string = _probe(
    "torch.nn._reduction.legacy_get_string", "size_average or reduce, which are deprecated,"
)


def get_legacy_reduction(size_average: Any, reduce: Any) -> str:
    """Return the `reduction` that the deprecated `size_average` and `reduce` of a loss mean."""
    return str(_legacy_get_string(size_average, reduce, emit_warning=False))


# ---- memory --------------------------------------------------------------------------------------

# A number that identifies a storage for as long as it lives.
get_storage_address: Callable[[torch.UntypedStorage], int] = _probe_reader(
    "torch.UntypedStorage", ["_cdata"], f"{TRACING}, or a memory profile,"
)

# A number that identifies a random generator; its Python objects come and go.
get_generator_address: Callable[[torch.Generator], int] = _probe_reader(
    "torch.Generator", ["_cdata"], CUDA_GRAPH
)

_get_use_count = _probe("torch._C._storage_Use_Count", CUDA_GRAPH)


def get_storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages share this memory.

    It tells whether somebody keeps a view of a buffer that is about to be overwritten.
    """
    return int(_get_use_count(get_storage_address(storage)))


_warn_about_storage = _probe("torch.storage._warn_typed_storage_removal", "", fallback=None)


def silence_storage_warning() -> None:
    """Let PyTorch 2.10 believe that it has warned about `Tensor.storage`, which it does once.

    Its own writer of checkpoints calls that method. Later releases do not.
    """
    if TORCH_VERSION.startswith("2.10.") and _warn_about_storage is not None:
        setattr(_warn_about_storage, "has_warned", True)  # noqa: B010


# ---- device time ---------------------------------------------------------------------------------

# There is no public way to keep a device busy for a while. Without it, times of small kernels
# include the gaps in which the device waits for the host.
_sleep_on_device = _probe("torch.cuda._sleep", "", fallback=None)


def sleep_on_device(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the device's clock, if possible."""
    if _sleep_on_device is not None:
        _sleep_on_device(cycles)


# ---- tensor subclasses ---------------------------------------------------------------------------

_FAKE_TENSOR = "torch._subclasses.fake_tensor"
if not TYPE_CHECKING:
    FakeTensor = _probe(f"{_FAKE_TENSOR}.FakeTensor", TRACING)
    FakeTensorMode = _probe(f"{_FAKE_TENSOR}.FakeTensorMode", TRACING)
DataDependentOutputException: Any = _probe(f"{_FAKE_TENSOR}.DataDependentOutputException", TRACING)
DynamicOutputShapeException: Any = _probe(f"{_FAKE_TENSOR}.DynamicOutputShapeException", TRACING)
UnsupportedOperatorException: Any = _probe(f"{_FAKE_TENSOR}.UnsupportedOperatorException", TRACING)


class SymbolicSizes:
    """Sizes that stand for any number, and the conditions that running code has put on them.

    Code that runs on fake tensors of such sizes gets expressions for the sizes of its results. If
    it asks a question, such as `if n > 512`, PyTorch answers for the number at hand and records the
    condition. The other sizes for which the conditions hold lead to the same operations.

    PyTorch's compiler and `torch.export` work so. Nothing public gives access to the conditions.
    Tested with PyTorch 2.10 to 2.15. Before 2.13, matrix products turn symbols into numbers, and
    models with attention are traced for each size. If a part of it is missing, the constructor or
    a method raises AttributeError, ImportError or TypeError, and each size is traced for itself.
    """

    def __init__(self) -> None:
        from torch.fx.experimental import symbolic_shapes  # at the first use: it takes its time

        self.dynamic_dim: Any = symbolic_shapes.StatelessSymbolicContext(
            dynamic_sizes=[symbolic_shapes.DimDynamic.DYNAMIC]
        )
        self.environment: Any = symbolic_shapes.ShapeEnv()
        # Tensors that are not made with symbolic sizes, such as parameters, have fixed ones.
        self.mode: Any = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=self.environment, static_shapes=True
        )

    def create(self, size: int) -> tuple[Any, Any]:
        """Return a symbol, and a size for which it stands and that is `size` at the moment."""
        fake = self.mode.from_tensor(
            torch.empty(size, device="meta"),
            static_shapes=False,
            symbolic_context=self.dynamic_dim,
        )
        return self.to_expression(fake.shape[0]), fake.shape[0]

    def holds(self, values: Mapping[Any, int]) -> bool:
        """Return whether all conditions hold if the symbols have these values."""
        environment = self.environment
        conditions = [guard.expr for guard in environment.guards]
        equal = [symbol - expression for symbol, expression in environment.replacements.items()]
        return (
            not environment.num_deferred_runtime_asserts
            and all(value in environment.var_to_range[symbol] for symbol, value in values.items())
            and all(_substitute(condition, values) == True for condition in conditions)  # noqa: E712
            and all(_substitute(difference, values) == 0 for difference in equal)
        )

    @staticmethod
    def to_expression(size: Any) -> Any:
        """Return a number as it is, and a symbolic size as an expression of symbols."""
        return size.node.expr if isinstance(size, torch.SymInt) else size

    @staticmethod
    def evaluate(expression: Any, values: Mapping[Any, int]) -> int:
        """Return the value of an expression. Raise ValueError if symbols in it have none."""
        if isinstance(expression, int):
            return expression
        value = _substitute(expression, values)
        if not value.is_Integer:
            raise ValueError(f"{expression} has no value")
        return int(value)


def _substitute(expression: Any, values: Mapping[Any, int]) -> Any:
    """Return an expression of sympy with numbers in place of symbols."""
    import sympy  # type: ignore[import-untyped]  # a dependency of PyTorch

    return sympy.sympify(expression).xreplace({s: sympy.Integer(n) for s, n in values.items()})


# As the `__torch_function__` of a subclass: functions see it as a plain tensor.
disabled_torch_function: Any = _probe("torch._C._disabled_torch_function_impl", TRACING)

# A context in which function modes and tensor subclasses do not see what is called.
DisableTorchFunction: Any = _probe("torch._C.DisableTorchFunction", A_PIPE)

# Takes a subclass, a size and options. Returns a tensor with this metadata and without memory.
make_wrapper_subclass: Any = _probe("torch.Tensor._make_wrapper_subclass", TRACING)


def mark_as_parameter(tensor: Tensor | type[Tensor], is_parameter: bool = True) -> None:
    """Let `isinstance(tensor, nn.Parameter)` say so for a tensor, or for a subclass of Tensor."""
    tensor._is_param = is_parameter


# ---- modules -------------------------------------------------------------------------------------

if not TYPE_CHECKING:
    BatchNormBase = _probe("torch.nn.modules.batchnorm._BatchNorm", A_PIPE)
# Without it, the buffers of a norm are saved before a recomputation like all others.
NormBase: Any = _probe("torch.nn.modules.batchnorm._NormBase", "Recomputation", fallback=())

_GLOBAL_HOOK_TABLES = [
    _probe(f"torch.nn.modules.module._global_{kind}_hooks", CUDA_GRAPH)
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]


def get_global_hook_ids() -> list[tuple[int, ...]]:
    """Return the ids of the hooks that are registered for all modules, one tuple per kind of hook.

    `torch.nn.modules.module.register_module_forward_hook` and its relatives add them, and nothing
    public lists them.
    """
    return [tuple(table) for table in _GLOBAL_HOOK_TABLES]


def is_forward_ad_enabled() -> bool:
    """Return whether the caller is in a level of forward-mode AD, or in `torch.func.jvp`.

    Nothing public tells. Where PyTorch has no such level, the answer is no.
    """
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


_peek_transforms: Callable[[], Any] = _probe(
    "torch._C._functorch.peek_interpreter_stack", "Refusing torch.func", fallback=lambda: None
)


_is_legacy_batched: Callable[[Tensor], bool] = _probe(
    "torch._C._functorch.is_legacy_batchedtensor",
    "Refusing batched gradients",
    fallback=lambda _: False,
)


def is_batched_gradient(tensor: Tensor | None) -> bool:
    """Return whether a tensor is many gradients at once, as with `is_grads_batched=True`."""
    return tensor is not None and _is_legacy_batched(tensor)


def is_inside_transform() -> bool:
    """Return whether the caller is in a transform of `torch.func`, such as `vmap` or `grad`.

    Nothing public tells. Where PyTorch does not say, the answer is no, and the transform fails.
    """
    return _peek_transforms() is not None


# ---- modes ---------------------------------------------------------------------------------------

_count_function_modes, _get_function_mode, _push_function_mode, _pop_function_mode = (
    _probe_together(
        [
            "torch._C._len_torch_function_stack",
            "torch._C._get_function_stack_at",
            "torch._C._push_on_torch_function_stack",
            "torch._C._pop_torch_function_stack",
        ],
        TRACING,
    )
)


def get_function_modes() -> list[TorchFunctionMode]:
    """Return the function modes of this thread, the innermost last.

    PyTorch calls only the innermost one, which has no public way to find the others.
    """
    return [_get_function_mode(index) for index in range(_count_function_modes())]


def find_function_mode(kind: type[FunctionMode]) -> FunctionMode | None:
    """Return the innermost function mode of a class, or None."""
    for index in range(_count_function_modes() - 1, -1, -1):
        mode = _get_function_mode(index)
        if isinstance(mode, kind):
            return mode
    return None


# A probe of its own: where it is missing, nothing is refused, but PyTorch itself is asked.
_has_function_modes: Callable[[], Any] = _probe(
    "torch._C._len_torch_function_stack", A_PIPE, fallback=lambda: True
)
_CPU = torch.device("cpu")


def get_default_device() -> torch.device:
    """Return the device on which factory functions make tensors in this thread.

    `torch.get_default_device` takes 3 us, which each call of a pipe would pay. It looks for a
    function mode: `torch.set_default_device` and `with torch.device(...)` both enter one.
    """
    return torch.get_default_device() if _has_function_modes() else _CPU


@contextmanager
def without_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Take one function mode out of the stack for the duration of the context.

    Modes that were entered later stay, in their order.
    """
    stack = get_function_modes()
    above = stack[stack.index(mode) :]
    for _ in above:
        _pop_function_mode()
    for other in above[1:]:
        _push_function_mode(other)
    try:
        yield
    finally:
        for _ in above[1:]:
            _pop_function_mode()
        for other in above:
            _push_function_mode(other)


_DISPATCH = "torch.utils._python_dispatch"
if not TYPE_CHECKING:
    TorchDispatchMode = _probe(f"{_DISPATCH}.TorchDispatchMode", A_PIPE)

# The dispatch modes of this thread, the innermost last.
get_dispatch_modes: Callable[[], Sequence[TorchDispatchMode]] = _probe(
    f"{_DISPATCH}._get_current_dispatch_mode_stack", A_PIPE
)

# The innermost dispatch mode of this thread, or None. It is called for each random operation.
get_innermost_dispatch_mode: Callable[[], TorchDispatchMode | None] = _probe(
    f"{_DISPATCH}._get_current_dispatch_mode", A_PIPE
)

# Enter a dispatch mode in this thread alone, and leave the innermost one.
# `TorchDispatchMode.__enter__` also sets flags of the compiler that all threads share. Two stages
# that enter and leave at once would leave them wrong.
push_dispatch_mode, pop_dispatch_mode = _probe_together(
    [f"{_DISPATCH}._push_mode", f"{_DISPATCH}._pop_mode"], A_PIPE
)

# Leave the innermost dispatch mode of this thread for the duration of a context.
without_innermost_dispatch_mode: Callable[[], AbstractContextManager[object]] = _probe(
    f"{_DISPATCH}._pop_mode_temporarily", RANDOM_NUMBERS
)


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import the compiler only to keep it from tracing the mode.

    Without this method, entering the first mode of a process takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class CompileFriendlyDispatchMode(EagerDispatchMode):
    """A dispatch mode under which compiled modules stay compiled.

    Without this method, a compiled module that was called once under the mode runs as written from
    then on. With it, the mode does not see the operations that the compiler has fused.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the mode does not need to see inside compiled code."""
        return True


# ---- kernels of operations that draw random numbers ----------------------------------------------
#
# A dispatch mode sees every operation, and each one then goes through Python. Only those that draw
# are of interest. The dispatcher can tell them apart by itself: a thread may add a dispatch key to
# all of its operations, and an operator without a kernel for that key falls through it, which is
# decided when kernels are registered and costs a call nothing.
#
#     TESTING_ONLY_GenericMode   the key: it comes before all others, and PyTorch uses it nowhere
#     its fallback               falls through
#     an operator that draws     has a Python kernel, which calls the handler
#     a composite operator       falls through, and its parts are seen
#
# The registrations stay, but no thread has the key outside of a cell, so they are no patch:
# without the key the dispatcher does not look at them. They are made when a thread first asks.

_DRAW_KEY = "TESTING_ONLY_GenericMode"
_parse_key, _include_key, _is_key_included, _exclude_key = _probe_together(
    [
        "torch._C._dispatch_key_parse",
        "torch._C._dispatch_tls_set_dispatch_key_included",
        "torch._C._dispatch_tls_is_dispatch_key_included",
        "torch._C._dispatch_tls_set_dispatch_key_excluded",
    ],
    RANDOM_NUMBERS,
    fallback=None,
)
_get_operator_names, _get_overload, _has_kernel = _probe_together(
    [
        "torch._C._dispatch_get_all_op_names",
        "torch._C._get_operation_overload",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
    ],
    RANDOM_NUMBERS,
    fallback=None,
)
_get_mode_of_kind = _probe("torch._C._get_dispatch_mode", RANDOM_NUMBERS, fallback=None)
_mode_kinds = _probe("torch._C._TorchDispatchModeKey", RANDOM_NUMBERS, fallback=None)
_higher_order_operators = _probe("torch._ops._higher_order_ops", RANDOM_NUMBERS, fallback=None)
_higher_order_defaults = _probe(
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", RANDOM_NUMBERS, fallback=None
)

# Called with an operator that draws, its arguments and its keyword arguments.
DrawHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# It chooses a kernel for attention, and has the tag of the kernels that it chooses from.
_DRAWS_NOTHING = "aten::_fused_sdp_choice"

_draw_key: Any = None  # None until the kernels are registered
_draw_kernels: dict[Any, bool] = {}  # operators that draw: whether they have a kernel
# By namespace; PyTorch drops the registrations of a library that nobody refers to.
_draw_libraries: dict[str, torch.library.Library] = {}
_draw_lock = threading.Lock()


def register_draw_kernels(handler: DrawHandler) -> bool:
    """Let a handler run the operations that draw, in threads that have the draw key.

    The handler removes the key while it runs one. Only the first call does anything.

    Returns:
        Whether this PyTorch has all that it takes. Otherwise no thread ever has the key.
    """
    global _draw_key
    if _draw_key is not None:
        return True
    required = _parse_key, _has_kernel, _get_mode_of_kind, _mode_kinds, _higher_order_operators
    if None in (*required, _higher_order_defaults):
        return False
    with _draw_lock:
        if _draw_libraries:  # another thread was first, or it has failed before
            return _draw_key is not None
        try:
            _draw_libraries["_"] = torch.library.Library("_", "IMPL")
        except TypeError:  # it notes the path of this file, which must be valid Unicode
            return False
        try:
            key = _parse_key(_DRAW_KEY)
            _draw_libraries["_"].fallback(torch.library.fallthrough_kernel, _DRAW_KEY)
        except (AttributeError, RuntimeError):  # the key is gone, or other code has it
            return False
        # Most of the thousands of operators do not draw, and a Python object for each takes long.
        for name in _get_operator_names():
            qualified, _, overload = name.partition(".")
            operator = _get_overload(qualified, overload)
            if operator is not None and torch.Tag.nondeterministic_seeded in operator[2]:
                namespace, _, packet = qualified.partition("::")
                overloads = getattr(getattr(torch.ops, namespace), packet)
                _register_draw_kernel(getattr(overloads, overload or "default"), handler)
        # Higher-order operators, such as `flex_attention`, look up their kernels in Python, where
        # the fallback is not seen. Those that are defined later take their keys from the list.
        for operator in list(_higher_order_operators.values()):
            operator.fallthrough(key)
        _higher_order_defaults.append(key)
        _draw_key = key
    return True


def add_draw_kernel(operator: Any, handler: DrawHandler) -> None:
    """Register a kernel for an operator that draws and that was defined after the others."""
    if _draw_key is not None and operator not in _draw_kernels:
        with _draw_lock:
            _register_draw_kernel(operator, handler)


def _register_draw_kernel(operator: Any, handler: DrawHandler) -> None:
    name = operator.name()
    has_kernel = not _has_kernel(name, "CompositeImplicitAutograd") and name != _DRAWS_NOTHING
    if has_kernel and operator not in _draw_kernels:
        namespace = operator.namespace
        if namespace not in _draw_libraries:
            _draw_libraries[namespace] = torch.library.Library(namespace, "IMPL")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return handler(operator, args, kwargs)

        _draw_libraries[namespace].impl(operator, kernel, _DRAW_KEY)
    _draw_kernels[operator] = has_kernel


def set_draw_key(is_included: bool) -> bool:
    """Add the draw key to the operations of this thread, or remove it.

    Returns:
        Whether they had it before.
    """
    if _draw_key is None:
        return False
    before: bool = _is_key_included(_draw_key)
    if before is not is_included:
        _include_key(_draw_key, is_included)
        if is_included:  # PyTorch excludes all keys before Python's in what a dispatch mode calls
            _exclude_key(_draw_key, False)
    return before


def has_draw_key() -> bool:
    """Return whether the operations of this thread have the draw key."""
    return _draw_key is not None and _is_key_included(_draw_key)


def is_under_compiler() -> bool:
    """Return whether the operations of this thread are traced on fake tensors, by the compiler.

    Such an operation draws nothing, and a generator among its arguments would be a constant.
    """
    # Called for each draw, where a loop would take three times as long.
    is_fake = _get_mode_of_kind(_mode_kinds.FAKE) is not None
    return is_fake or _get_mode_of_kind(_mode_kinds.PROXY) is not None


# ---- dropout with a generator --------------------------------------------------------------------
#
# `native_dropout` takes no generator=, so it draws from the default generator, which all threads
# share. On CUDA, an older operator launches the same kernel and takes one. Tested with 2.11.
# Without it, a cell gives the default generator its own state, and others wait for that.

_fused_dropout = _probe("torch._fused_dropout", RANDOM_NUMBERS, fallback=None)


def drop_with_generator(
    generator: torch.Generator, tensor: Tensor, probability: float, is_training: bool | None
) -> tuple[Tensor, Tensor] | None:
    """Return what `native_dropout` returns if the default generator has the generator's state.

    Returns:
        The output and the mask, or None if PyTorch has no such kernel for this tensor.
    """
    if (
        tensor.device.type != "cuda"
        or type(tensor) not in _PLAIN_TENSORS
        or not is_training
        or not 0 < probability < 1
        or _fused_dropout is None
        or is_inside_transform()  # it has no rule for `vmap`
    ):
        return None
    output, mask = _fused_dropout(tensor, 1 - probability, generator)
    return output, mask.view(torch.bool)


_PLAIN_TENSORS = (Tensor, nn.Parameter)
_HAS_NAMES = hasattr(Tensor, "names")  # dims had names before 2.13


# Most models drop by `nn.Dropout`, that is by `F.dropout`, which calls `torch._VF.dropout`. If the
# dispatcher finds the draw in there (see above), it goes from Python to C++ and back twice, and the
# thread has to get Python's lock again each time, for which it competes with the other ranks. So
# while a thread computes a cell that draws, `F.dropout` calls a function of Penstock, which calls
# operators with the generator of the cell. All other ways to dropout go through the dispatcher.
#
# `torch._VF` looks its functions up in a class of C when they are asked for, so an attribute of its
# own comes first, and is removed when no cell needs it. Without `torch._VF`, nothing is replaced.

_functional_calls = _probe("torch._VF", RANDOM_NUMBERS, fallback=None)
_plain_dropout = _probe("torch._VF.dropout", RANDOM_NUMBERS, fallback=None)
_dropout_lock = threading.Lock()
_dropout_users = 0  # how many cells need the replacement

# Called as `torch.dropout`, with the tensor, the probability and whether it is in training.
Dropout = Callable[[Tensor, float, bool], Tensor]


def install_dropout(replacement: Dropout) -> None:
    """Let `F.dropout` call a replacement, until `remove_dropout` is called as often as this.

    All callers pass the same replacement, which finds out whether its thread computes a cell.
    """
    global _dropout_users
    if _plain_dropout is None:
        return
    with _dropout_lock:
        _dropout_users += 1
        if _dropout_users == 1:
            _functional_calls.dropout = replacement


def remove_dropout() -> None:
    """Let `F.dropout` call PyTorch's own function again when no cell needs the replacement."""
    global _dropout_users
    if _plain_dropout is None:
        return
    with _dropout_lock:
        _dropout_users -= 1
        if _dropout_users == 0:
            del _functional_calls.dropout


def run_plain_dropout(tensor: Tensor, probability: float, is_training: bool) -> Tensor:
    """Run PyTorch's own `torch.dropout`."""
    output: Tensor = _plain_dropout(tensor, probability, is_training)
    return output


def can_drop_by_parts(tensor: Tensor, probability: float) -> bool:
    """Return whether `drop_by_parts` computes the same as `torch.dropout` in training."""
    return (
        type(tensor) in _PLAIN_TENSORS
        and 0 < probability < 1
        and (tensor.is_cpu or (tensor.is_cuda and _fused_dropout is not None))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (_HAS_NAMES and any(tensor.names))  # type: ignore[attr-defined]
        and tensor.numel() > 0
        and get_innermost_dispatch_mode() is None
        and not is_inside_transform()
    )


def drop_by_parts(generator: torch.Generator, tensor: Tensor, probability: float) -> Tensor:
    """Return what `torch.dropout` returns if the default generator has the generator's state."""
    keep = 1 - probability
    if tensor.is_cuda:
        output: Tensor = _fused_dropout(tensor, keep, generator)[0]
        return output
    return tensor * torch.empty_like(tensor).bernoulli_(keep, generator=generator).div_(keep)


# ---- calls that a function mode does not see -----------------------------------------------------
#
# A TorchFunctionMode does not see calls of `torch.autograd.Function.apply`, scripted functions,
# `vmap` and `torch.utils.checkpoint`. While a thread traces a model or runs a stage of it, these
# four are replaced by functions that call the handler of their thread. The last thread to finish
# restores PyTorch's own objects, so nothing is patched between calls of the library.
#
# (The replacements cost next to nothing: a stage of a traced model installs and removes them
# around every micro-batch.)


class CallHandler:
    """The interface that receives the calls that a function mode does not see."""

    def handle_autograd_function(
        self,
        function: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        """Handle `function.apply(*args, **kwargs)`; `call` is PyTorch's own `apply`."""
        raise NotImplementedError

    def handle_script_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Handle a call of a function that `torch.jit.script` compiled."""
        raise NotImplementedError

    def handle_vmap(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], vmap: Callable[..., Any]
    ) -> Any:
        """Handle a run of `function` under `torch.vmap`; `vmap(function, *args)` runs it."""
        raise NotImplementedError

    def handle_checkpoint(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context in which a function of `torch.utils.checkpoint` runs."""
        raise NotImplementedError


_FindHandler = Callable[[], CallHandler | None]
_patch_lock = threading.Lock()
_patch_depth = 0  # how many threads need the patches
_find_handler: _FindHandler = lambda: None  # noqa: E731
_originals: dict[str, Any] = {}  # PyTorch's own objects, by name


def install_call_handlers(find: _FindHandler) -> None:
    """Report calls that a function mode does not see to `find()`, the handler of the thread.

    Threads for which `find()` is None see PyTorch as it is. Each call is followed by one of
    `remove_call_handlers`, and all callers pass the same `find`.
    """
    global _patch_depth, _find_handler
    for owner, _, _ in _MISSING_PATCHES:
        owner()  # raises
    with _patch_lock:
        _patch_depth += 1
        if _patch_depth == 1:
            _find_handler = find
            for owner, name, replacement in _PATCHES:
                _originals[name] = vars(owner)[name]
                setattr(owner, name, replacement)


def remove_call_handlers() -> None:
    """Put PyTorch's own objects back when the last thread is done."""
    global _patch_depth
    with _patch_lock:
        _patch_depth -= 1
        if _patch_depth == 0:
            for owner, name, _ in _PATCHES:
                setattr(owner, name, _originals[name])


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.Function.apply` through the handler of this thread, if there is one."""
    # `apply` is a classmethod: of Python up to 2.14, of C since then. Both kinds have `__get__`.
    original = _originals["apply"].__get__(None, cls)
    handler = _find_handler()
    if handler is None:
        return original(*args, **kwargs)
    if cls is _torch_checkpoint.CheckpointFunction:  # torch.utils.checkpoint, use_reentrant=True
        function, preserve_rng_state, *inputs = args
        with handler.handle_checkpoint({"preserve_rng_state": preserve_rng_state}):
            return function(*inputs)
    return handler.handle_autograd_function(cls, args, kwargs, original)


def _call_script_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    original = _originals["__call__"].__get__(self)
    handler = _find_handler()
    if handler is None:
        return original(*args, **kwargs)
    return handler.handle_script_function(self, args, kwargs, original)


def _vmap_impl(func: Any, *args: Any, **kwargs: Any) -> Any:
    original = _originals["vmap_impl"]
    handler = _find_handler()
    if handler is None:
        return original(func, *args, **kwargs)
    return handler.handle_vmap(func, args, kwargs, original)


def _is_current_stream_capturing() -> bool:
    """Return False to the code between the units of a traced forward, and the truth to other code.

    The trace was made outside of a capture. Code that asks, such as the masks of transformers,
    would take another path in a captured step than in its trace. What it reads from inputs on the
    path of the trace is a guard, which is answered before the capture.
    """
    return _find_handler() is None and _originals["is_current_stream_capturing"]()


# The generator behind `torch.utils.checkpoint` with use_reentrant=False. Since 2.14 it has another
# name, and its options are keywords; up to 2.13 they are its first arguments.
_CHECKPOINT_OPTIONS = [
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
]
_CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
_CHECKPOINT_TAKES_KEYWORDS = hasattr(_torch_checkpoint, f"{_CHECKPOINT_GENERATOR}_impl")
if _CHECKPOINT_TAKES_KEYWORDS:
    _CHECKPOINT_GENERATOR += "_impl"


def _checkpoint_generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Surround a function of `torch.utils.checkpoint` with use_reentrant=False.

    PyTorch runs the function between the two halves of this generator.
    """
    handler = _find_handler()
    if handler is None:
        yield from _originals[_CHECKPOINT_GENERATOR](function, *args, **kwargs)
        return
    options = (
        kwargs if _CHECKPOINT_TAKES_KEYWORDS else dict(zip(_CHECKPOINT_OPTIONS, args, strict=False))
    )
    with handler.handle_checkpoint(options):
        yield


def _find_patch(
    path: str, replacement: Any, parameters: Sequence[str] = ()
) -> tuple[Any, str, Any]:
    """Return the owner of an API, or its stand-in, with the name and the replacement."""
    api = _probe(path, TRACING, parameters=parameters, patched=True)
    owner, _, name = path.rpartition(".")
    return api if isinstance(api, _StandIn) else pkgutil.resolve_name(owner), name, replacement


_PATCHES = (
    _find_patch("torch.autograd.Function.apply", classmethod(_apply)),
    _find_patch("torch.jit.ScriptFunction.__call__", _call_script_function),
    _find_patch("torch._functorch.apis.vmap_impl", _vmap_impl, ["func"]),
    _find_patch("torch.cuda.is_current_stream_capturing", _is_current_stream_capturing),
    _find_patch(
        f"torch.utils.checkpoint.{_CHECKPOINT_GENERATOR}",
        _checkpoint_generator,
        ["fn", "args", "kwargs"] if _CHECKPOINT_TAKES_KEYWORDS else ["fn", *_CHECKPOINT_OPTIONS],
    ),
)
_MISSING_PATCHES = [patch for patch in _PATCHES if isinstance(patch[0], _StandIn)]


def call_without_dispatch(
    function: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of `torch.nn.functional` whose own check for tensor subclasses is off.

    A composite such as `F.multi_head_attention_forward` dispatches to the subclass before it
    reaches `F.linear`, which is the function that has to see the subclass. Its code runs here with
    a `has_torch_function` that says no. If PyTorch renames that function, the composite dispatches
    as before, and its weights get their gradients in I.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    undispatched = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    undispatched.__kwdefaults__ = function.__kwdefaults__
    return undispatched(*args, **kwargs)


# ---- DistributedDataParallel and replicate -------------------------------------------------------


# The wrapper whose forward this process is in, or None.
get_active_ddp: Callable[[], DistributedDataParallel | None] = _probe(
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", A_PIPE
)


def set_active_ddp(wrapper: DistributedDataParallel | None) -> None:
    """Set the wrapper whose forward this process is in.

    It is one variable for all threads, and stages that run at once leave a wrong one behind.
    """
    DistributedDataParallel._active_ddp_module = wrapper


def has_comm_hooks(wrapper: DistributedDataParallel) -> bool:
    """Return whether a communication hook is registered, also that of `mixed_precision`."""
    return bool(_get(wrapper, "_comm_hooks", DDP))


def has_delayed_all_reduce(wrapper: DistributedDataParallel) -> bool:
    """Return whether the wrapper was made with `delay_all_reduce_named_params`."""
    return bool(_get(wrapper, "_delay_all_reduce_params", DDP))


# DDP reads this attribute of the module that it wraps: names of parameters that it does not reduce.
DDP_IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"


def get_replicate_module() -> Any:
    """Return the module of `replicate`, or None if no code has imported it."""
    return sys.modules.get("torch.distributed._composable.replicate")


def get_replicate_wrapper(module: nn.Module) -> DistributedDataParallel:
    """Return the DDP wrapper inside a module that was given to `replicate`.

    PyTorch makes it in the first forward; here it is made now, because in a pipe the first forward
    is that of whichever thread comes first.
    """
    state = get_replicate_module().replicate.state(module)
    if not state.has_initialized:
        state.lazy_init()
    wrapper: DistributedDataParallel = _get(state, "_ddp", "A stage in replicate")
    return wrapper


# ---- fully_shard ---------------------------------------------------------------------------------
#
# A pipe reduces once a step, after all backwards; `fully_shard` reduces in each backward.
# The public switches turn the reduction off, and these functions do the rest at the end of a step.


def get_fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """Return the states of modules that were given to `fully_shard`, each once."""
    return list(dict.fromkeys(_get(module, "_get_fsdp_state", FULLY_SHARD)() for module in modules))


def is_fsdp_root(state: Any) -> bool:
    """Return whether a forward has found the module to be in no other sharded module."""
    return bool(_get(state, "_is_root", FULLY_SHARD))


def finish_fsdp_backward(state: Any) -> None:
    """Do what `fully_shard` does when a backward ends: reduce, reshard, wait."""
    _get(state, "_root_post_backward_final_callback", FULLY_SHARD)()


def reset_fsdp_after_error(state: Any) -> None:
    """Forget the forward or backward that failed, from the state of a root without gradients.

    `reset_iter_state` does this since 2.13. Before, the end of a backward does it: with
    reduction on and no gradients it communicates nothing.
    """
    reset = getattr(state, "_reset_iter_state", None)
    if reset is not None:
        reset()
        return
    context = _get(state, "_state_ctx", FULLY_SHARD)
    context.iter_forward_root = None
    for sharded in context.all_states:
        _get(sharded, "_modules_to_run_forward", FULLY_SHARD).clear()
    finish_fsdp_backward(state)


def get_fsdp_params(state: Any) -> Iterator[Any]:
    """Yield the sharded parameters of a state that a forward has gathered before."""
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since 2.12
    if groups is None:
        groups = [_get(state, "_fsdp_param_group", FULLY_SHARD)]
    for group in groups:
        for fsdp_param in () if group is None else group.fsdp_params:
            # A parameter that no forward has gathered lacks the attribute; its class declares it.
            if "_unsharded_param" not in type(fsdp_param).__annotations__:
                _get(fsdp_param, "_unsharded_param", FULLY_SHARD)
            if hasattr(fsdp_param, "_unsharded_param"):
                yield fsdp_param


def accumulates_in_grad(fsdp_param: Any) -> bool:
    """Return whether the accumulated gradient is the `.grad` of the unsharded parameter.

    It is since 2.15. Up to 2.14, `fully_shard` moves `.grad` to a place of its own after each
    backward.
    """
    return isinstance(vars(type(fsdp_param)).get("unsharded_accumulated_grad"), property)


def get_accumulated_grad(fsdp_param: Any) -> Tensor | None:
    """Return the gradient that backwards without reduction have accumulated."""
    gradient: Tensor | None = fsdp_param.unsharded_accumulated_grad
    return gradient


def set_accumulated_grad(fsdp_param: Any, gradient: Tensor | None) -> None:
    """Set the gradient that the next reduction will reduce."""
    if accumulates_in_grad(fsdp_param):
        _get(fsdp_param, "_unsharded_param", FULLY_SHARD).grad = gradient
    else:
        fsdp_param.unsharded_accumulated_grad = gradient


def clear_unsharded_grads(fsdp_param: Any) -> None:
    """Drop all gradients of a parameter that have not been reduced."""
    set_accumulated_grad(fsdp_param, None)
    _get(fsdp_param, "_unsharded_param", FULLY_SHARD).grad = None


# ---- random numbers ------------------------------------------------------------------------------


# The default generator of Apple's GPU. `torch.mps` has no `default_generators` like `torch.cuda`.
get_mps_generator: Callable[[], torch.Generator] = _probe(
    "torch.mps._get_default_mps_generator", f"{RANDOM_NUMBERS} on Apple's GPU"
)


# ---- torch.distributed ---------------------------------------------------------------------------

# The module of some classes in checkpoints that releases before 2.3 have written. It is a name in a
# pickle, which is compared and not imported.
OLD_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata"


# From a mesh to the one that it was sliced from, or to itself.
get_root_mesh: Callable[[DeviceMesh], DeviceMesh] = _probe(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "A pipe over a device mesh"
)


def wait_for_collective(tensor: Tensor) -> Tensor:
    """Return the finished result of a collective, and any other tensor as it is.

    A row-parallel layer returns an `AsyncCollectiveTensor`, which waits for its all-reduce when an
    operation first uses it. Its class is private, and it has no memory that can be sent. So it is
    recognised by its method, which PyTorch has had since 2.1.
    """
    wait: Callable[[], Tensor] | None = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def connect_nccl_eagerly(group: Any, device: torch.device) -> None:
    """Open the communicator now. Otherwise the first collective opens it and delays its step."""
    group.eager_connect_single_device(device)
