"""Random models as data: a `Model` describes layers and builds the same module every time.

Every layer maps rows of four numbers to rows of four numbers, so any chain of layers is a model.
Between layers the rows travel in one of several forms: bare, in trees, in parts, with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import Namespace, PipeSequential, pop, skippable, stash
from tests.properties.layers import LAYERS, WIDTH

# ---- forms --------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


FORMS = ("plain", "arguments", "tree", "parts", "twice", "mixed", "unused", "expanded")


def packed(form: str, x: Tensor) -> Any:
    """Return the value in which a layer passes x on."""
    if form == "arguments":
        return x, None, 2
    if form == "tree":
        return {"half": x / 2, "times": 2, "none": [None, ()]}
    if form == "parts":
        return [x[:, :2], (x[:, 2:],)]
    if form == "twice":
        return Pair(x, x)
    if form == "mixed":
        return [x, {"detached": x.detach(), "on": x > 0, "whole": (x * 3).long()}]
    if form == "unused":
        return x, x.exp(), "name"
    if form == "expanded":
        return {"first": x[:, :1].expand(-1, WIDTH), "x": x}
    return x


def unpacked(form: str, value: Any) -> Tensor:
    """Return the rows in a value, also in a gathered output, where numbers are lists."""
    x: Tensor = value
    if form in ("arguments", "unused"):
        x = value[0]
    elif form == "tree":
        times = value["times"]
        x = value["half"] * (times[0] if isinstance(times, list) else times)
    elif form == "parts":
        x = torch.cat([value[0], value[1][0]], 1)
    elif form == "twice":
        x = value[0] * 0.5 + value[1] * 0.5
    elif form == "mixed":
        beside = value[1]
        x = value[0] + 0.5 * beside["detached"] * beside["on"] + 0.01 * beside["whole"]
    elif form == "expanded":
        x = value["x"] + 0.1 * value["first"]
    return x


# ---- wrappers of layers -------------------------------------------------------------------


class Unit(nn.Module):
    """A layer that unpacks its input, computes, and packs its output for the next layer."""

    takes: tuple[str, ...] = ()
    kind = ""  # of the skip connection that starts or ends here, if any

    def __init__(self, before: str, inner: nn.Module, after: str) -> None:
        super().__init__()
        self.before, self.inner, self.after = before, inner, after

    def forward(self, *values: Any) -> Any:
        return packed(self.after, self.inner(self.rows(values)))

    def rows(self, values: tuple[Any, ...]) -> Tensor:
        return unpacked(self.before, values[0] if len(values) == 1 else values)


class Gated(Unit):
    takes = ("gate",)

    def forward(self, *values: Any, gate: Tensor) -> Any:  # type: ignore[override]
        return packed(self.after, self.rows(values) * gate)


class Shifted(Unit):
    takes = ("shift", "factor")

    def forward(self, *values: Any, shift: Tensor, factor: float = 1.0) -> Any:  # type: ignore[override]
        return packed(self.after, self.rows(values) + shift * factor)


class Crossed(Unit):
    takes = ("columns",)

    def forward(self, *values: Any, columns: Tensor) -> Any:  # type: ignore[override]
        return packed(self.after, self.rows(values) * columns.t())


class Noted(Unit):
    takes = ("note", "gate")

    def forward(self, *values: Any, note: dict[str, Any], gate: Tensor) -> Any:  # type: ignore[override]
        assert note["none"] is None
        return packed(self.after, self.rows(values) + note["parts"][0] * note["times"] - gate)


SIDED = {"gated": Gated, "shifted": Shifted, "crossed": Crossed, "noted": Noted}


SKIPS: dict[str, Callable[[Tensor], Any]] = {
    "used": lambda x: 2 * x,
    "unused": lambda x: 2 * x,
    "itself": lambda x: x,
    "integers": lambda x: (x > 0).long(),
    "none": lambda x: None,
    "detached": lambda x: x.detach() + 1,
    "tree": lambda x: {"a": [x.sin()], "b": None, "c": (x > 0, 2)},
}


class _Stashing(Unit):
    def forward(self, *values: Any) -> Generator[Any, Any, Any]:
        x = self.rows(values)
        yield stash("skip", SKIPS[self.kind](x))
        return packed(self.after, x)


@skippable(stash=["skip"])
class StashOnce(_Stashing): ...


@skippable(stash=["skip"], shared=["skip"])
class StashForAll(_Stashing): ...


@skippable(pop=["skip"])
class Use(Unit):
    def forward(self, *values: Any) -> Generator[Any, Any, Any]:
        x = self.rows(values)
        found: Any = yield pop("skip")
        if self.kind == "tree":
            x = x + found["a"][0] * found["c"][0] * found["c"][1]
        elif self.kind == "integers":
            x = x * found
        elif self.kind not in ("unused", "none"):
            x = x + found
        return packed(self.after, x)


# ---- models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """The kind of a layer, the form of its output, and whether it is frozen."""

    kind: str
    form: str = "plain"
    frozen: bool = False


@dataclass(frozen=True)
class Skip:
    """A skip connection; its layers only stash or pop."""

    kind: str
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """A layer that shares the weight, or the whole inner module, of an earlier layer."""

    what: str
    owner: int
    other: int


@dataclass(frozen=True)
class Model:
    """A chain of layers; the input of the first has the form `given`."""

    layers: tuple[Layer, ...]
    given: str = "plain"
    skips: tuple[Skip, ...] = ()
    ties: tuple[Tie, ...] = ()
    spreads: bool = True  # PipeSequential, which unpacks tuples into arguments

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(layer.kind for layer in self.layers)

    @property
    def output(self) -> str:
        """Return the form of the output."""
        return self.layers[-1].form

    @property
    def takes(self) -> frozenset[str]:
        """Return the names of the keyword inputs."""
        return frozenset(name for k in self.kinds if k in SIDED for name in SIDED[k].takes)

    def build(self) -> nn.Sequential:
        torch.default_generator.manual_seed(len(self.layers))
        made = [self._unit(at) for at in range(len(self.layers))]
        for tie in self.ties:
            owner, other = made[tie.owner], made[tie.other]
            if tie.what == "module":
                other.inner = owner.inner
            else:
                other.inner.weight = owner.inner.weight
        for layer, unit in zip(self.layers, made, strict=True):
            if layer.frozen:
                unit.requires_grad_(False)
        bare = [self._bare(at, unit) for at, unit in enumerate(made)]
        model = (PipeSequential if self.spreads else nn.Sequential)(*bare).double()
        if not any(p.requires_grad for p in model.parameters()):
            next(model.parameters()).requires_grad_()
        return model

    def _unit(self, at: int) -> Unit:
        layer = self.layers[at]
        before = self.layers[at - 1].form if at else self.given
        for skip in self.skips:
            if at in (skip.source, *skip.targets):
                return self._skipping(skip, at, before, layer.form)
        if layer.kind in SIDED:
            return SIDED[layer.kind](before, nn.Identity(), layer.form)
        return Unit(before, LAYERS[layer.kind](), layer.form)

    def _skipping(self, skip: Skip, at: int, before: str, after: str) -> Unit:
        once = StashOnce if len(skip.targets) == 1 else StashForAll
        unit: Unit = (once if at == skip.source else Use)(before, nn.Identity(), after)
        unit.kind = skip.kind
        unit.isolate(Namespace(str(skip.source)))  # type: ignore[operator]
        return unit

    def _bare(self, at: int, unit: Unit) -> nn.Module:
        """Return the plain layer where nothing has to be packed."""
        plain = type(unit) is Unit and unit.before == unit.after == "plain"
        tied = any(tie.what == "module" and at in (tie.owner, tie.other) for tie in self.ties)
        return unit.inner if plain and not tied else unit
