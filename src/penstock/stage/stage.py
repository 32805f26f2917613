"""A stage: layers that run as one piece, and a record of how they have behaved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.fingerprint import CachedHash, ModuleSnapshot, SnapshotMemo
from penstock.stage.recompute import SilentWrites, WrittenAttribute

# The index of the caller as a neighbour of stages: it feeds the batch in and takes the outputs.
OUTSIDE = -1

# The computation of a stage: from the values that each source sent to the values for each
# destination. Sources and destinations are stage indices or OUTSIDE.
StageFunction = Callable[[Mapping[int, tuple[Any, ...]]], dict[int, tuple[Any, ...]]]


@dataclass(slots=True)
class ObservedBehavior:
    """A record of what a stage did in its forwards so far. None means that it has not run yet.

    Copying inputs, snapshots of buffers and redirected random numbers cost time in every cell. A
    stage pays for them until a forward has shown that it does not need them.

    Attributes:
        draws_random: Whether it draws random numbers with PyTorch.
        draws_host_random: Whether it draws from `random` or `numpy.random`.
        mutates_inputs: Whether it changes its inputs in place.
        uses_only_parameters: Whether a check has shown that all leaves of its graph are parameters.
        stays_in_stage: Whether a check has shown that its graph reaches no other stage.
        hides_parameters: Whether that check has found a reentrant `torch.utils.checkpoint`.
        written_parameter: The class and the name of a parameter that its forward changes.
        uses_empty: Whether it calls `torch.empty`, whose contents could differ in a recomputation.
        silent_writes: The buffers that it writes without a change of their version counter.
        written_attributes: The Python attributes that its modules set, such as a counter. None: no
            forward that will be recomputed has run yet.
        detached_outputs: The outputs that are not in its graph, where it has several; by what
            decides it. See `StageRunner._exclude_detached`.
        follows_gradients: Whether `GradientFlow` follows its forwards that will be recomputed:
            the first one, and the others if an output of the first one needs no gradient.
    """

    draws_random: bool | None = None
    draws_host_random: bool | None = None
    mutates_inputs: bool | None = None
    uses_only_parameters: bool = False
    stays_in_stage: bool = False
    hides_parameters: bool = False
    written_parameter: tuple[str, str] | None = None
    uses_empty: bool = False
    silent_writes: SilentWrites = field(default_factory=dict)
    written_attributes: list[WrittenAttribute] | None = None
    detached_outputs: dict[Any, Mapping[int, Collection[int]]] = field(default_factory=dict)
    follows_gradients: bool = True


class BehaviorTable(dict[tuple[Any, ...], ObservedBehavior]):
    """The observations of a stage, by the settings of its modules. A copy of it is empty.

    The settings have the classes of the modules, some of which cannot be pickled.
    """

    def __reduce__(self) -> tuple[type[BehaviorTable], tuple[()]]:
        return BehaviorTable, ()


@dataclass(eq=False)
class Stage:
    """Layers that run as one piece. A stage of another process has no layers in this one.

    Attributes:
        index: The number of the stage, in topological order.
        names: The names of its layers or units in the model.
        layers: The modules that it runs.
        compute: The function that runs them.
        layer_types: The class names of the layers, for messages.
        wrappers: Modules that `stage_fn` has put around the layers.
        resharding_modules: Modules whose parameters `fully_shard` replaces in each forward.
        may_draw_random: Whether it may draw random numbers, even if no forward has drawn any yet.
        may_mutate_inputs: Whether it may change its inputs in place, even if no forward has yet.
    """

    index: int
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    compute: StageFunction
    layer_types: tuple[str, ...] = ()
    wrappers: tuple[nn.Module, ...] = ()
    resharding_modules: frozenset[nn.Module] = frozenset()
    may_draw_random: bool = False
    may_mutate_inputs: bool = False
    _behaviors: BehaviorTable = field(default_factory=BehaviorTable, repr=False)
    _known_contents: SnapshotMemo[StageContents] = field(
        default_factory=SnapshotMemo, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.layer_types = self.layer_types or tuple(type(layer).__name__ for layer in self.layers)

    def __str__(self) -> str:
        kinds = ", ".join(self.layer_types[:4])
        more = ", ..." if len(self.layer_types) > 4 else ""
        # The name of the model itself is empty. It stands for tensors that are in no unit.
        names = [name or "the model's own" for name in self.names]
        ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"stage {self.index} (layer{'s' * (len(names) > 1)} {ends}: {kinds}{more})"

    def modules(self) -> list[nn.Module]:
        """Return all modules of its layers, without duplicates."""
        # In every call, and `nn.Module.modules` is a generator that also builds names.
        modules: dict[nn.Module, None] = {}
        todo = [*reversed(self.layers)]
        while todo:
            module = todo.pop()
            if module not in modules:
                modules[module] = None
                todo += [child for child in reversed(module._modules.values()) if child is not None]
        return list(modules)

    def read_contents(self, snapshot: ModuleSnapshot | None = None) -> StageContents:
        """Return its modules as they are now, and what is known of them.

        With a `snapshot` that is the same as in an earlier call, nothing has changed since. Copies
        of a stage share what is remembered, so they must have the same layers.
        """
        known_contents = self._known_contents.get(snapshot)
        if known_contents is not None:
            return known_contents
        # A call in another thread may have put its proxies into the modules: see `unwrap_proxy`.
        contents = StageContents(self, [m.__dict__.get("_stands_for", m) for m in self.modules()])
        if snapshot is not None and snapshot.covers(contents.modules):
            self._known_contents.set(snapshot, contents)
        return contents

    def read_settings(self, modules: Iterable[nn.Module]) -> tuple[Any, ...]:
        """Return how its modules are set now, as far as it tells their behaviors apart."""
        if self.resharding_modules:
            # The first forward of a record gathers parameters more often. All replicas have to do
            # so in the same step, and numbers in modules may differ between them.
            return tuple([(type(m), m.training, _dropout_rates(m)) for m in modules])
        return tuple([(type(m), m.training, _dropout_rates(m), _find_switches(m)) for m in modules])

    def behavior_for(self, settings: Hashable) -> ObservedBehavior:
        """Return the record for its modules as they are set, which `read_settings` has returned.

        A module behaves differently in training and evaluation, with another dropout rate, and once
        a switch or a number of its own is no longer zero. Each such setting has its own record.
        """
        key = type(self.compute), self.may_mutate_inputs, settings
        record = self._behaviors.get(key)
        if record is None:  # several threads may come here
            new_record = ObservedBehavior(mutates_inputs=True if self.may_mutate_inputs else None)
            record = self._behaviors.setdefault(key, new_record)
        return record

    def as_remote(self) -> Stage:
        """Return the stage as a process describes it that does not run it."""
        return Stage(self.index, self.names, (), _reject_remote_compute, self.layer_types)

    def reset_behaviors(self) -> None:
        """Forget all records, so that the next forward is observed again."""
        self._behaviors.clear()


class StageContents:
    """The modules of a stage at the beginning of a call, and what each call needs to know of them.

    Args:
        stage: The stage.
        modules: Its modules, or the proxies in their place.
    """

    def __init__(self, stage: Stage, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.parameters = find_trainable_parameters(modules)
        self.settings = CachedHash(stage.read_settings(modules))
        self.training_flags = [module.training for module in modules]
        self.modules_with_buffers = [module for module in modules if module._buffers]
        # `fully_shard` replaces the parameters of some modules in each forward. These cannot be
        # compared with earlier ones, and no proxy can hold their place until W.
        resharding = stage.resharding_modules
        self.static_modules = (
            [module for module in modules if module not in resharding] if resharding else modules
        )
        self.parameter_modules = [module for module in self.static_modules if module._parameters]


def find_trainable_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require grad, without duplicates."""
    parameters: dict[int, nn.Parameter] = {}  # by id: hashing a tensor is slow
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                original = parameter.__dict__.get("_stands_for", parameter)  # `unwrap_proxy`
                if original.requires_grad:
                    parameters[id(original)] = original
    return list(parameters.values())


