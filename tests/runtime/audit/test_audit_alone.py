"""The audit alone: with the fix of a cause switched off, the first step raises an AuditError.

Each row of the table is one way in which a pipe could compute other numbers than its model, and has
a fix of its own: something is computed differently, or refused. Here that fix is switched off. The
first test shows that the pipe then computes other numbers, and the second one that the audit finds
it. So a cause that nobody has thought of yet has a good chance of being found, too.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from penstock import AuditError, PenstockError, Pipe
from penstock.model import huggingface
from penstock.model.traced import dry_run, stage_forward, traced_partition
from penstock.model.traced.guards import LossCombination
from penstock.model.traced.proxies import ProxyModel, UnitStateTracker
from penstock.model.traced.settings import SettingsReader
from penstock.model.traced.shared_state import SharedState
from penstock.model.traced.stage_forward import StageInterpreter
from penstock.model.traced.traced_partition import TracedPartition
from penstock.model.traced.tracer import Tracer
from penstock.runtime import autograd_call, step
from penstock.stage import loss as loss_module
from penstock.stage import recompute, weight_grad
from penstock.stage.caller_context import CallerContext
from penstock.stage.recompute import RepeatCheck
from penstock.stage.stage import OUTSIDE
from penstock.stage.stage_runner import StageRunner
from penstock.torch_compat import NormBase

WIDTH, ROWS = 4, 8
Switch = Callable[[pytest.MonkeyPatch], None]
Numbers = dict[str, float | Tensor | None]


# ---- models and steps ------------------------------------------------------------------------


def mean_square(output: Any) -> Any:
    return output.square().mean()


@dataclass(frozen=True)
class Cause:
    """A cause of other numbers, with its fix switched off.

    Attributes:
        number: Its number in the list of known causes.
        build: Makes a model that has it.
        switch_off: Switches its fix off; the docstring says which.
        change: Changes the model after the pipe was made.
        calls_pipe: Whether it shows in `pipe(x)` and not in `pipe.step`.
        build_loss: Makes the loss function.
        surrounding: The context of a step.
        keywords: Inputs by name.
        options: Options of the pipe.
    """

    number: str
    build: Callable[[], nn.Module]
    switch_off: Switch
    change: Callable[[nn.Module], None] = lambda model: None
    calls_pipe: bool = False
    build_loss: Callable[[], Callable[[Any], Any]] = lambda: mean_square
    surrounding: Callable[[], AbstractContextManager[Any]] = nullcontext
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.number} {self.switch_off.__name__}"


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def rows(count: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)


def made(cause: Cause) -> nn.Module:
    torch.manual_seed(0)
    return cause.build()


def run_unsplit(cause: Cause) -> Numbers:
    """Run the unsplit model, on the whole batch if it does not matter and else by micro-batches."""
    model, loss_fn = made(cause), cause.build_loss()
    cause.change(model)
    chunks = 1 if cause.number in ("S13", "S14") else cause.options.get("chunks", 4)
    total = torch.zeros((), dtype=torch.float64)
    keywords = {name: value.chunk(chunks) for name, value in cause.keywords.items()}
    with cause.surrounding():
        for index, piece in enumerate(rows().chunk(chunks)):
            output = model(piece, **{name: pieces[index] for name, pieces in keywords.items()})
            loss = loss_fn(output)
            loss = (loss[0] if isinstance(loss, tuple) else loss) / chunks
            loss.backward()
            total += loss.detach()
    return read_numbers(model, total)


def run_pipe(cause: Cause, audit: str) -> Numbers:
    """Run the first step of a pipe."""
    model, loss_fn = made(cause), cause.build_loss()
    options = {"chunks": 4, "stages": 2, "schedule": "1f1b", "runtime": "inline", **cause.options}
    if type(model) is not nn.Sequential:
        example = {"x": rows(), **cause.keywords} if cause.keywords else (rows(),)
        options |= {"example": example, "balance": "parameters"}
    pipe = Pipe(model, devices=["cpu"] * options["stages"], audit=audit, **options)
    cause.change(model)
    with cause.surrounding():
        if not cause.calls_pipe:
            return read_numbers(pipe, pipe.step(rows(), loss_fn=loss_fn, **cause.keywords).loss)
        output = pipe(rows(), **cause.keywords)
        loss = loss_fn(output[0] if isinstance(output, list) else output)
        loss.backward()
    return read_numbers(pipe, loss.detach())


def read_numbers(model: nn.Module, loss: Tensor) -> Numbers:
    """Return everything that a step computes or changes."""
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    attributes = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name == "count"
    }
    return {"loss": loss, **gradients, **model.state_dict(), **attributes}


def differ(actual: Numbers, expected: Numbers) -> bool:
    for name, value in expected.items():
        other = actual.get(name)
        if value is None or other is None:
            if value is not other:
                return True
        elif not torch.allclose(torch.as_tensor(other), torch.as_tensor(value), 1e-6, 1e-9):
            return True
    return False


class Blocks(nn.Module):
    """A model that is traced: four blocks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def around(layer: nn.Module) -> nn.Sequential:
    """Return a Sequential whose first stage ends with the layer."""
    return nn.Sequential(linear(), layer, linear(), linear())


