"""Run a method of a module, such as `training_step`, as the forward of a model that can be split.

A framework calls methods of the user's module that compute a loss, log values and update metrics.
In a pipe such a method runs once for each micro-batch, on several stages and threads, and each
stage leaves it early. So what it logs cannot go to the framework at once:

    in the method                          in a pipe
    -------------------------------------  ---------------------------------------------------------
    self.log("acc", value)                 an output of the forward beside the loss
    self.accuracy(predictions, labels)     its arguments are outputs, joined by rows
    self.log("acc", self.accuracy)         the name of the metric is an output

After the step, `MethodResult` has the values of the whole batch, and the caller logs them and
updates the metrics as if the method had run once.
"""

from __future__ import annotations

import dis
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError, PenstockTypeError, RunError
from penstock.stage.loss import Weighted
from penstock.torch_compat import pytree

# The arguments of `LightningModule.log` after name and value, in order.
LOG_OPTIONS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist"),
    *("sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only"),
)
_REDUCTIONS = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}

_NUMBER_TYPES = (bool, int, float)

# What a call of a `MethodModule` is for: a loss to train with, values to log, or an output.
LOSS, VALUES, OUTPUT = "loss", "values", "output"


# ---- the record of one micro-batch ---------------------------------------------------------------


@dataclass
class CallRecord:
    """The values that a method logs, and the metrics that it calls, for one micro-batch."""

    logs: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    metric_calls: list[tuple[dict[str, Any], Any]] = field(default_factory=list)


class _ThreadState(threading.local):
    """The record of the method that is running in this thread, or None."""

    record: CallRecord | None = None


_thread_state = _ThreadState()


def _get_record(what: str) -> CallRecord:
    record = _thread_state.record
    if record is None:
        raise RunError(
            f"{what} was called in a thread of its own, or outside of the method that runs as a "
            "pipe, so its value would be lost. Call it in the step method itself."
        )
    return record


def record_log(name: str, value: Any, *args: Any, **options: Any) -> None:
    """Take the place of `self.log` while a method runs as a pipe."""
    record = _get_record("self.log")
    about = {"name": name, "options": _encode_options(name, args, options)}
    if isinstance(value, MetricRecorder):
        record.logs.append(({**about, "metric": value.path}, None))
    elif isinstance(value, MetricValue):
        record.logs.append(({**about, "call": value.index}, None))
    elif isinstance(value, Tensor) and value.numel() == 1:
        record.logs.append((about, value.detach().reshape(())))
    elif isinstance(value, int | float):
        record.logs.append((about, float(value)))
    else:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value)}"
        raise PenstockTypeError(
            f"self.log({name!r}) got a value of {kind}. Log a number, a tensor with one element or "
            "a metric of torchmetrics."
        )


def record_log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
    """Take the place of `self.log_dict` while a method runs as a pipe."""
    if isinstance(dictionary, MetricRecorder | MetricValue):
        # A collection: its names are known where the real one is.
        names = tuple(name for name in LOG_OPTIONS if name != "metric_attribute")
        options |= dict(zip(names, args, strict=False))
        record_log("", dictionary, **options)
        return
    for name, value in dictionary.items():
        record_log(name, value, *args, **options)


