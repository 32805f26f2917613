"""`PipedModule`: a user's module whose methods run as a pipeline, for frameworks that call them.

A framework keeps the user's module, its optimizers and its own order of events:

    loss = training_step(batch)     forward, loss and backward under the schedule: `pipe.step`. The
                                    gradients are kept apart from `.grad`
    optimizer.zero_grad()
    (loss / 4).backward()           adds the kept gradients, times 1/4, to `.grad`
    optimizer.step()

So accumulation, loss scaling, hooks and several losses work as they do with autograd, and the
pipe still runs under any schedule and over processes, where `pipe(x)` has no backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.integrations.method_calls import (
    LOSS,
    OUTPUT,
    VALUES,
    LoggedValue,
    MethodModule,
    MethodResult,
    MetricRecorder,
    drop_unread_integers,
    find_metrics,
    recorded_calls,
)
from penstock.model.isolation import preserve_rng
from penstock.model.traced.local_model import AttributeMirror
from penstock.pipe import Pipe
from penstock.runtime.step import StepResult
from penstock.torch_compat import keeps_graph, pytree

PREFIX = "module."  # of the names of a MethodModule

# Relative differences that rounding explains, between a batch as a whole and in micro-batches.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_ROUNDING = 5e-2  # of half precision, also inside autocast


# ---- the loss ------------------------------------------------------------------------------------


class _ComputedGradients(torch.autograd.Function):
    """A loss whose gradients are known already. Its backward multiplies them by its own gradient.

    Gradients are linear in that factor, so the result is what a backward through the graph of the
    loss would add to `.grad`.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor | None], scale: float, *parameters: Tensor
    ) -> Tensor:
        """Return the loss."""
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of the parameters."""
        if ctx.gradients is None:
            raise RunError(
                "the gradients of this loss were already added to .grad. Call backward with "
                "retain_graph=True to add them twice."
            )
        factor = grad_outputs[0] / ctx.scale
        gradients: list[Tensor | None] = ctx.gradients
        # Without another backward to come, they need no further memory.
        multiply = torch.mul if keeps_graph() else Tensor.mul_
        scaled = [
            None if gradient is None else multiply(gradient, factor.to(gradient.device))
            for gradient in gradients
        ]
        if not keeps_graph():
            ctx.gradients = None
        return None, None, None, *scaled


def attach_gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> Tensor:
    """Return a loss whose backward adds these gradients, divided by `scale`, to the parameters."""
    # On a rank without any parameter that trains, the loss must have a backward, too.
    anchor = torch.zeros((), requires_grad=True)
    attached: Tensor = _ComputedGradients.apply(  # type: ignore[no-untyped-call]
        loss, [None, *gradients], scale, anchor, *parameters
    )
    return attached


@contextmanager
def _apart_from_grad(parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Collect the gradients that are computed in the context, and leave `.grad` as it is."""
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    gradients: dict[nn.Parameter, Tensor] = {}
    try:
        yield gradients
        gradients.update((p, p.grad) for p in parameters if p.grad is not None)
    finally:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient


# ---- the module ----------------------------------------------------------------------------------