RECOMPUTED = {"checkpoint": "always", "chunks": 1}


def trust_recomputation(patch: pytest.MonkeyPatch) -> None:
    """Do not compare the first recomputation with its forward, which finds most of its causes."""
    patch.setattr(RepeatCheck, "compare", lambda *args: None)


# ---- any model -------------------------------------------------------------------------------


class DrawsInPlace(Blocks):
    def forward(self, x: Tensor) -> Any:
        scale = torch.zeros(len(x), 1, dtype=x.dtype).normal_(2.0, 0.0)
        for block in self.blocks:
            x = x + block(x) * scale
        return x


def draws_without_their_change(patch: pytest.MonkeyPatch) -> None:
    """Record a draw in place as a draw that changes nothing."""
    original = Tracer._trace_random

    def trace(self: Tracer, node: Any, function_call: Any, output: Any, mutated: Any) -> Any:
        return original(self, node, function_call, output, mutated=())

    patch.setattr(Tracer, "_trace_random", trace)


class Codebook(nn.Module):
    """Writes to its parameter, and asks a question that a dry run cannot answer on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.code.mul_(0.9).add_(0.1 * x.mean(0))
        return x * self.code if x.sum().item() < 1e9 else x


class Quantizes(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()

    def forward(self, x: Tensor) -> Any:
        return self.blocks[3](self.blocks[2](self.codebook(self.blocks[1](self.blocks[0](x)))))


def dry_runs_on_the_parameters(patch: pytest.MonkeyPatch) -> None:
    """Run a unit on dummy data with its own parameters, not with copies."""

    @contextmanager
    def replace_nothing(modules: Any, transform: Any, written: Any = None) -> Any:
        yield

    original = dry_run._run_on_real_tensors

    def run(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(dry_run, "_replace_module_tensors", replace_nothing)
            return original(*args)

    patch.setattr(dry_run, "_run_on_real_tensors", run)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        x = self.linear(x)
        scale = x.detach().abs().max().item()
        return x / scale, scale


class Rescales(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Any:
        x, scale = self.scaled(self.blocks[0](x))
        return self.blocks[3](self.blocks[2](self.blocks[1](x))) * scale


def python_values_of_the_trace(patch: pytest.MonkeyPatch) -> None:
    """Do not compare the Python values that a unit returns with those of the trace."""
    patch.setattr(stage_forward, "check_unit_output", lambda *args: None)


class Thresholds(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"threshold": -1e9}

    def forward(self, x: Tensor) -> Any:
        is_large = bool(x.mean() > self.options["threshold"])
        x = super().forward(x)
        return 2 * x if is_large else x


def raise_threshold(model: Any) -> None:
    model.options["threshold"] = 1e9


def settings_read_once(patch: pytest.MonkeyPatch) -> None:
    """Read Python values when the pipe is made, and compare no argument with that of the trace."""
    original, first = SettingsReader.read, dict[int, Any]()

    def read(self: SettingsReader) -> Any:
        return first.setdefault(id(self), original(self))

    patch.setattr(SettingsReader, "read", read)
    patch.setattr(StageInterpreter, "_check_guarded_arguments", lambda *args: None)


class Initializes(Blocks):
    mean: Tensor
    is_initialized: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_initialized", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if not self.is_initialized:
            self.mean.copy_(x.detach().mean(0))
            self.is_initialized.fill_(1)
        return super().forward(x) - self.mean


def paths_by_written_buffers(patch: pytest.MonkeyPatch) -> None:
    """Let the path depend on buffers that the forward writes."""
    patch.setattr(TracedPartition, "_check_asked_buffers", lambda self, plans: None)


class Holds(nn.Module):
    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__()
        self.linear, self.shared = linear(), shared

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.shared["scale"]


class SharesState(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.shared = {"scale": 1.0}
        self.blocks = nn.ModuleList(Holds(self.shared) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        self.shared["scale"] = 3.0
        return super().forward(x)


def shared_state_unseen(patch: pytest.MonkeyPatch) -> None:
    """Do not look whether the forward changes what a unit holds as well."""
    patch.setattr(UnitStateTracker, "is_stale", lambda self, unit: False)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = linear(), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.kept = x.detach()
        return self.linear(x)


class Reads(nn.Module):
    def __init__(self, keeper: Keeps) -> None:
        super().__init__()
        self.linear, self.keepers = linear(), [keeper]

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.keepers[0].kept


def build_keeping_layers() -> nn.Module:
    keeper = Keeps()
    return nn.Sequential(keeper, linear(), linear(), Reads(keeper))


def attributes_between_stages(patch: pytest.MonkeyPatch) -> None:
    """Do not watch the attributes that layers of several stages hold."""
    watch_nothing = [SharedState()] * 2
    patch.setattr("penstock.model.sequential.find_shared_state", lambda stages: watch_nothing)


class Tied(Blocks):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) @ self.blocks[0].weight


def assign_parameters(model: nn.Module) -> None:
    state = {name: 1.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replaced_tensors_unseen(patch: pytest.MonkeyPatch) -> None:
    """Do not look for tensors that were replaced after the pipe was made."""
    patch.setattr(TracedPartition, "check_unchanged", lambda self, children: None)


class ReturnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return x


class ChangesInPlace(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.identity = ReturnsItsInput()

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[1](self.blocks[0](x))
        y = self.identity(x)
        y.mul_(2)
        return self.blocks[3](self.blocks[2](x.clone()) + y) + x


def two_objects_for_one_tensor(patch: pytest.MonkeyPatch) -> None:
    """Let the forward go on with another object for an argument that a node returns."""
    patch.setattr(stage_forward, "_restore_arguments", lambda result, *_: result)


def replace_forward(model: Any) -> None:
    original = model.forward
    model.forward = lambda x: 2 * original(x)


def attributes_copied_once(patch: pytest.MonkeyPatch) -> None:
    """Do not follow attributes that are set after the pipe was made."""
    patch.setattr(ProxyModel, "sync_with_originals", lambda self: None)
    settings_read_once(patch)


class Packs(Blocks):
    """Takes rows whose positions restart apart if it has no cache, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, position_ids: Any = None, use_cache: bool | None = None) -> Any:
        has_cache = self.config.use_cache if use_cache is None else use_cache
        x = super().forward(x)
        is_packed = not has_cache and bool((position_ids.diff() != 1).any())
        return 2 * x if is_packed else x