def _encode_options(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `self.log` as plain values, which can travel between processes."""
    encoded = {**dict(zip(LOG_OPTIONS, args, strict=False)), **options}
    reduce_fx = encoded.get("reduce_fx", "mean")
    if not isinstance(reduce_fx, str):
        if reduce_fx not in _REDUCTIONS:
            raise ArgumentError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported in a pipe. Use "
                "'mean', 'sum', 'max' or 'min', or a metric of torchmetrics."
            )
        encoded["reduce_fx"] = _REDUCTIONS[reduce_fx]
    if encoded.get("sync_dist_group") is not None:
        raise ArgumentError(
            f"self.log({name!r}, sync_dist_group=...) is not supported in a pipe, which knows its "
            "replicas. Leave it out."
        )
    encoded.pop("enable_graph", None)  # logged values have no graph here
    return {key: value for key, value in encoded.items() if value is not None}


# ---- metrics -------------------------------------------------------------------------------------


class MetricValue:
    """The value of a metric for a batch, which is known after the step. It can be logged only."""

    def __init__(self, path: str, index: int) -> None:
        self.path, self.index = path, index

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the value of the metric '{self.path}' has no '{name}' in a method that runs as a "
            "pipe: it is known after the step, when all micro-batches have run. Log it with "
            "self.log, or use it in a hook such as on_train_batch_end."
        )


class MetricRecorder(nn.Module):
    """Takes the place of a metric of torchmetrics while a method runs as a pipe."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> MetricValue:
        """Record the arguments of a call that also returns the value for the batch."""
        return MetricValue(self.path, self._record("forward", args, kwargs))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments of an update."""
        self._record("update", args, kwargs)

    def compute(self) -> Any:
        """Raise: the value is known after the step."""
        raise self._build_error("compute")

    def reset(self) -> Any:
        """Raise: other micro-batches have updated the metric, or will do so."""
        raise self._build_error("reset")

    def _build_error(self, name: str) -> RunError:
        return RunError(
            f"{name}() of the metric '{self.path}' was called in a method that runs as a pipe. "
            "There a metric can be called, updated and logged. Use the rest in a hook such as "
            "on_validation_epoch_end."
        )

    def _record(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        for value in pytree.tree_leaves((args, kwargs)):
            if not isinstance(value, Tensor | int | float):
                raise PenstockTypeError(
                    f"the metric '{self.path}' got a {type(value).__name__}. In a method that runs "
                    "as a pipe, metrics take tensors and numbers. Update it in a hook such as "
                    "on_validation_batch_end."
                )
        calls = _get_record(f"the metric '{self.path}'").metric_calls
        detached = pytree.tree_map_only(Tensor, Tensor.detach, {"args": args, "kwargs": kwargs})
        calls.append(({"path": self.path, "method": method}, detached))
        return len(calls) - 1


def find_metrics(module: nn.Module) -> dict[str, nn.Module]:
    """Return the metrics and collections of torchmetrics in a module, by path."""
    try:
        from torchmetrics import Metric, MetricCollection
    except ImportError:
        return {}
    metrics: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in metrics)
        if path and not is_inside and isinstance(child, Metric | MetricCollection):
            metrics[path] = child
    return metrics


class Door:
    """A method of a module that has been replaced by a call of its pipe.

    Inside the pipe the module has its own method again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipe."""
        return self._function(*args, **kwargs)


# ---- the module during a call --------------------------------------------------------------------

# The objects that attributes of the user's module refer to during a call, by attribute.
_frameworks: dict[str, Any] = {}


class TrainerReference:
    """Takes the place of a module's reference to its Trainer while a method runs as a pipe.

    It has no state of its own. The state of the module is copied, compared and put back around dry
    runs and audits, and that of the Trainer must not be.
    """

    __slots__ = ()
    attribute = "_trainer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_frameworks[type(self).attribute], name)


class FabricReference(TrainerReference):
    """Takes the place of a module's reference to its Fabric."""

    __slots__ = ()
    attribute = "_fabric"


_REFERENCES = (TrainerReference(), FabricReference())


@contextmanager
def _hidden_frameworks(module: nn.Module) -> Iterator[None]:
    """Replace the references of modules to the Trainer and to Fabric."""
    previous = [
        (vars(child), reference, vars(child)[reference.attribute])
        for child in module.modules()
        for reference in _REFERENCES
        if vars(child).get(reference.attribute) is not None
    ]
    for attributes, reference, framework in previous:
        attributes[reference.attribute] = reference
        _frameworks[reference.attribute] = framework
    try:
        yield
    finally:
        for attributes, reference, framework in previous:
            attributes[reference.attribute] = framework
        _frameworks.clear()


@contextmanager
def recorded_calls(module: nn.Module, recorders: Mapping[str, MetricRecorder]) -> Iterator[None]:
    """Let `log`, `log_dict` and the metrics of a module record, as long as the context lasts."""
    attributes = vars(module)
    functions = {"log": record_log, "log_dict": record_log_dict}
    functions = {name: f for name, f in functions.items() if hasattr(type(module), name)}
    hidden = [name for name, v in attributes.items() if isinstance(v, Door) or name in functions]
    previous = {name: attributes.pop(name) for name in hidden}
    attributes.update(functions)
    replaced = []
    for path, recorder in recorders.items():
        parent_path, _, name = path.rpartition(".")
        children = module.get_submodule(parent_path)._modules
        replaced.append((children, name, children[name]))
        children[name] = recorder
    try:
        with _hidden_frameworks(module):
            yield
    finally:
        for children, name, child in replaced:
            children[name] = child
        for name in functions:
            attributes.pop(name, None)
        attributes.update(previous)


# ---- the model that is split ---------------------------------------------------------------------


class MethodModule(nn.Module):
    """A model whose forward calls a method of the user's module. A pipe splits it.

    Args:
        module: The user's module. Its parameters have the prefix `module.` here.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, purpose: str, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call a method, and return its output with what it has logged."""
        if purpose == OUTPUT:
            return _call_method(self.module, method, args, kwargs)
        record, state = CallRecord(), _AttributeState(self.module)
        previous, _thread_state.record = _thread_state.record, record
        try:
            output = _call_method(self.module, method, args, kwargs)
        finally:
            _thread_state.record = previous
        values: dict[str, Any] = {}
        if purpose == LOSS:
            values, output = _split_loss(method, output)
        else:
            values["loss"] = torch.zeros(())  # there is none: a step needs one
        weight = values.get("weight", count_rows((args, kwargs)))
        return {
            **values,
            "output": {"is_none": "yes" if output is None else "no", "value": output},
            "appended": state.find_appended(self.module, method),
            "logs": [_pack_log(about, value, weight) for about, value in record.logs],
            "calls": [
                {"about": json.dumps(about), "arguments": arguments}
                for about, arguments in record.metric_calls
            ],
            "inverse_weight": _divide(1.0, weight),
        }


class _AttributeState:
    """The lists and numbers that a module has before a method runs.

    A stage runs the method on a copy of the module. What the method appends to a list, such as
    `self.outputs`, is an output, and the caller appends it to the list of the module itself.
    """

    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        self._names = frozenset(attributes)
        self._lengths = {k: len(v) for k, v in attributes.items() if type(v) is list}
        self._numbers = {k: v for k, v in attributes.items() if type(v) in _NUMBER_TYPES}

    def find_appended(self, module: nn.Module, method: str) -> dict[str, list[Any]]:
        """Return what was appended to lists, by attribute. Raise if a number has changed."""
        attributes = vars(module)
        for name, number in self._numbers.items():
            value = attributes.get(name)
            is_number = type(value) in _NUMBER_TYPES
            if value is not number and not (is_number and value == number):  # nan is not nan
                text = value if is_number else f"a value of type {type(value).__name__}"
                text = "a tensor" if isinstance(value, Tensor) else text
                raise RunError(
                    f"{method} changed self.{name} from {number} to {text}. In a "
                    "pipe it runs once for each micro-batch and stage, so the module would have "
                    "another value. Change it in a hook such as on_train_batch_start."
                )
        for name in attributes.keys() - self._names:
            # A private one is that of the framework.
            if not name.startswith("_") and _asks_for_attribute(type(module), name):
                raise RunError(
                    f"{method} creates self.{name}, and asks whether it is there already, as "
                    f"getattr(self, '{name}', 0) does. In a pipe it runs once for each micro-batch "
                    "and stage, on copies of the module, so it never is. Set it in __init__, and "
                    "change it in a hook such as on_train_batch_start."
                )
        appended = {}
        for name, length in self._lengths.items():
            items = attributes.get(name)
            if type(items) is list and len(items) > length:
                appended[name] = pytree.tree_map_only(Tensor, Tensor.detach, items[length:])
        return appended


_ATTRIBUTE_READERS = frozenset(("getattr", "hasattr", "vars", "__dict__"))


def _asks_for_attribute(module_class: type, name: str) -> bool:
    """Return whether the code of a module has the name of an attribute as a text, and reads by it.

    The text alone may be a key: `self.accuracy = accuracy; self.log("accuracy", accuracy)`.
    """
    functions = (
        value
        for base in module_class.__mro__
        if base is not nn.Module
        for value in vars(base).values()
    )
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    while codes:
        code = codes.pop()
        if name in code.co_consts and not _ATTRIBUTE_READERS.isdisjoint(code.co_names):
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _call_method(module: nn.Module, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    # `forward` runs with its hooks.
    function = module if method == "forward" else getattr(module, method)
    return function(*args, **kwargs)


def _pack_log(about: dict[str, Any], value: Any, weight: Any) -> dict[str, Any]:
    packed: dict[str, Any] = {"about": json.dumps(about)}
    if value is None:
        return packed
    # With the mean of these two, and that of 1 / weight, the sum of the micro-batches is known.
    return {**packed, "value": value, "part": _divide(value, weight)}


def _divide(value: Any, weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value / weight)
    return value / weight if weight else 0.0 * value


def _split_loss(method: str, output: Any) -> tuple[dict[str, Any], Any]:
    """Return the loss, perhaps with its weight, and the rest of what a training step returned."""
    loss, other_values = output, None
    if isinstance(output, Mapping):
        loss, other_values = output.get("loss"), {k: v for k, v in output.items() if k != "loss"}
    if isinstance(loss, Weighted):
        return {"loss": loss.loss, "weight": loss.weight}, other_values
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(output)}"
        raise RunError(
            f"{method} returned {kind}. A pipe needs a loss in every step: a tensor with one "
            "element, a dict with a 'loss', or penstock.Weighted. It cannot skip a batch."
        )
    return {"loss": loss}, other_values


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the size of dim 0 of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 0


# ---- the result of all micro-batches -------------------------------------------------------------


@dataclass(frozen=True)
class LoggedValue:
    """A value that a method has logged.

    Attributes:
        name: The name.
        options: The other arguments of `self.log`.
        mean: The mean of the micro-batches, weighted like the loss; None for a metric.
        total: The sum of the micro-batches.
        metric: The path of the metric that was logged, or None.
        call: The number of the call of a metric whose value was logged, or None.
    """

    name: str
    options: dict[str, Any]
    mean: Tensor | None = None
    total: Tensor | None = None
    metric: str | None = None
    call: int | None = None


@dataclass(frozen=True)
class MetricCall:
    """A call of a metric with the rows of the whole batch."""

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class MethodResult:
    """The result of a method on a whole batch.

    Attributes:
        loss: The loss. 0 if the method was not run for one.
        output: What the method returned beside the loss, or None.
        logs: What it logged.
        metric_calls: The metrics that it called.
        appended: What it appended to lists of the module, by attribute.
        count: The number of micro-batches.
    """

    loss: Tensor
    output: Any
    logs: tuple[LoggedValue, ...]
    metric_calls: tuple[MetricCall, ...]
    appended: dict[str, list[Any]]
    count: int

    @classmethod
    def from_metrics(cls, loss: Tensor, metrics: Mapping[str, Any], method: str) -> MethodResult:
        """Build the result from the metrics of a step of a `MethodModule`."""
        entries = [metrics["output"], metrics["appended"], *metrics["logs"], *metrics["calls"]]
        if not all(isinstance(entry, dict) for entry in entries):
            raise RunError(
                f"{method} returned, or logged, other values for one micro-batch than for another. "
                "Return and log the same ones for every micro-batch."
            )
        is_none = metrics["output"]["is_none"]
        count = len(is_none)
        output = None if "yes" in is_none else metrics["output"]["value"]
        inverse_weight = metrics["inverse_weight"]
        logs = []
        for entry in metrics["logs"]:
            abouts = [json.loads(text) for text in entry["about"]]
            about, options = abouts[0], abouts[0]["options"]
            if "batch_size" in options:  # that of a micro-batch
                options["batch_size"] = sum(other["options"]["batch_size"] for other in abouts)
            mean = entry.get("value")
            total = None if mean is None else count * entry["part"] / inverse_weight
            logs.append(
                LoggedValue(
                    about["name"], options, mean, total, about.get("metric"), about.get("call")
                )
            )
        calls = []
        for entry in metrics["calls"]:
            about = json.loads(entry["about"][0])
            arguments = entry["arguments"]
            calls.append(
                MetricCall(about["path"], about["method"], arguments["args"], arguments["kwargs"])
            )
        return cls(loss, output, tuple(logs), tuple(calls), metrics["appended"], count)


# ---- arguments -----------------------------------------------------------------------------------


def drop_unread_integers(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with 0 in place of the integers that a method does not read.

    Most methods take a `batch_idx` and do not use it. As another value may lead to another path,
    each new one would be traced anew.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return args
    names = code.co_varnames[inspect.ismethod(function) : code.co_argcount]
    read: set[str] = {*code.co_cellvars}
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD"):
            value = instruction.argval
            read.update(value if isinstance(value, tuple) else (value,))
    read_all = "locals" in code.co_names
    return tuple(
        0 if type(arg) is int and index < len(names) and not read_all and names[index] not in read
        else arg
        for index, arg in enumerate(args)
    )  # fmt: skip
