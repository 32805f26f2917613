"""The computation of one stage of a Sequential.

    SequentialStage      inputs by source stage  ->  outputs by destination stage
      StageModule        the layers of the stage, as one `nn.Module` that users may wrap (stage_fn)
        the layers

A stage has three kinds of inputs: the value of the stage before, skips from any earlier stage, and
side inputs, which the caller of the pipe gives by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from penstock.errors import PenstockTypeError
from penstock.model.traced.shared_state import SharedState
from penstock.stage.skip import SkipKey, Skips, popped_keys, stashed_keys, use_skips
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import unwrap_compiled

# ---- side inputs ---------------------------------------------------------------------------------
#
# A mask or positions need not be passed on from layer to layer. The caller gives them by name, and
# every layer whose forward has a parameter of that name gets them directly.

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class SideInputs(NamedTuple):
    """The side inputs of a stage, as the last of the values that it gets from outside."""

    values: dict[str, Any]


@runtime_checkable
class ForwardsSideInputs(Protocol):
    """A layer that passes side inputs on to the layers inside it."""

    def side_names(self, first: bool) -> frozenset[str]:
        """Return the side inputs that the layers inside take."""


def find_side_names(layer: nn.Module, first: bool) -> frozenset[str]:
    """Return the side inputs that a layer can take: the parameters of its forward.

    The first parameter is left out, because it gets the value of the layer before. The `first`
    layer of the model has no layer before it, so the caller may give all of its inputs by name.
    """
    layer = unwrap_compiled(layer)  # the wrapper's forward is (*args, **kwargs)
    if isinstance(layer, ForwardsSideInputs):
        return layer.side_names(first)
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):  # a forward that is not written in Python has no signature
        return frozenset()
    is_positional = parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    candidates = parameters if first or not is_positional else parameters[1:]
    return frozenset(p.name for p in candidates if p.kind in _KEYWORD_KINDS)


def find_side_names_per_layer(layers: Iterable[nn.Module], first: bool) -> list[frozenset[str]]:
    """Return the side inputs that each of several consecutive layers takes.

    `first` says whether these are the first layers of the model.
    """
    return [find_side_names(layer, first and not index) for index, layer in enumerate(layers)]


def select_side_inputs(side: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the side inputs with these names."""
    return {name: value for name, value in side.items() if name in names}


def check_side_inputs(
    side: Iterable[str], layers: Sequence[str], side_names: Sequence[frozenset[str]]
) -> None:
    """Raise if no layer takes one of the side inputs, which is usually a misspelled name."""
    strays = [name for name in side if not any(name in names for names in side_names)]
    if not strays:
        return
    takers: dict[str, list[str]] = {}
    for layer, names in zip(layers, side_names, strict=True):
        for name in sorted(names):
            takers.setdefault(name, []).append(layer)
    listed = "; ".join(f"{name} (layer {', '.join(takers[name])})" for name in sorted(takers))
    raise PenstockTypeError(
        f"no layer takes {', '.join(map(repr, strays))}. A side input goes to the layers whose "
        f"forward has a parameter of that name. The names here are: {listed or 'none'}"
    )


# ---- the layers of a stage -----------------------------------------------------------------------

SkipRoute = tuple[SkipKey, int, int]  # key, stage that stashes, stage that pops