def packed_positions(patch: pytest.MonkeyPatch) -> None:
    """Take positions that restart within a row, and turn the cache off."""
    patch.setattr(huggingface, "_check_not_packed", lambda model, kwargs: None)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Any:
        return 2 * weight


def build_parametrized_layers() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Doubled())
    return around(layer)


def parametrizations_cached(patch: pytest.MonkeyPatch) -> None:
    """Take calls inside the cache of parametrizations."""
    patch.setattr(step, "is_parametrization_cached", lambda: False)
    trust_recomputation(patch)


# ---- recomputation ---------------------------------------------------------------------------


class GrowingLoss(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor) -> Any:
        self.calls += 1
        return mean_square(output) + self.calls


def losses_that_run_twice(patch: pytest.MonkeyPatch) -> None:
    """Run the loss function in the forward as well, and not in the recomputation only."""
    original = loss_module.append_loss

    def append_loss(stages: Any, loss_fn: Any, *args: Any) -> Any:
        *others, last = stages

        def compute(inputs: Any) -> Any:
            outputs = last.compute(inputs)
            if recompute.is_checkpointing():
                loss_fn(*outputs[OUTSIDE])
            return outputs

        return original([*others, replace(last, compute=compute)], loss_fn, *args)

    patch.setattr(step, "append_loss", append_loss)


