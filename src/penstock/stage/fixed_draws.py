"""Random operations with a fixed result: every row draws the same numbers, in any micro-batch.

The audit runs some rows together and apart to see whether they depend on each other. With dropout
in between, the results would differ for another reason. In eval mode nothing is drawn, but a layer
may mix rows in training only, as a BatchNorm does. So the rows run in training, and an operation
that draws returns what it returns on average, for each of its elements:

    dropout        keeps everything
    bernoulli      its probability
    rand, randn    one half, or another level; the mean and half a deviation
    randint        the middle of its range
    randperm       the reverse order, so that rows that are shuffled do mix
    multinomial    the largest entries

Equal numbers have the order of their rows, so that `x[torch.rand(n).argsort()]` would shuffle
nothing. So in a vector those of later rows are smaller by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.stage.rng import DrawRedirect, RngSource
from penstock.torch_compat import DisableTorchFunction, get_schema_arguments

Arguments = dict[str, Any]

# A layer that compares with the level itself, such as `rand(n) < 0.5`, does the same for all rows.
_BELOW_LEVEL = 1 - 1e-3
_TIE_STEPS = 16  # the reductions repeat after so many rows, so that they stay within rounding


class FixedDraws(DrawRedirect):
    """Lets random operations return fixed numbers. Those that are not known draw as they do.

    Attributes:
        level: The fraction of their range that uniform numbers are. What a layer does with a small
            probability, `rand(n) < 0.15`, it does at a low or a high level.
        has_uniform: Whether uniform numbers were drawn.
    """

    level = 0.5
    has_uniform = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the fixed result of an operation that draws."""
        schema = get_schema_arguments(func)
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)}
        named |= kwargs
        # Attention, and cuDNN's LSTM.
        for name in ("dropout_p", "dropout"):
            if name in named:
                return func(**{**named, name: 0.0})
        name = func.overloadpacket.__name__
        compute = _RESULTS.get(name)
        if name in _UNIFORM:
            self.has_uniform = True
            compute = _UNIFORM[name](self.level)
        if compute is None or any(name.startswith("out") for name in named):
            return super().run(func, args, kwargs)
        return compute(named)

    def drop(self, tensor: Tensor, probability: float) -> None:
        """Return None: `run` has the fixed result of dropout."""


class SingleDraws(FixedDraws):
    """Lets random operations return fixed numbers, but for single ones: `torch.rand(()) < 0.3`.

    Those are the numbers that a cell draws, as all numbers are drawn in its order.

    Attributes:
        numbers: The single numbers that were drawn.
        draws_others: Whether numbers were drawn by an operation that has no fixed result.
    """

    def __init__(
        self,
        source: RngSource | int,
        own_states: dict[torch.Generator, Tensor] | None = None,
    ) -> None:
        super().__init__(source, own_states=own_states)
        self.numbers: list[float] = []
        self.draws_others = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number that an operation draws, or the fixed result of several."""
        drawn = DrawRedirect.run(self, func, args, kwargs)
        if kwargs.get("generator") is not None:
            return drawn
        if isinstance(drawn, Tensor) and drawn.numel() == 1:
            self.numbers.append(float(drawn.detach()))
            return drawn
        name = func.overloadpacket.__name__
        names = {argument.name for argument in get_schema_arguments(func)}
        if name in _RESULTS or name in _UNIFORM or not names.isdisjoint(("dropout", "dropout_p")):
            return super().run(func, args, kwargs)
        self.draws_others = True
        return drawn


class ObservedDraws(DrawRedirect):
    """Draws the numbers of a cell, and notes whether it draws single ones, by which it may go.

    Attributes:
        has_number: Whether it has drawn a single number.
        has_scalar: Whether it has drawn one in a tensor without dims, which is not that of a row.
    """

    has_number = has_scalar = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that draws."""
        drawn = super().run(func, args, kwargs)
        if isinstance(drawn, Tensor) and drawn.numel() == 1:
            self.has_number = True
            self.has_scalar |= not drawn.dim()
        return drawn


