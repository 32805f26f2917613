"""Every private PyTorch API that Penstock uses, one function each.

PyTorch may change any of these in any release. Each entry says why the public API is not enough
and what happens where the private one is missing. No other module of Penstock names a private
PyTorch API, so a new PyTorch release is a matter of this file.

All tests run with PyTorch 2.13. Those of `model/`, `stage/`, `data_parallel/` and `runtime/` were
also run with 2.11 and 2.15.

Attributes that every `nn.Module` and `Tensor` has had since PyTorch 1 and that PyTorch's own
documentation shows (`_parameters`, `_buffers`, `_modules`, `_forward_hooks`, `_backward_hooks`) are
used where they are needed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributions
from torch import Tensor, nn
from torch._functorch import apis as _functorch_apis
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as _torch_module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

# `torch.utils._pytree` is private in name only: PyTorch tells users to register their classes with
# it, and its public counterpart does not exist in all supported releases.
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as _torch_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

__all__ = [
    "BatchNormBase",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "pytree",
]

FunctionMode = TypeVar("FunctionMode", bound=TorchFunctionMode)

TORCH_VERSION: str = torch.__version__
TORCH_DIRECTORY = str(Path(torch.__file__).parent)
DISTRIBUTIONS_DIRECTORY = str(Path(torch.distributions.__file__).parent)

# For error messages that tell the user how to register a container class.
REGISTER_PYTREE_NODE = "torch.utils._pytree.register_pytree_node"


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


def is_compiled_by_dynamo(module: nn.Module) -> bool:
    """Return whether `torch.compile` compiled the module: in place, wrapped, or its forward alone.

    There is no public way to ask. Where an attribute is missing, the module counts as not compiled.
    """
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def unwrap_compiled(module: Any) -> Any:
    """Return the module that `torch.compile(module)` wraps, or the argument itself."""
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
    skip_code: Any = getattr(torch._dynamo.eval_frame, "skip_code", None)
    if skip_code is None:
        return
    for function in functions:
        nested = (const for const in function.__code__.co_consts if isinstance(const, CodeType))
        for code in (function.__code__, *nested):
            skip_code(code)


def mark_as_not_compilable(function: Any) -> None:
    """Keep the compiler from tracing into a function that is not wrapped by it yet."""
    function._torchdynamo_disable = True


# ---- autograd ------------------------------------------------------------------------------------

# The engine itself. `torch.autograd.backward` checks and converts its arguments again for each
# cell, which costs more than the backward of a small stage.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


# The class of autograd nodes that are written in Python, as a `torch.autograd.Function`.
PythonNode: type = torch._C._FunctionBase


def keeps_graph() -> bool:
    """Return whether the backward that is running was called with `retain_graph=True`.

    A `torch.autograd.Function` cannot find out through the public API.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_in_backward() -> bool:
    """Return whether this thread is running a node of a backward."""
    return torch._C._current_graph_task_id() != -1