class MovesCode(Codebook):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.code.mul_(0.9).add_(0.1 * x.mean(0))
        return x * self.code


def parameters_written_twice(patch: pytest.MonkeyPatch) -> None:
    """Let a forward that is recomputed write to its parameters."""
    patch.setattr(StageRunner, "_find_parameter_write", lambda *args: None)
    trust_recomputation(patch)


class DrawsWithPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * random.random()


@contextmanager
def seeded() -> Any:
    random.seed(0)
    yield


def draws_from_the_shared_generator(patch: pytest.MonkeyPatch) -> None:
    """Let cells draw from `random` itself."""
    patch.setattr(StageRunner, "may_draw_host_random", False)
    trust_recomputation(patch)


class NormWithMemory(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Any:
        assert self.running_mean is not None
        return super().forward(x) * (1 + self.running_mean)


def statistics_not_restored(patch: pytest.MonkeyPatch) -> None:
    """Take the running statistics of every norm for ones that training never reads."""
    patch.setattr(recompute, "has_write_only_buffers", lambda module: isinstance(module, NormBase))
    trust_recomputation(patch)


SCALE = contextvars.ContextVar("scale", default=1.0)


class ScaledByContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * SCALE.get()


@contextmanager
def context_variable() -> Any:
    token = SCALE.set(3.0)
    yield
    SCALE.reset(token)


def context_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Run workers without the context variables of the caller."""
    patch.setattr(CallerContext, "copy_variables", lambda self: contextvars.Context())


class Counts(nn.Module):
    """Counts its calls. The count may set a rate or a temperature in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = linear(), 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.linear(x)


def attributes_not_restored(patch: pytest.MonkeyPatch) -> None:
    """Let a recomputation change the Python attributes of layers."""
    patch.setattr(recompute, "_restore_attributes", lambda snapshots: nullcontext())


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, x.detach()


class AsksForGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
        return self.linear(pair[0]) * (2 if pair[1].requires_grad else 1)


def build_detaching_layers() -> nn.Module:
    return nn.Sequential(linear(), Detaches(), AsksForGrad(), linear())


def detached_values_want_gradients(patch: pytest.MonkeyPatch) -> None:
    """Let every output of a recomputed stage arrive as one that needs a gradient."""
    patch.setattr(StageRunner, "_exclude_detached", lambda *args: None)
    trust_recomputation(patch)


# ---- doors, losses, schedules ----------------------------------------------------------------


class Equilibrium(nn.Module):
    """A deep equilibrium layer, which solves for its gradient in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def iterate(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.1 * self.linear(z) + x)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            z = self.iterate(self.iterate(x, x), x)
        z = self.iterate(z, x)
        start = z.detach().requires_grad_()
        again = self.iterate(start, x)

        def solve(gradient: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(again, start, gradient, retain_graph=True)
            return gradient + product

        z.register_hook(solve)
        return z


def own_gradients_counted(patch: pytest.MonkeyPatch) -> None:
    """Let W add the gradients of a layer's own `torch.autograd.grad`."""
    patch.setattr(weight_grad, "_is_inside_own_grad", lambda: False)


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x))


def outputs_in_objects(patch: pytest.MonkeyPatch) -> None:
    """Return objects that hide tensors from `pipe(x)`."""
    patch.setattr(autograd_call, "check_no_hidden_outputs", lambda *args: None)


class ReturnsMaximum(Blocks):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).max()


def every_number_is_a_mean(patch: pytest.MonkeyPatch) -> None:
    """Take every number that a model returns for a mean over rows."""
    patch.setattr(traced_partition, "find_loss_combination", lambda trace: LossCombination())


def loss_and_accuracy(output: Tensor) -> tuple[Tensor, Tensor]:
    return mean_square(output), (output > 0).double().mean()


def pairs_are_weighted_losses(patch: pytest.MonkeyPatch) -> None:
    """Take a pair of numbers for a loss and its weight."""
    original = loss_module.parse_loss

    def parse(result: Any, origin: str) -> Any:
        return original(loss_module.Weighted(*result), origin)

    patch.setattr(loss_module, "parse_loss", parse)


# ---- the table -------------------------------------------------------------------------------

POSITIONS = {"position_ids": torch.tensor([[0, 1, 0, 1]]).repeat(ROWS, 1)}