class StageModule(nn.Module):
    """The layers of one stage as one module, under their names.

    Arguments: the value of the stage before (in the first stage: the batch), then the skips from
    other stages, and side inputs by name. Output: the value for the next stage; if skips go to
    other stages, a tuple of the value and these skips.

    All tensors enter and leave as arguments and outputs. A wrapper around the module, such as DDP
    or `torch.compile`, therefore sees all of them.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        unpack_tuples: bool,
        is_first: bool,
        side_names: Sequence[frozenset[str]],
        skips: tuple[Sequence[SkipKey], Sequence[SkipKey]],
    ) -> None:
        super().__init__()
        # `add_module` would refuse a layer whose name is an attribute of this class.
        self._modules.update(layers)
        self._unpack_tuples, self._is_first = unpack_tuples, is_first
        self._side_names = tuple(side_names)
        self._incoming_skips, self._outgoing_skips = skips
        # Looked up once, because the forward runs for every micro-batch.
        self.uses_skips = any(
            popped_keys(m) or stashed_keys(m) for l in layers.values() for m in l.modules()
        )

    def forward(self, *values: Any, **side: Any) -> Any:
        """Run the layers one after the other, with the skips of the stage in reach."""
        if not self.uses_skips:
            return self.run_layers(*values, **side)
        skips = Skips()
        main = len(values) - len(self._incoming_skips)
        # `shared` lets several layers of this stage pop the value. `verify_skippables` has checked
        # that only skips that are declared as shared are popped more than once.
        for key, value in zip(self._incoming_skips, values[main:], strict=True):
            skips.stash(key, value, shared=True)
        with use_skips(skips):
            value = self.run_layers(*values[:main], **side)
        if not self._outgoing_skips:
            return value
        return value, *(skips.pop(key) for key in self._outgoing_skips)

    def with_own_code(self) -> StageModule:
        """Give this object a forward with a code object of its own, and return it.

        `torch.compile` caches compiled code by code object. All stages would share the code of
        `StageModule.forward`, recompile for each stage, and soon reach the recompilation limit,
        after which they run uncompiled.
        """
        original = type(self).forward
        code = original.__code__.replace()
        function = FunctionType(code, original.__globals__, code.co_name, original.__defaults__)
        self.__dict__["forward"] = MethodType(function, self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("forward", None)  # pickle finds functions by name, and this one has none
        return state

    def run_layers(self, *inputs: Any, **side: Any) -> Any:
        """Run the layers, without the skips of other stages.

        The first layer of the model gets the batch as separate arguments. Every other layer gets
        one value, unless tuples are unpacked.
        """
        value: Any = inputs if self._is_first else inputs[0]
        for index, layer in enumerate(self._modules.values()):
            assert layer is not None
            if (self._is_first and not index) or (self._unpack_tuples and isinstance(value, tuple)):
                values = value
            else:
                values = (value,)
            value = (
                layer(*values, **select_side_inputs(side, self._side_names[index]))
                if side
                else layer(*values)
            )
        return value


@dataclass(frozen=True)
class SequentialStage:
    """The function of a stage: from inputs by source stage to outputs by destination stage.

    | source | values |
    |---|---|
    | the stage before | its output, then the skips that it stashed |
    | an earlier stage | skips |
    | `OUTSIDE` | in the first stage the batch; in every stage the side inputs, as `SideInputs` |

    The outputs have the same form: the value and skips for the next stage, skips for later ones.
    """

    module: StageModule
    # A method of the module, the wrapper that stage_fn returned, or None: one layer after another.
    forward_fn: Callable[..., Any] | None
    previous_stage: int
    next_stage: int
    incoming_skip_counts: Mapping[int, int]  # number of skips, by source stage
    outgoing_skip_counts: Mapping[int, int]  # number of skips, by destination stage
    shared_state: SharedState | None  # what the layers may change and those of another stage read

    def with_module(self, module: nn.Module) -> SequentialStage:
        """Return the same stage with another module in place of its layers."""
        return replace(self, forward_fn=module)

    def __call__(
        self, inputs_by_source: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, ...]]:
        """Run the stage."""
        values = inputs_by_source[self.previous_stage]
        side: dict[str, Any] = {}
        from_outside = inputs_by_source.get(OUTSIDE)
        if from_outside and isinstance(from_outside[-1], SideInputs):
            side = from_outside[-1].values
            values = from_outside[:-1] if self.previous_stage == OUTSIDE else values
        if self.incoming_skip_counts:
            values = values if self.previous_stage == OUTSIDE else values[:1]
            for source in self.incoming_skip_counts:
                values += (
                    inputs_by_source[source][1:]
                    if source == self.previous_stage
                    else inputs_by_source[source]
                )
        shared_state = self.shared_state
        state = None if shared_state is None else shared_state.take_snapshot()
        if self.forward_fn is None and not side:
            # Most stages take this path; the loop is here to save a call for each micro-batch.
            for layer in self.module._modules.values():
                assert layer is not None
                values = (layer(*values),)
            (output,) = values
        else:
            run = self.module.run_layers if self.forward_fn is None else self.forward_fn
            output = run(*values, **side)
        if shared_state is not None and state is not None:
            shared_state.check(state)
        if not self.outgoing_skip_counts:
            return {self.next_stage: (output,)}
        value, *skips = output
        outputs: dict[int, tuple[Any, ...]] = {self.next_stage: (value,)}
        for destination, count in self.outgoing_skip_counts.items():
            outputs[destination] = (*outputs.get(destination, ()), *skips[:count])
            del skips[:count]
        return outputs


def build_sequential_stage(
    index: int,
    layers: Mapping[str, nn.Module],
    unpack_tuples: bool,
    skip_routes: Iterable[SkipRoute],
    is_last: bool,
    side_names: Sequence[frozenset[str]],
    shared_state: SharedState,
) -> SequentialStage:
    """Build the function of a stage from its layers and the skips of the whole model."""
    skip_routes = tuple(skip_routes)
    arriving = _group_by_neighbour((src, key) for key, src, dst in skip_routes if dst == index)
    departing = _group_by_neighbour((dst, key) for key, src, dst in skip_routes if src == index)
    skips = tuple(
        [key for keys in groups.values() for key in keys] for groups in (arriving, departing)
    )
    module = StageModule(layers, unpack_tuples, not index, side_names, (skips[0], skips[1]))
    forward_fn = None
    if module.uses_skips or unpack_tuples or not layers:
        forward_fn = module.forward if module.uses_skips else module.run_layers
    return SequentialStage(
        module,
        forward_fn,
        index - 1 if index else OUTSIDE,
        OUTSIDE if is_last else index + 1,
        {neighbour: len(keys) for neighbour, keys in arriving.items()},
        {neighbour: len(keys) for neighbour, keys in departing.items()},
        shared_state or None,
    )


def _group_by_neighbour(pairs: Iterable[tuple[int, SkipKey]]) -> dict[int, tuple[SkipKey, ...]]:
    groups: dict[int, tuple[SkipKey, ...]] = {}
    for neighbour, key in pairs:
        groups[neighbour] = (*groups.get(neighbour, ()), key)
    return groups