# PyTorch's own functions behind `get_saved_tensor_hooks` and `is_functorch_active`, for code that
# runs for each operation. The first one is called with True: with False, PyTorch hides the hooks
# while it traces.
top_saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
peek_functorch_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def get_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the innermost hooks on saved tensors of this thread.

    `torch.autograd.graph.saved_tensors_hooks` can set them, and nothing public can read them.
    """
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def are_checkpoint_hooks(hooks: tuple[Any, Any] | None) -> bool:
    """Return whether hooks on saved tensors are those of `torch.utils.checkpoint`."""
    return hooks is not None and sys.modules.get(hooks[0].__module__) is _torch_checkpoint


# The `f_globals` of stack frames that run code of `torch.utils.checkpoint`. A walk of the stack
# compares it with each frame; a function call per frame would double the time of the walk.
TORCH_CHECKPOINT_GLOBALS: dict[str, Any] = _torch_checkpoint.__dict__


def is_autograd_multithreaded() -> bool:
    """Return whether backwards of this thread may use autograd's own threads.

    `torch.autograd.set_multithreading_enabled` sets it, and nothing public can read it.
    """
    return torch._C._is_multithreading_enabled()


# Whether autocast is on for any type of device. It is called for each operation.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_functorch_active() -> bool:
    """Return whether this thread runs a transform of `torch.func`, such as `vmap` or `grad`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def make_saved_settings_reader(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads what an autograd node saved under these names.

    An example is the stride of a convolution. There is no public way to read these settings.
    """
    return attrgetter(*(f"_saved_{name}" for name in names))


# ---- operators -----------------------------------------------------------------------------------


# From an ATen operator to its arguments, with their names and default values. It is called for each
# random operation.
get_schema_arguments: Callable[[Any], Sequence[Any]] = attrgetter("_schema.arguments")


PACK_PADDED_SEQUENCE: Any = torch._VF._pack_padded_sequence
PAD_PACKED_SEQUENCE: Any = torch._VF._pad_packed_sequence
IS_ALL_TRUE: Any = getattr(torch, "_is_all_true", None)  # used by torch.distributions
TO_COPY_OPERATOR: Any = torch.ops.aten._to_copy.default


def foreach_zero_(tensors: Sequence[Tensor]) -> None:
    """Zero all tensors in a few kernels. `torch.optim` is built on the same functions."""
    torch._foreach_zero_(list(tensors))


def foreach_copy_(
    targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
) -> None:
    """Copy each source into its target in a few kernels."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def get_legacy_reduction(size_average: Any, reduce: Any) -> str:
    """Return the `reduction` that the deprecated `size_average` and `reduce` of a loss mean."""
    from torch.nn import _reduction

    return _reduction.legacy_get_string(size_average, reduce, emit_warning=False)


def parse_to_device(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device that `module.to(*args, **kwargs)` would move a module to."""
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device


# ---- memory --------------------------------------------------------------------------------------


def get_storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages share this memory.

    It tells whether somebody keeps a view of a buffer that is about to be overwritten.
    """
    return torch._C._storage_Use_Count(storage._cdata)


def get_storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage for as long as it lives."""
    return int(storage._cdata)


def get_generator_address(generator: torch.Generator) -> int:
    """Return a number that identifies a random generator; its Python objects come and go."""
    return int(generator._cdata)  # type: ignore[attr-defined]


# ---- tensor subclasses ---------------------------------------------------------------------------

# As the `__torch_function__` of a subclass: functions see it as a plain tensor.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


# A context in which function modes and tensor subclasses do not see what is called.
DisableTorchFunction: Any = torch._C.DisableTorchFunction


def make_wrapper_subclass(cls: type, size: Sequence[int], **options: Any) -> Any:
    """Return a tensor of a subclass that has this metadata and no memory."""
    return Tensor._make_wrapper_subclass(cls, size, **options)


def mark_as_parameter(tensor: Tensor | type[Tensor], is_parameter: bool = True) -> None:
    """Let `isinstance(tensor, nn.Parameter)` say so for a tensor, or for a subclass of Tensor."""
    tensor._is_param = is_parameter


# ---- hooks on all modules ------------------------------------------------------------------------

_GLOBAL_HOOK_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def get_global_hook_ids() -> list[tuple[int, ...]]:
    """Return the ids of the hooks that are registered for all modules, one tuple per kind of hook.

    `torch.nn.modules.module.register_module_forward_hook` and its relatives add them, and nothing
    public lists them.
    """
    return [tuple(vars(_torch_module)[name]) for name in _GLOBAL_HOOK_TABLES]


# ---- modes ---------------------------------------------------------------------------------------


def get_function_modes() -> list[TorchFunctionMode]:
    """Return the function modes of this thread, the innermost last.

    PyTorch calls only the innermost one, which has no public way to find the others.
    """
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(count)]


def find_function_mode(kind: type[FunctionMode]) -> FunctionMode | None:
    """Return the innermost function mode of a class, or None."""
    for index in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(index)
        if isinstance(mode, kind):
            return mode
    return None


@contextmanager
def without_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Take one function mode out of the stack for the duration of the context.

    Modes that were entered later stay, in their order.
    """
    stack = get_function_modes()
    above = stack[stack.index(mode) :]
    for _ in above:
        torch._C._pop_torch_function_stack()
    for other in above[1:]:
        torch._C._push_on_torch_function_stack(other)
    try:
        yield
    finally:
        for _ in above[1:]:
            torch._C._pop_torch_function_stack()
        for other in above:
            torch._C._push_on_torch_function_stack(other)


def get_dispatch_modes() -> Sequence[TorchDispatchMode]:
    """Return the dispatch modes of this thread, the innermost last."""
    modes: Sequence[TorchDispatchMode] = _get_current_dispatch_mode_stack()
    return modes


# The innermost dispatch mode of this thread, or None. It is called for each random operation.
get_innermost_dispatch_mode: Callable[[], TorchDispatchMode | None] = _get_current_dispatch_mode


# Enter a dispatch mode in this thread alone, and leave the innermost one.
# `TorchDispatchMode.__enter__` also sets flags of the compiler that all threads share. Two stages
# that enter and leave at once would leave them wrong.
push_dispatch_mode: Callable[[TorchDispatchMode], None] = _push_mode
pop_dispatch_mode: Callable[[], Any] = _pop_mode


def without_innermost_dispatch_mode() -> AbstractContextManager[object]:
    """Leave the innermost dispatch mode of this thread for the duration of the context."""
    context: AbstractContextManager[object] = _pop_mode_temporarily()
    return context


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


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.autograd.Function, "apply", classmethod(_apply)),
    (torch.jit.ScriptFunction, "__call__", _call_script_function),
    (_functorch_apis, "vmap_impl", _vmap_impl),
    (_torch_checkpoint, _CHECKPOINT_GENERATOR, _checkpoint_generator),
)


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