CAUSES = [
    Cause("S1", DrawsInPlace, draws_without_their_change),
    Cause(
        "S2",
        Quantizes,
        dry_runs_on_the_parameters,
        options={"chunks": 1, "checkpoint": "never"},
    ),
    Cause("S3", Rescales, python_values_of_the_trace, options={"chunks": 1}),
    Cause("S4", Thresholds, settings_read_once, raise_threshold),
    Cause("S5", Initializes, paths_by_written_buffers),
    Cause("S6", SharesState, shared_state_unseen),
    Cause(
        "S7",
        build_keeping_layers,
        attributes_between_stages,
        options={"schedule": "gpipe", "checkpoint": "never"},
    ),
    Cause(
        "S8",
        lambda: around(linear()),
        losses_that_run_twice,
        build_loss=GrowingLoss,
        options={"checkpoint": "always", "chunks": 1},
    ),
    Cause("S9", lambda: around(MovesCode()), parameters_written_twice, options=RECOMPUTED),
    Cause(
        "S10",
        lambda: around(DrawsWithPython()),
        draws_from_the_shared_generator,
        surrounding=seeded,
        options=RECOMPUTED,
    ),
    Cause(
        "S11",
        lambda: around(Equilibrium()),
        own_gradients_counted,
        options={"schedule": "zb-h1", "checkpoint": "never"},
    ),
    Cause(
        "S12",
        lambda: nn.Sequential(linear(), ReturnsBox()),
        outputs_in_objects,
        calls_pipe=True,
        build_loss=lambda: lambda box: mean_square(box.value),
        options={"chunks": 1, "checkpoint": "never"},
    ),
    Cause(
        "S13",
        ReturnsMaximum,
        every_number_is_a_mean,
        calls_pipe=True,
        build_loss=lambda: lambda number: number,
    ),
    Cause(
        "S14",
        lambda: around(linear()),
        pairs_are_weighted_losses,
        build_loss=lambda: loss_and_accuracy,
    ),
    Cause("S15", Tied, replaced_tensors_unseen, assign_parameters),
    Cause("S16", ChangesInPlace, two_objects_for_one_tensor, options={"stages": 3}),
    Cause(
        "S17",
        lambda: around(NormWithMemory(WIDTH, dtype=torch.float64)),
        statistics_not_restored,
        options=RECOMPUTED,
    ),
    Cause(
        "S18",
        lambda: around(ScaledByContext()),
        context_left_behind,
        surrounding=context_variable,
        options={"runtime": "threads"},
    ),
    Cause(
        "S19", lambda: around(Counts()), attributes_not_restored, options={"checkpoint": "always"}
    ),
    Cause("S20", Blocks, attributes_copied_once, replace_forward),
    Cause("S21", Packs, packed_positions, keywords=POSITIONS),
    Cause(
        "S22",
        build_parametrized_layers,
        parametrizations_cached,
        surrounding=parametrize.cached,
        options=RECOMPUTED,
    ),
    Cause("S23", build_detaching_layers, detached_values_want_gradients),
]

# Causes that the audit does not find, and the error of the step.
UNSEEN: dict[str, AbstractContextManager[Any]] = {
    # Making the pipe has changed the parameters. The unsplit model has the same ones.
    "S2": nullcontext(),
    # The reference fills the cache, too, so that the backward of the pipe fails.
    "S22": pytest.raises(RuntimeError, match="backward through the graph a second time"),
}


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_pipe_differs_from_the_model_without_the_fix(
    cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next test would show nothing."""
    cause.switch_off(monkeypatch)
    assert differ(run_pipe(cause, "off"), run_unsplit(cause))


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_audit_finds_the_cause_without_its_fix(
    cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause.switch_off(monkeypatch)
    with UNSEEN.get(cause.number) or pytest.raises(AuditError):
        run_pipe(cause, "first")


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_audit_finds_nothing_with_the_fix(cause: Cause) -> None:
    """The model is computed as it should be, or refused by something else than the audit."""
    try:
        run_pipe(cause, "first")
    except AuditError:
        raise
    except PenstockError:
        pass


def test_table_has_every_known_cause() -> None:
    assert [cause.number for cause in CAUSES] == [f"S{number}" for number in range(1, 24)]
    assert len(CAUSES) - len(UNSEEN) >= 20
