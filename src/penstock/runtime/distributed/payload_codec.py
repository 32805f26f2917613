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

from penstock.errors import PenstockTypeError
from penstock.stage.payload import Payload, PayloadLayout
from penstock.torch_compat import pytree


class WireTensorSpec(NamedTuple):
    """One tensor, without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def from_tensor(tensor: Tensor) -> WireTensorSpec:
        """As it will be laid out at the receiver: as it is, if there are no holes in it."""
        if tensor.is_contiguous() or not _is_dense(tensor):
            return WireTensorSpec(
                tensor.dtype, tuple(tensor.shape), _contiguous_strides(tensor.shape)
            )
        return WireTensorSpec(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def allocate(self, device: torch.device | str, pinned: bool = False) -> Tensor:
        """Memory for it."""
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=device, pin_memory=pinned
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class PayloadSpec(NamedTuple):
    """A parcel without the content of its tensors."""

    tensor_specs: tuple[WireTensorSpec | None, ...]
    needs_grad: tuple[bool, ...]
    shared: frozenset[int]
    layout: PayloadLayout | None

    @staticmethod
    def from_payload(payload: Payload) -> PayloadSpec:
        """The parcel's."""
        shapes = tuple(
            [None if t is None else WireTensorSpec.from_tensor(t) for t in payload.tensors]
        )
        return PayloadSpec(shapes, tuple(payload.needs_grad), payload.shared, payload.layout)

    def matches(self, payload: Payload) -> bool:
        """Is it the parcel's? Told at once, if the tensors are laid out just so."""
        shapes = [None if t is None else (t.dtype, t.shape, t.stride()) for t in payload.tensors]
        exact = tuple(shapes), payload.needs_grad, payload.shared, payload.layout
        return exact == self or PayloadSpec.from_payload(payload) == self

    def build_payload(self, tensors: tuple[Tensor | None, ...]) -> Payload:
        """The parcel again, with these tensors."""
        return Payload(tensors, self.layout, self.needs_grad, self.shared)

    def __str__(self) -> str:
        return ", ".join("none" if shape is None else str(shape) for shape in self.tensor_specs)


def flatten_dense(tensor: Tensor) -> Tensor:
    """Its numbers as they stand in memory; a copy of them, if there are holes or a conjugate."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
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


def encode_spec(payload_spec: PayloadSpec) -> str:
    """As text."""
    shapes = [
        None if s is None else [_dtype_name(s.dtype), list(s.shape), list(s.strides)]
        for s in payload_spec.tensor_specs
    ]
    layout = None
    if payload_spec.layout is not None:
        spec, leaves, holes = payload_spec.layout
        layout = [_encode_treespec(spec), [_encode_value(leaf) for leaf in leaves], list(holes)]
    return json.dumps([shapes, list(payload_spec.needs_grad), sorted(payload_spec.shared), layout])


def decode_spec(text: str) -> PayloadSpec:
    """From text.

    >>> meta = PayloadSpec.from_payload(Payload((torch.zeros(2, 3),), None, (True,)))
    >>> decode_spec(encode_spec(meta)) == meta, str(meta)
    (True, 'float32[2, 3]')
    """
    shapes, needs, shared, layout = json.loads(text)
    found = tuple(
        None if s is None else WireTensorSpec(_parse_dtype(s[0]), tuple(s[1]), tuple(s[2]))
        for s in shapes
    )
    around = None
    if layout is not None:
        spec, leaves, holes = layout
        around = PayloadLayout(
            _decode_treespec(spec), tuple(map(_decode_value, leaves)), tuple(holes)
        )
    return PayloadSpec(found, tuple(needs), frozenset(shared), around)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


_CONTAINER_TYPES: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "OrderedDict": OrderedDict,
}


def _encode_treespec(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    children = [_encode_treespec(child) for child in spec.children()]
    kind, context = spec.type, spec.context
    for name, known in _CONTAINER_TYPES.items():
        if kind is known:
            return [name, _encode_value(context), children]
    if pytree.is_namedtuple_class(context):  # a namedtuple: its class is the context
        return ["namedtuple", [context.__module__, context.__qualname__], children]
    return ["registered", [kind.__module__, kind.__qualname__], _encode_value(context), children]


def _decode_treespec(encoded: Any) -> pytree.TreeSpec:
    if encoded is None:
        return pytree.treespec_leaf() if hasattr(pytree, "treespec_leaf") else pytree.LeafSpec()
    name, context, *rest = encoded
    children = [_decode_treespec(child) for child in rest[-1]]
    if name == "namedtuple":
        return pytree.TreeSpec(namedtuple, _import_class(*context), children)
    if name == "registered":
        return pytree.TreeSpec(_import_class(*context), _decode_value(rest[0]), children)
    return pytree.TreeSpec(_CONTAINER_TYPES[name], _decode_value(context), children)


def _import_class(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _encode_value(value: Any) -> Any:
    """JSON has None, bool, int, float and str; the rest goes as an object with its kind."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode_value(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[_encode_value(k), _encode_value(v)] for k, v in value.items()]}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    raise PenstockTypeError(
        f"a {type(value).__name__} goes from one process to another, where only tensors, numbers, "
        "strings and None can go, in tuples, lists, dicts and named tuples: return those"
    )


def _decode_value(encoded: Any) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    ((kind, inner),) = encoded.items()
    if kind == "dtype":
        return _parse_dtype(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "dict":
        return {_decode_value(k): _decode_value(v) for k, v in inner}
    items = [_decode_value(item) for item in inner]
    return tuple(items) if kind == "tuple" else items