def _reject_remote_compute(inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    raise AssertionError("a stage of another process cannot be computed in this one")


# The names under which PyTorch's and other libraries' layers keep a probability of dropping.
_DROPOUT_ATTRIBUTES = ("p", "drop_prob", "drop_rate", "dropout")


def _dropout_rates(module: nn.Module) -> tuple[float, ...]:
    """Return the dropout probabilities of a module."""
    attributes = module.__dict__
    return tuple(
        [
            attributes[name]
            for name in _DROPOUT_ATTRIBUTES
            if name in attributes and isinstance(attributes[name], int | float)
        ]
    )


def _find_switches(module: nn.Module) -> tuple[bool, ...]:
    """Return which switches of a module are on: a noise may be set from 0 to 0.1 in epoch 5.

    Those of PyTorch's own layers do not decide what these do with their inputs and generators.
    """
    if type(module).__module__.startswith("torch.nn."):
        return ()
    values = module.__dict__.values()
    return tuple([bool(value) for value in values if type(value) in _SWITCH_TYPES])


_SWITCH_TYPES = (bool, int, float)


StageMembers = dict[int, nn.Module | Tensor]  # modules, parameters and buffers, by id


def collect_members(stage: Stage) -> StageMembers:
    """Return the modules of a stage, their parameters and their buffers, by id."""
    # In every call, because users may tie weights at any time. So this is one loop without calls,
    # and the keys are ids instead of the objects: hashing a tensor is slow.
    members: StageMembers = {}
    todo: list[nn.Module] = list(stage.layers)
    while todo:
        module = todo.pop()
        # See `unwrap_proxy`.
        module = module.__dict__.get("_stands_for", module)
        if id(module) not in members:
            members[id(module)] = module
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        original = tensor.__dict__.get("_stands_for", tensor)
                        members[id(original)] = original
            for child in module._modules.values():
                if child is not None:
                    todo.append(child)
    return members


def find_shared_ids(members_by_stage: Sequence[StageMembers]) -> set[int]:
    """Return the ids that several stages have."""
    earlier_ids: set[int] = set()
    shared: set[int] = set()
    if len(set().union(*members_by_stage)) == sum(map(len, members_by_stage)):
        return shared  # as in most models
    for members in members_by_stage:
        shared |= earlier_ids & members.keys()
        earlier_ids |= members.keys()
    return shared
