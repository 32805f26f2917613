"""Cut an `nn.Sequential` into stages.

Each child is a unit. A stage is a run of neighbouring children. A skip connection, which one layer
stashes and a later layer pops, is an additional edge of the stage graph:

    children   0   1 | 2 | 3   4        counts = (2, 1, 2)
    edges      0 ----> 1 ----> 2        each stage feeds the next
               0 ------------> 2        layer 1 stashes a tensor that layer 3 pops
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError, CutError, PenstockTypeError, RunError
from penstock.microbatch import check_inputs, have_equal_rows, move_to_device, scatter
from penstock.model.describe import describe_sequential
from penstock.model.partition import Partition, TensorExchange
from penstock.model.sequential_stage import (
    SideInputs,
    SkipRoute,
    build_sequential_stage,
    check_side_inputs,
    find_side_names,
    find_side_names_per_layer,
    select_side_inputs,
)
from penstock.model.stage_inputs import Batch, InputDevices, StageInputs, append_target
from penstock.model.traced.containers import HOOK_TABLES
from penstock.model.traced.shared_state import find_shared_state
from penstock.model.traced.traced_partition import UnitCost
from penstock.schedules.ir import StageGraph
from penstock.stage.skip import (
    SkipKey,
    Skips,
    popped_keys,
    stashed_keys,
    use_skips,
    verify_skippables,
)
from penstock.stage.stage import Stage


class PipeSequential(nn.Sequential):
    """A Sequential that unpacks tuples, and passes inputs by name to the layers that take them.

    If a layer returns a tuple, the next layer gets its elements as separate arguments. An input
    that is given by name (a side input) goes to every layer whose forward has a parameter of that
    name.

    Args:
        *args: The layers, as for `nn.Sequential`.

    >>> class Twice(nn.Module):
    ...     def forward(self, x):
    ...         return x, x
    >>> class Both(nn.Module):
    ...     def forward(self, a, b, factor=1):
    ...         return (a + b) * factor
    >>> PipeSequential(Twice(), Both())(torch.ones(2), factor=5)
    tensor([10., 10.])
    """

    def forward(self, *inputs: Any, **side: Any) -> Any:
        """Run the layers one after the other.

        Args:
            *inputs: The arguments of the first layer.
            **side: Side inputs. Each goes to every layer whose forward has a parameter of that
                name.

        Returns:
            The output of the last layer.

        Raises:
            PenstockTypeError: If no layer takes a side input.
        """
        value: Any = inputs
        # Without side inputs the layers' signatures need not be inspected.
        if not side:
            for layer in self:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
            return value
        side_names = find_side_names_per_layer(self, first=True)
        check_side_inputs(side, list(self._modules), side_names)
        for layer, names in zip(self, side_names, strict=True):
            values = value if isinstance(value, tuple) else (value,)
            value = layer(*values, **select_side_inputs(side, names))
        return value

    def side_names(self, first: bool) -> frozenset[str]:
        """Return the side inputs that the layers take.

        Args:
            first: Whether no layer runs before these.
        """
        return frozenset().union(*find_side_names_per_layer(self, first))


class WithDevice(nn.Module):
    """A wrapper that places a layer without parameters, such as a ReLU, on a device.

    A Sequential that is given to `Pipe` without `stages=` and `devices=` is cut where the device of
    its layers changes. A layer without parameters stays with the layer before it, unless it is
    wrapped.

    Args:
        module: The layer.
        device: The device that it runs on.

    >>> layer = WithDevice(nn.ReLU(), "cpu")
    >>> layer.device
    device(type='cpu')
    >>> layer(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return self.module(*args, **kwargs)

    def side_names(self, first: bool) -> frozenset[str]:
        """Return the side inputs that the layer takes.

        Args:
            first: Whether the layer is the first one, which takes positional inputs, too.
        """
        return find_side_names(self.module, first)


def list_module_tensors(layer: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a layer."""
    return [*layer.parameters(), *layer.buffers()]


def find_layer_device(
    layer: nn.Module, owned_by_earlier_layers: Collection[torch.Tensor] = ()
) -> torch.device | None:
    """Return the device of the layer's parameters and buffers, or None if it has none.

    Tied tensors that an earlier layer has, too, may be on that layer's device. They count only if
    the layer has no others.
    """
    if isinstance(layer, WithDevice):
        return layer.device
    tensors = list_module_tensors(layer)
    devices = {t.device for t in tensors if t not in owned_by_earlier_layers} or {
        t.device for t in tensors
    }
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ArgumentError(
            f"one child has parameters on several devices, {names}: {layer}\n"
            "A child must be on one device. Split it into several children."
        )
    return devices.pop() if devices else None


def group_by_device(children: Sequence[nn.Module]) -> tuple[list[int], list[torch.device]]:
    """Make a stage of each run of neighbours on one device.

    Returns the number of children of each stage, and the device of each. A child without parameters
    stays with the one before it. Children without parameters at the beginning go with the first one
    that has a device.
    """
    counts: list[int] = []
    stage_devices: list[torch.device] = []
    child_devices: list[torch.device | None] = []
    earlier_tensors: set[torch.Tensor] = set()
    for child in children:
        child_devices.append(find_layer_device(child, earlier_tensors))
        earlier_tensors.update(list_module_tensors(child))
    first_device = next((d for d in child_devices if d is not None), torch.device("cpu"))
    for child_device in child_devices:
        device = child_device or (stage_devices[-1] if stage_devices else first_device)
        if stage_devices and stage_devices[-1] == device:
            counts[-1] += 1
        else:
            counts.append(1)
            stage_devices.append(device)
    return counts, stage_devices


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether the module is a Sequential that runs its children one after the other.

    One with another forward, of a subclass or of its own, is traced like any other module. So is
    a subclass that calls itself, or iterates over its children, in another way.
    """
    plain = (nn.Sequential.forward, PipeSequential.forward)
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward in plain
        and type(module).__call__ is nn.Module.__call__
        and type(module).__iter__ is nn.Sequential.__iter__
        and vars(module).get("forward", refuse_forward) is refuse_forward
    )


def refuse_forward(*_: object, **__: object) -> NoReturn:
    """Stand in for the forward of a model of which this process trains only a part."""
    raise RunError(
        "this model was given to a Pipe over several processes, and this process has trained only "
        "its own stages. The other layers have old weights here. Call the pipe instead, and "
        "pipe.generate for text. For the whole model, write it with pipe.export(file) and load the "
        "file into a new model."
    )


class SequentialRef:
    """A weak reference to the Sequential that a pipe was made from. Copies refer to nothing.

    Nothing calls the Sequential itself, so what is added to it later would not run.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module: Callable[[], nn.Module | None] = (
            (lambda: None) if module is None else weakref.ref(module)
        )

    def __reduce__(self) -> tuple[type[SequentialRef], tuple[()]]:
        return SequentialRef, ()

    def check_unchanged(self) -> None:
        """Raise if the Sequential has got hooks, or another forward."""
        module = self._module()
        if module is None:
            return
        if any(map(vars(module).get, HOOK_TABLES)):
            raise RunError(
                "the Sequential itself has got hooks after the pipe was made, which would not run. "
                "Register them on its layers, or on the pipe, which runs them in pipe(x)."
            )
        if vars(module).get("forward", refuse_forward) is not refuse_forward:
            raise RunError(
                "the forward of the Sequential was replaced after the pipe was made, and would not "
                "run. Make the Pipe after the change."
            )


def check_model(module: nn.Module, chunks: int = 1) -> None:
    """Raise if the argument is not a module, or is one that cannot be cut."""
    if not isinstance(module, nn.Module):
        raise PenstockTypeError(
            f"a pipe needs an nn.Module, not {type(module).__name__}. {_suggest_model(module)}"
        )
    # A subclass may have a forward, and so may an instance.
    if type(module) in (nn.ModuleList, nn.ModuleDict) and "forward" not in vars(module):
        raise PenstockTypeError(
            f"an nn.{type(module).__name__} has no forward, so it is not a model that a pipe could "
            "run. Write nn.Sequential(*layers)."
        )
    _check_not_dispatched(module)
    for name, layer in module.named_modules() if chunks > 1 else ():
        if getattr(layer, "scale_grad_by_freq", None) is True:
            raise ArgumentError(
                f"'{name}' ({type(layer).__name__}) has scale_grad_by_freq=True, which divides "
                "gradients by how often an index occurs in a batch. A micro-batch would count its "
                "own indices only. Use chunks=1, or leave the option out."
            )
    if is_plain_sequential(module):
        check_children(module)
        verify_skippables(module)


def _suggest_model(value: Any) -> str:
    """Return how to make a model of something that is not one."""
    if isinstance(value, type):
        return f"Make an object of the class: {value.__name__}(...)."
    if isinstance(value, str):
        return "Load the model first, for example with from_pretrained, and pass the object."
    if isinstance(value, Iterable):
        return "Put the layers into an nn.Sequential: nn.Sequential(*layers)."
    if hasattr(value, "get_fwd_recv_ops"):  # a PipelineStage of torch.distributed.pipelining
        return "Pass the whole model: a pipe makes the stages itself, with stages=4."
    if callable(value):
        return "Call the function, and pass the model that it returns."
    return "Pass the model itself."


def _check_not_dispatched(module: nn.Module) -> None:
    """Raise if accelerate moves the inputs of layers, because of `device_map=`."""
    for layer in module.modules():
        hook = getattr(layer, "_hf_hook", None)
        # Hooks that move tensors have an execution device. Several hooks are in a list.
        if any(hasattr(h, "execution_device") for h in getattr(hook, "hooks", [hook])):
            raise CutError(
                "the model was loaded with device_map=, so accelerate moves tensors from layer to "
                "layer, which contradicts the stages of a pipe. Load the model without device_map; "
                "Pipe(model, stages=4, example=batch) places its layers on devices."
            )


def check_children(module: nn.Module) -> None:
    """Raise if the module is not a Sequential with children, each in one place."""
    if not isinstance(module, nn.Sequential):
        raise PenstockTypeError(
            f"a pipe needs an nn.Sequential, not {type(module).__name__}. Write the model "
            "as nn.Sequential(layer, layer, ...), or use penstock.Pipe, which cuts any module."
        )
    if not is_plain_sequential(module):
        raise PenstockTypeError(
            f"{type(module).__name__} has a forward of its own, which a pipe would not run. Pass "
            "the layers as a plain nn.Sequential, and put the rest of the forward into a layer."
        )
    # The stages call the children, and nothing calls the Sequential itself.
    if any(getattr(module, name, None) for name in HOOK_TABLES):
        raise ArgumentError(
            "the Sequential itself has hooks, which a pipe would not run. Register them on its "
            "layers, or on the pipe, which runs them in pipe(x)."
        )
    if not len(module):
        raise ArgumentError("the Sequential is empty. A pipe needs at least one layer.")
    # A child that occurs twice would belong to two stages, which cannot both own its parameters.
    names_by_child: dict[int, list[str]] = {}
    for name, child in module._modules.items():
        names_by_child.setdefault(id(child), []).append(name)
    duplicates = [" and ".join(names) for names in names_by_child.values() if len(names) > 1]
    if duplicates:
        raise ArgumentError(
            f"the same layer is in several places, {', '.join(duplicates)}: duplicate children are "
            "not supported. Make a layer for each place. If the places share parameters, write "
            "nn.Sequential(layer) in all but the first: tied parameters are found."
        )


@dataclass(frozen=True, eq=False, repr=False)
class SequentialPartition(Partition):
    """A Sequential cut between its layers.

    Attributes:
        skip_routes: The skips that cross stages: key, stage that stashes, stage that pops.
        side_names: The names of the side inputs that each layer takes, by stage.
        source: The Sequential.
    """

    skip_routes: tuple[SkipRoute, ...]
    side_names: tuple[tuple[frozenset[str], ...], ...]
    source: SequentialRef = field(default_factory=SequentialRef)

    needs_whole_batch = False

    def has_input(self, name: str) -> bool:
        """Return whether a layer takes an input of this name."""
        return any(name in names for stage in self.side_names for names in stage)

    @cached_property
    def _layers(self) -> dict[str, nn.Module]:
        """The layers of this process, by name. Stages of other processes have none."""
        return {n: m for s in self.stages for n, m in zip(s.names, s.layers, strict=False)}

    def named_roots(self) -> list[tuple[str, nn.Module]]:
        """Return the layers with their names."""
        return list(self._layers.items())

    @property
    def wrapper_modules(self) -> list[nn.Module]:
        """The modules that `stage_fn` has put around the layers."""
        return [module for stage in self.stages for module in stage.wrappers]

    def children(self) -> dict[str, nn.Module | None]:
        """Return the layers of this process."""
        return dict(self._layers)

    def root(self, model: nn.Module) -> nn.Module:
        """Return the Sequential."""
        return model

    def check_unchanged(self, children: Mapping[str, nn.Module | None]) -> None:
        """Raise if the children of a pipe are not the layers that its stages were cut from."""
        self.source.check_unchanged()
        # `pipe[0] = layer` changes the children of the pipe, but the stages refer to the old
        # layers. The new one would be saved and optimised, but it would not run.
        layers = self._layers
        if list(children) != list(layers):
            raise RunError(
                f"the pipe was made from the layers {', '.join(layers)}, but now has "
                f"{', '.join(children)}. Make the Pipe after the change."
            )
        if not all(map(is_, children.values(), layers.values())):
            name = next(name for name in layers if children[name] is not layers[name])
            raise RunError(
                f"layer '{name}' was replaced after the pipe was made, and would not run. "
                "Make the Pipe after the change, or change the inside of the layer."
            )

    def refresh(self, cast: Callable[[Tensor], Tensor]) -> None:
        """Do nothing: all tensors of the stages are those of the pipe's children."""

    def check_stage_fn_allowed(self) -> None:
        """Do nothing: each stage is a `StageModule`."""

    def build_stage_inputs(self, batch: Batch, devices: InputDevices) -> StageInputs:
        """Split a batch. The batch goes to the first stage, a side input to all that take it."""
        inputs, keyword_inputs, target = batch.inputs, batch.keyword_inputs, batch.target
        check_inputs(inputs, keyword_inputs.values(), devices.get(0))
        consumers = self._find_consumers(keyword_inputs) if keyword_inputs else {}
        last_stage = len(self.stages) - 1
        # All values are split by one call of `scatter`, which checks that their rows agree. A
        # keyword input that stages on several devices take is moved once to each device, before
        # the split.
        values, names = list(inputs), [f"input {index}" for index in range(len(inputs))]
        value_indices: dict[tuple[str, torch.device | None], int] = {}
        for name, stages in consumers.items():
            for device in dict.fromkeys(map(devices.get, stages)):
                value_indices[name, device] = len(values)
                values.append(move_to_device(keyword_inputs[name], device))
                names.append(name)
        for value in target:
            values.append(move_to_device(value, devices.get(last_stage)))
            names.append("target")
        unsplit = tuple(values)
        pieces, rows = scatter(unsplit, batch.chunks, names)
        by_stage = {0: [piece[: len(inputs)] for piece in pieces]}
        for stage in sorted({stage for stages in consumers.values() for stage in stages}):
            stage_indices = {
                name: value_indices[name, devices.get(stage)]
                for name in consumers
                if stage in consumers[name]
            }
            positional_inputs = by_stage.get(stage, [()] * len(pieces))
            by_stage[stage] = [
                (*values, SideInputs({name: piece[index] for name, index in stage_indices.items()}))
                for values, piece in zip(positional_inputs, pieces, strict=True)
            ]
        if target:
            append_target(by_stage, last_stage, [piece[-1] for piece in pieces])
        return StageInputs(
            {stage: values for stage, values in by_stage.items() if stage in devices},
            rows,
            len(pieces),
            self.graph,
            bool(target) and last_stage in devices,
            unsplit_tensors=unsplit if not keyword_inputs and have_equal_rows(unsplit) else (),
        )

    def _find_consumers(self, keyword_inputs: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the stages that take each keyword input."""
        layers = [name for stage in self.stages for name in stage.names]
        check_side_inputs(keyword_inputs, layers, [n for stage in self.side_names for n in stage])
        return {
            name: [i for i, stage in enumerate(self.side_names) if any(name in n for n in stage)]
            for name in keyword_inputs
        }

    def describe_skips(self) -> list[str]:
        """Return a line of text for each pair of stages that a skip connects."""
        skips = Counter((key.name, src, dst) for key, src, dst in self.skip_routes)
        return [
            f"skip {name!r}: stage {src} to {dst}" + f", {times} times" * (times > 1)
            for (name, src, dst), times in skips.items()
        ]

    def describe_cut(self) -> dict[str, str]:
        """Return nothing: rank 0 sends the counts, and they decide the cut."""
        return {}

    def find_unit_stages(self) -> dict[str, list[int]]:
        """Return the stage of each layer."""
        return {name: [stage.index] for stage in self.stages for name in stage.names}

    def find_function_stages(self) -> dict[Any, list[int | None]]:
        """Return nothing: all operations are in layers."""
        return {}

    def run_unsplit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run all layers one after the other."""
        return _UnsplitSequential(self.stages)(*args, **kwargs)

    def run_method(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        placement: Sequence[int],
        exchange: TensorExchange | None,
    ) -> Any:
        """Raise: the stages run the layers of a Sequential, and never the Sequential itself."""
        raise PenstockTypeError(
            f"pipe.{name} runs the {name} of the model, and a Sequential has none. Put the layers "
            f"into a module with a forward and a {name} of its own, and make the Pipe from it with "
            "example=."
        )

    def count_loss_targets(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Return None: a layer that computes a loss does not show how it counts."""


class _UnsplitSequential(nn.Sequential):
    """All layers as one module, so that hooks for all modules see it as they see the model."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self._stages = stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        value: Any = None
        with use_skips(Skips()):
            for stage in self._stages:
                compute: Any = stage.compute  # a `SequentialStage`
                values = (value,) if stage.index else args
                value = compute.module.run_layers(*values, **kwargs)
        return value


def cut_sequential(
    module: nn.Sequential, counts: Sequence[int], costs: Sequence[UnitCost] | None = None
) -> SequentialPartition:
    """Cut a Sequential into stages with these numbers of children.

    `costs` are those of the children, if they were measured: for the report.
    """
    names, children = zip(*module._modules.items(), strict=True)
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    routes = tuple(_find_skip_routes([children[part] for part in slices]))
    graph = StageGraph.chain(len(counts), [(src, dst) for _, src, dst in routes])
    unpack = isinstance(module, PipeSequential)
    layer_side_names = find_side_names_per_layer(children, first=True)
    side_names = tuple(tuple(layer_side_names[part]) for part in slices)
    shared_state = find_shared_state(
        [[m for layer in children[part] for m in layer.modules()] for part in slices]
    )
    stages = tuple(
        Stage(
            index,
            names[part],
            children[part],
            build_sequential_stage(
                index,
                dict(zip(names[part], children[part], strict=True)),
                unpack,
                routes,
                is_last=index == len(counts) - 1,
                side_names=side_names[index],
                shared_state=shared_state[index],
            ),
        )
        for index, part in enumerate(slices)
    )
    outline = describe_sequential(module, counts, routes, costs)
    source = SequentialRef(module)
    return SequentialPartition(stages, graph, outline, None, routes, side_names, source)


def _find_skip_routes(stages: Sequence[Sequence[nn.Module]]) -> Iterator[SkipRoute]:
    """Yield the skips that cross stages: the key, the stage that stashes and the one that pops.

    In one stage, pops are looked up before stashes are added: a skip that is stashed and popped in
    the same stage never leaves it.
    """
    stashed: dict[SkipKey, int] = {}
    for stage, children in enumerate(stages):
        inner = [module for child in children for module in child.modules()]
        for dst_key in dict.fromkeys(key for module in inner for key in popped_keys(module)):
            if dst_key in stashed:
                yield dst_key, stashed[dst_key], stage
        for module in inner:
            stashed.update(dict.fromkeys(stashed_keys(module), stage))
