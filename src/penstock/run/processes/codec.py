"""What a receiver must know of a parcel before its bytes come, as text: nothing is pickled.

The text tells, for each tensor, its dtype, sizes and strides, and how the values around the tensors
are put together: tuples, lists, dicts, and plain values in them.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import KindError
from penstock.stage.parcel import Layout, Parcel


class Shape(NamedTuple):
    """One tensor, without its content."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        """As it will be laid out at the receiver: as it is, if there are no holes in it."""
        if tensor.is_contiguous() or not _is_dense(tensor):
            return Shape(tensor.dtype, tuple(tensor.shape), _contiguous(tensor.shape))
        return Shape(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def empty(self, device: torch.device | str, pinned: bool = False) -> Tensor:
        """Memory for it."""
        return torch.empty_strided(
            self.sizes, self.strides, dtype=self.dtype, device=device, pin_memory=pinned
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)}"


class Meta(NamedTuple):
    """A parcel without the content of its tensors."""

    shapes: tuple[Shape | None, ...]
    needs: tuple[bool, ...]
    shared: frozenset[int]
    layout: Layout | None

    @staticmethod
    def of(parcel: Parcel) -> Meta:
        """The parcel's."""
        shapes = tuple([None if t is None else Shape.of(t) for t in parcel.tensors])
        return Meta(shapes, tuple(parcel.needs), parcel.shared, parcel.layout)

    def fits(self, parcel: Parcel) -> bool:
        """Is it the parcel's? Told at once, if the tensors are laid out just so."""
        shapes = [None if t is None else (t.dtype, t.shape, t.stride()) for t in parcel.tensors]
        exact = tuple(shapes), parcel.needs, parcel.shared, parcel.layout
        return exact == self or Meta.of(parcel) == self

    def parcel(self, tensors: tuple[Tensor | None, ...]) -> Parcel:
        """The parcel again, with these tensors."""
        return Parcel(tensors, self.layout, self.needs, self.shared)

    def __str__(self) -> str:
        return ", ".join("none" if shape is None else str(shape) for shape in self.shapes)


def flat(tensor: Tensor) -> Tensor:
    """Its numbers as they stand in memory; a copy of them, if there are holes or a conjugate."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


def _contiguous(sizes: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def _is_dense(tensor: Tensor) -> bool:
    """Does it fill its memory, in whatever order of its dims?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# ---- text ---------------------------------------------------------------------------------


def dumps(meta: Meta) -> str:
    """As text."""
    shapes = [
        None if s is None else [_name(s.dtype), list(s.sizes), list(s.strides)] for s in meta.shapes
    ]
    layout = None
    if meta.layout is not None:
        spec, leaves, holes = meta.layout
        layout = [_spec_out(spec), [_plain_out(leaf) for leaf in leaves], list(holes)]
    return json.dumps([shapes, list(meta.needs), sorted(meta.shared), layout])


def loads(text: str) -> Meta:
    """From text.

    >>> meta = Meta.of(Parcel((torch.zeros(2, 3),), None, (True,)))
    >>> loads(dumps(meta)) == meta, str(meta)
    (True, 'float32[2, 3]')
    """
    shapes, needs, shared, layout = json.loads(text)
    found = tuple(
        None if s is None else Shape(_dtype(s[0]), tuple(s[1]), tuple(s[2])) for s in shapes
    )
    around = None
    if layout is not None:
        spec, leaves, holes = layout
        around = Layout(_spec_in(spec), tuple(map(_plain_in, leaves)), tuple(holes))
    return Meta(found, tuple(needs), frozenset(shared), around)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


_KINDS: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "OrderedDict": OrderedDict,
}


def _spec_out(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    children = [_spec_out(child) for child in spec.children()]
    kind, context = spec.type, spec.context
    for name, known in _KINDS.items():
        if kind is known:
            return [name, _plain_out(context), children]
    if pytree.is_namedtuple_class(context):  # a namedtuple: its class is the context
        return ["namedtuple", [context.__module__, context.__qualname__], children]
    return ["registered", [kind.__module__, kind.__qualname__], _plain_out(context), children]


def _spec_in(text: Any) -> pytree.TreeSpec:
    if text is None:
        return pytree.treespec_leaf() if hasattr(pytree, "treespec_leaf") else pytree.LeafSpec()
    name, context, *rest = text
    children = [_spec_in(child) for child in rest[-1]]
    if name == "namedtuple":
        return pytree.TreeSpec(namedtuple, _class(*context), children)
    if name == "registered":
        return pytree.TreeSpec(_class(*context), _plain_in(rest[0]), children)
    return pytree.TreeSpec(_KINDS[name], _plain_in(context), children)


def _class(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _plain_out(value: Any) -> Any:
    """JSON has None, bool, int, float and str; the rest goes as an object with its kind."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_plain_out(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[_plain_out(k), _plain_out(v)] for k, v in value.items()]}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    raise KindError(
        f"a {type(value).__name__} goes from one process to another, where only tensors, numbers, "
        "strings and None can go, in tuples, lists, dicts and named tuples: return those"
    )


def _plain_in(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dtype":
        return _dtype(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "dict":
        return {_plain_in(k): _plain_in(v) for k, v in inner}
    items = [_plain_in(item) for item in inner]
    return tuple(items) if kind == "tuple" else items