class PipedModule:
    """A module whose methods run as a pipeline. The pipe is made with the first batch.

    Args:
        module: The user's module. With processes, its parameters of other ranks are replaced by
            tensors on `meta` when the pipe is made.
        build_pipe: Makes the pipe from a model and an example.
        on_build: Called when the pipe is made, before parameters are replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        build_pipe: Callable[[nn.Module, Any], Pipe],
        on_build: Callable[[PipedModule], None],
    ) -> None:
        self.module = module
        self._build_pipe, self._on_build = build_pipe, on_build
        self._mirror: AttributeMirror | None = None
        self._metrics = find_metrics(module)
        self._recorders = {path: MetricRecorder(path) for path in self._metrics}
        # How values of micro-batches form that of the batch: "mean" or "sum", by method and name.
        self._reductions: dict[tuple[str, str], str] = {}
        self._checked_methods: set[str] = set()
        self._defers_average = self._has_unaveraged_gradients = False
        self.pipe: Pipe | None = None  # before the first batch
        self.result: StepResult | None = None  # of the last training step

    @property
    def is_partial(self) -> bool:
        """Whether other processes have some of the parameters."""
        return self.pipe is not None and self.pipe._topology is not None

    # ---- calls ----------------------------------------------------------------------------

    def compute_loss(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], scaler: Any = None
    ) -> MethodResult:
        """Run forward, loss and backward of a method that returns a loss.

        `loss.backward()` of the result adds the gradients to `.grad`. A `scaler` keeps gradients
        in half precision from becoming 0; it does not change the result.
        """
        inputs = self._build_inputs(LOSS, method, args, kwargs)
        with self._call(inputs) as pipe:
            if not torch.is_grad_enabled():
                return self._finish(pipe.step(*inputs), inputs)
            parameters = [p for p in pipe.parameters() if p.requires_grad]
            with self._reduction(pipe), _apart_from_grad(parameters) as gradients:
                step_result = pipe.step(*inputs, scaler=scaler)
            result = self._finish(step_result, inputs)
            self.result = _with_metrics_of_method(step_result, result)
        values = list(gradients.values())
        if step_result.ran.runtime == "graph":  # the next replay writes to the same memory
            values = [gradient.clone() for gradient in values]
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        return replace(result, loss=attach_gradients(result.loss, list(gradients), values, scale))

    @contextmanager
    def deferred_average(self) -> Iterator[None]:
        """Keep losses in the context from averaging their gradients over the replicas.

        The first loss after the context averages what has been accumulated in `.grad`, and its own
        gradients. So a step of the optimizer averages twice, however many batches it accumulates.
        """
        previous, self._defers_average = self._defers_average, True
        try:
            yield
        finally:
            self._defers_average = previous

    def _reduction(self, pipe: Pipe) -> AbstractContextManager[None]:
        """Average gradients that wait for it. Return a context that says if this step averages."""
        # Wrappers such as FSDP keep the gradients of `no_sync` to themselves, out of `.grad`.
        if self._defers_average and pipe._replicas.is_empty:
            self._has_unaveraged_gradients = True
            return pipe.no_sync()
        if self._has_unaveraged_gradients:
            pipe._engine.average_gradients()
            self._has_unaveraged_gradients = False
        return nullcontext()

    def compute_values(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> MethodResult:
        """Run a method without gradients, and return its output and what it has logged."""
        inputs = self._build_inputs(VALUES, method, args, kwargs)
        with torch.no_grad(), self._call(inputs) as pipe:
            return self._finish(pipe.step(*inputs), inputs)

    def call_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the module's forward. In one process, it has a graph."""
        inputs = (OUTPUT, "forward", args, kwargs)
        with self._call(inputs) as pipe:
            return pipe(*inputs)

    def build(self, method: str, args: tuple[Any, ...]) -> None:
        """Make the pipe with an example of the arguments of a training step."""
        with self._call(self._build_inputs(LOSS, method, args, {})):
            pass

    def apply_result(self, result: MethodResult, method: str) -> None:
        """Update the metrics and lists of the module, and log values, as recorded."""
        module: Any = self.module
        for name, items in result.appended.items():
            getattr(module, name).extend(items)
        values = [
            getattr(self._metrics[call.path], call.method)(*call.args, **call.kwargs)
            for call in result.metric_calls
        ]
        for entry in result.logs:
            if entry.mean is not None:
                module.log(entry.name, self._reduce(entry, method), **entry.options)
                continue
            value = self._metrics[entry.metric or ""] if entry.call is None else values[entry.call]
            if entry.name:
                module.log(entry.name, value, **entry.options)
            else:
                module.log_dict(value, **entry.options)

    def _build_inputs(
        self, purpose: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
        function = getattr(self.module, method)
        return purpose, method, drop_unread_integers(function, args), kwargs

    @contextmanager
    def _call(self, inputs: tuple[Any, ...]) -> Iterator[Pipe]:
        with recorded_calls(self.module, self._recorders):
            if self.pipe is None:
                self._build(inputs)
            assert self.pipe is not None
            if self._mirror is not None:
                self._mirror.sync()
            # The modes of the children stay: some of them may be frozen.
            vars(self.pipe)["training"] = self.module.training
            yield self.pipe

    def _build(self, example: tuple[Any, ...]) -> None:
        model = MethodModule(self.module)
        model.training = self.module.training
        self.pipe = self._build_pipe(model, example)
        local_model: Any = self.pipe._placed_partition.partition.model
        if self.is_partial:
            self._mirror = AttributeMirror(self.module, local_model.module)
        self._on_build(self)
        if self.is_partial:
            self._release_remote_parameters()

    def list_remote_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the module that other processes have."""
        if not self.is_partial:
            return []
        assert self.pipe is not None
        local = {id(parameter) for parameter in self.pipe.parameters()}
        return [p for p in self.module.parameters() if id(p) not in local]

    def _release_remote_parameters(self) -> None:
        """Put parameters of other processes on `meta`, so that nothing uses old ones."""
        released = {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            for parameter in self.list_remote_parameters()
        }
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in released:
                    module._parameters[name] = released[id(parameter)]

    # ---- a batch as a whole ----------------------------------------------------------------

    def _finish(self, step_result: StepResult, inputs: tuple[Any, ...]) -> MethodResult:
        """Return the result of a step.

        The first step of a method shows how its values depend on the micro-batches.
        """
        assert self.pipe is not None
        method = inputs[1]
        loss = step_result.loss.to(self.pipe.device)
        result = MethodResult.from_metrics(loss, step_result.metrics, method)
        if result.count == 1:
            return result
        is_new = method not in self._checked_methods
        if is_new or any(self._is_undetermined(entry, method) for entry in result.logs):
            self._compare_with_whole_batch(inputs)
            self._checked_methods.add(method)
        return result

    def _is_undetermined(self, entry: LoggedValue, method: str) -> bool:
        """Return whether it is not known if a value is a mean or a sum, and makes a difference."""
        if entry.mean is None or entry.total is None or (method, entry.name) in self._reductions:
            return False
        return not torch.equal(entry.mean.double(), entry.total.double())

    def _reduce(self, entry: LoggedValue, method: str) -> Tensor:
        """Return the value of the whole batch."""
        assert entry.mean is not None
        assert entry.total is not None
        is_sum = self._reductions.get((method, entry.name)) == "sum"
        return entry.total.to(entry.mean.dtype) if is_sum else entry.mean

    def _compare_with_whole_batch(self, inputs: tuple[Any, ...]) -> None:
        """Run a method on the batch as one micro-batch, too, and compare what it returns.

        Both runs are without gradients and in eval mode, because dropout draws other numbers for
        other micro-batches. If the method draws numbers itself, nothing can be compared; then a
        logged value counts as what is nearer.

        Raises:
            RunError: The loss, or another number, is neither a mean nor a sum over micro-batches.
        """
        pipe, (purpose, method, *_) = self.pipe, inputs
        assert pipe is not None
        modes = {module: module.training for module in self.module.modules()}
        chunks, generator_state = pipe.chunks, torch.get_rng_state()
        with torch.no_grad(), preserve_rng(pipe.device):
            try:
                self._set_modes(dict.fromkeys(modes, False))
                parts = pipe.step(*inputs)
                vars(pipe)["chunks"] = 1
                whole = pipe.step(*inputs)
                is_random = not torch.equal(torch.get_rng_state(), generator_state)
            finally:
                vars(pipe)["chunks"] = chunks
                self._set_modes(modes)
        results = [MethodResult.from_metrics(r.loss, r.metrics, method) for r in (parts, whole)]
        if purpose == LOSS and not is_random and pipe.audit != "off":
            _check_equal(f"the loss of {method}", results[0].loss, results[1].loss)
        self._choose_reductions(method, results[0], results[1], is_random)
        if not is_random:
            numbers = [list(_iter_numbers(result)) for result in results]
            for number, expected in zip(*numbers, strict=False):
                _check_equal(
                    f"a number that {method} returns or gives to a metric", number, expected
                )

    def _choose_reductions(
        self, method: str, parts: MethodResult, whole: MethodResult, is_random: bool
    ) -> None:
        expected = {entry.name: entry.mean for entry in whole.logs if entry.mean is not None}
        for entry in parts.logs:
            value = expected.get(entry.name)
            if entry.mean is None or entry.total is None or value is None:
                continue
            if torch.equal(entry.mean.double(), entry.total.double()):
                continue  # all 0: nothing is known yet
            distances = [
                abs(float(candidate) - float(value)) for candidate in (entry.mean, entry.total)
            ]
            is_sum = distances[1] < distances[0]
            self._reductions[method, entry.name] = "sum" if is_sum else "mean"
            if not is_random:
                name = f"self.log({entry.name!r}) in {method}"
                _check_equal(name, entry.total if is_sum else entry.mean, value)

    def _set_modes(self, modes: Mapping[nn.Module, bool]) -> None:
        for module, mode in modes.items():
            module.training = mode
        if self._mirror is not None:
            self._mirror.sync()
        assert self.pipe is not None
        vars(self.pipe)["training"] = self.module.training


def _with_metrics_of_method(step_result: StepResult, result: MethodResult) -> StepResult:
    """Return a step whose metrics are what the method returned beside the loss.

    Those of the `MethodModule` also have what was logged, which the framework logs itself.
    """
    returned = result.output if isinstance(result.output, dict) else {}
    return replace(step_result, combined_metrics=returned)


def _iter_numbers(result: MethodResult) -> Iterator[Tensor]:
    """Yield the numbers that a method returned, or gave to metrics."""
    arguments = [(call.args, call.kwargs) for call in result.metric_calls]
    for leaf in pytree.tree_leaves((result.output, result.appended, arguments)):
        if isinstance(leaf, Tensor) and not leaf.dim():
            yield leaf


def _check_equal(name: str, value: Tensor, expected: Tensor) -> None:
    """Raise if a number of the micro-batches is not that of the whole batch."""
    tolerance = _ROUNDING.get(value.dtype, _COARSE_ROUNDING)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        tolerance = _COARSE_ROUNDING
    a, b = float(value), float(expected)
    if abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6) or (isnan(a) and isnan(b)):
        return
    raise RunError(
        f"{name} is {b:.6g} for the whole batch, but {a:.6g} from its micro-batches, so it is no "
        "mean over rows. Compute it from each row by itself, return penstock.Weighted(loss, "
        "weight) if it counts something else than rows, use a metric of torchmetrics for values to "
        "log, or set chunks=1."
    )