def _fill(mean: Callable[[Arguments], Any]) -> Callable[[Arguments], Tensor]:
    """Return a function that fills the tensor `self` of an operation in place."""

    def fill(named: Arguments) -> Tensor:
        tensor: Tensor = named["self"]
        value = mean(named)
        if not tensor.is_floating_point() and not tensor.is_complex():
            value = value.round() if isinstance(value, Tensor) else round(value)
        if isinstance(value, Tensor):
            return tensor.copy_(value)
        return _break_ties(tensor.fill_(value))

    return fill


def _create(mean: Callable[[Arguments], Any]) -> Callable[[Arguments], Tensor]:
    """Return a function that makes a tensor: of a size, or like `self`."""

    def create(named: Arguments) -> Tensor:
        options = {k: named[k] for k in ("dtype", "layout", "device") if named.get(k) is not None}
        if isinstance(named.get("self"), Tensor):
            return _break_ties(torch.full_like(named["self"], mean(named), **options))
        if "high" in named:
            options.setdefault("dtype", torch.int64)
        return _break_ties(torch.full(named["size"], mean(named), **options))

    return create


def _break_ties(tensor: Tensor) -> Tensor:
    """Let the numbers of later rows of a vector be smaller by rounding, and return it."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.dim() != 1:
        return tensor
    with DisableTorchFunction():  # nobody watches what is not an operation of the model
        tensor.mul_(_BELOW_LEVEL)
        steps = torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype) % _TIE_STEPS
        return tensor.mul_(1 - steps * torch.finfo(tensor.dtype).eps)


def _find_bernoulli_mean(named: Arguments) -> Any:
    return named.get("p", 0.5)


def _find_normal_mean(named: Arguments) -> Any:
    return named.get("mean", 0.0) + 0.5 * named.get("std", 1.0)


def _find_middle(named: Arguments) -> int:
    low, high = named.get("low") or named.get("from") or 0, named.get("high") or named.get("to")
    return int((low + (2 if high is None else high)) // 2)


def _dropout(named: Arguments) -> tuple[Tensor, Tensor]:
    tensor, probability = named["input"], named["p"]
    keeps = probability < 1
    scale = 1 / (1 - probability) if keeps else 0.0
    return tensor * scale, torch.full_like(tensor, keeps, dtype=torch.bool)


def _bernoulli(named: Arguments) -> Tensor:
    tensor: Tensor = named["self"]
    probability = named.get("p", tensor)
    if isinstance(probability, Tensor):
        return probability.to(tensor.dtype).expand_as(tensor).clone()
    return torch.full_like(tensor, probability)


def _normal(named: Arguments) -> Tensor:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return _create(_find_normal_mean)(named)
    result: Tensor = mean + 0.5 * std
    return result


def _permute(named: Arguments) -> Tensor:
    options = {k: named[k] for k in ("dtype", "device") if named.get(k) is not None}
    return torch.arange(named["n"] - 1, -1, -1, **options)


def _choose(named: Arguments) -> Tensor:
    probabilities: Tensor = named["self"]
    count = named["num_samples"]
    if named.get("replacement"):
        largest = probabilities.argmax(-1, keepdim=True)
        return largest.expand(*largest.shape[:-1], count).clone()
    return probabilities.topk(count).indices


_UNIFORM: dict[str, Callable[[float], Callable[[Arguments], Any]]] = {
    "rand": lambda level: _create(lambda named: level),
    "rand_like": lambda level: _create(lambda named: level),
    "uniform_": lambda level: _fill(
        lambda named: (1 - level) * named.get("from", 0.0) + level * named.get("to", 1.0)
    ),
}

_RESULTS: dict[str, Callable[[Arguments], Any]] = {
    "native_dropout": _dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": _fill(_find_bernoulli_mean),
    "randn": _create(lambda named: 0.5),
    "randn_like": _create(lambda named: 0.5),
    "normal": _normal,
    "normal_": _fill(_find_normal_mean),
    "randint": _create(_find_middle),
    "randint_like": _create(_find_middle),
    "random_": _fill(_find_middle),
    "randperm": _permute,
    "multinomial": _choose,
    "exponential_": _fill(lambda named: 1 / named.get("lambd", 1.0)),
    "poisson": lambda named: named["self"].clone(),
}