def get_active_ddp() -> DistributedDataParallel | None:
    """Return the wrapper whose forward this process is in, or None."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


def set_active_ddp(wrapper: DistributedDataParallel | None) -> None:
    """Set the wrapper whose forward this process is in.

    It is one variable for all threads, and stages that run at once leave a wrong one behind.
    """
    DistributedDataParallel._active_ddp_module = wrapper


def has_comm_hooks(wrapper: DistributedDataParallel) -> bool:
    """Return whether a communication hook is registered, also that of `mixed_precision`."""
    return bool(getattr(wrapper, "_comm_hooks", ()))


def has_delayed_all_reduce(wrapper: DistributedDataParallel) -> bool:
    """Return whether the wrapper was made with `delay_all_reduce_named_params`."""
    return bool(getattr(wrapper, "_delay_all_reduce_params", ()))


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
    wrapper: DistributedDataParallel = state._ddp
    return wrapper


# ---- fully_shard ---------------------------------------------------------------------------------
#
# A pipe reduces once a step, after all backwards; `fully_shard` reduces in each backward.
# The public switches turn the reduction off, and these functions do the rest at the end of a step.


def get_fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """Return the states of modules that were given to `fully_shard`, each once."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def is_fsdp_root(state: Any) -> bool:
    """Return whether a forward has found the module to be in no other sharded module."""
    return bool(state._is_root)


def finish_fsdp_backward(state: Any) -> None:
    """Do what `fully_shard` does when a backward ends: reduce, reshard, wait."""
    state._root_post_backward_final_callback()


def get_fsdp_params(state: Any) -> Iterator[Any]:
    """Yield the sharded parameters of a state that a forward has gathered before."""
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since 2.13
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield from (p for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


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
        fsdp_param._unsharded_param.grad = gradient
    else:
        fsdp_param.unsharded_accumulated_grad = gradient


def clear_unsharded_grads(fsdp_param: Any) -> None:
    """Drop all gradients of a parameter that have not been reduced."""
    set_accumulated_grad(fsdp_param, None)
    fsdp_param._unsharded_param.grad = None


# ---- random numbers ------------------------------------------------------------------------------


def get_mps_generator() -> torch.Generator:
    """Return the default generator of Apple's GPU.

    `torch.mps` has no `default_generators` like `torch.cuda` and `torch.xpu`. If the private
    function is missing, a pipe on such a GPU raises an AttributeError when a layer draws.
    """
    return torch.mps._get_default_mps_generator()


# ---- torch.distributed ---------------------------------------------------------------------------


def get_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a submesh was sliced from, or the mesh itself."""
    return mesh._get_root_mesh()


def connect_nccl_eagerly(group: Any, device: torch.device) -> None:
    """Open the communicator now. Otherwise the first collective opens it and delays its step."""
    group.eager_connect_single_device(device)
