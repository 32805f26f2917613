"""The header of a message between processes: everything about a payload except its tensor data.

A `PayloadSpec` has the dtype, shape and strides of each tensor, and the layout of the containers
around them (tuples, lists, dicts, and plain values in them). `encode_spec` and `decode_spec` turn
it into JSON text and back. Nothing is pickled.

    Payload ─ from_payload ─► PayloadSpec ─ encode_spec ─► text
                                                             │  sent before the tensors
    Payload ◄─ build_payload ─ PayloadSpec ◄─ decode_spec ─ text
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.data_parallel.dtensor import is_dtensor
from penstock.errors import PenstockTypeError, RunError
from penstock.stage.payload import Payload, PayloadLayout
from penstock.tensor_spec import TensorSpec, is_dense
from penstock.torch_compat import pytree


class PayloadSpec(NamedTuple):
    """A payload without the data of its tensors. None stands for a tensor that is not sent."""

    tensor_specs: tuple[TensorSpec | None, ...]
    needs_grad: tuple[bool, ...]
    shared: frozenset[int]
    layout: PayloadLayout | None

    @staticmethod
    def from_payload(payload: Payload) -> PayloadSpec:
        """Return the spec of a payload.

        Raises:
            RunError: A tensor in it is a DTensor, whose layout a message does not carry.
        """
        for tensor in payload.tensors:
            if tensor is not None and is_dtensor(tensor):
                raise RunError(
                    f"a stage sends a DTensor of shape {tuple(tensor.shape)} to another process, "
                    "which would receive it without its mesh and placements. Let the layer return "
                    "a local tensor: use_local_output=True in its plan, or tensor.to_local()."
                )
        tensor_specs = tuple(
            [None if t is None else TensorSpec.of_packed(t) for t in payload.tensors]
        )
        return PayloadSpec(tensor_specs, tuple(payload.needs_grad), payload.shared, payload.layout)

    def matches(self, payload: Payload) -> bool:
        """Return whether the payload has this spec."""
        # This runs for every message. Comparing plain tuples decides the usual case without
        # building a TensorSpec for each tensor.
        shapes = [
            None if t is None else (t.shape, t.stride(), t.dtype, False, torch.strided)
            for t in payload.tensors
        ]
        exact = tuple(shapes), payload.needs_grad, payload.shared, payload.layout
        return exact == self or PayloadSpec.from_payload(payload) == self

    def build_payload(self, tensors: tuple[Tensor | None, ...]) -> Payload:
        """Return a payload with this layout and the received tensors."""
        return Payload(tensors, self.layout, self.needs_grad, self.shared)

    def __str__(self) -> str:
        return ", ".join("none" if spec is None else str(spec) for spec in self.tensor_specs)


def flatten_dense(tensor: Tensor) -> Tensor:
    """Return the data of a tensor as one contiguous tensor, in the order of its memory.

    This is a view where possible. It copies a tensor with gaps in its memory, and one whose
    conjugation or negation is still lazy.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


# ---- encoding as JSON text ----------------------------------------------------------------


def encode_spec(payload_spec: PayloadSpec) -> str:
    """Return the spec as JSON text."""
    tensor_specs = [
        None if s is None else [_dtype_name(s.dtype), list(s.shape), list(s.strides)]
        for s in payload_spec.tensor_specs
    ]
    layout = None
    if payload_spec.layout is not None:
        spec, leaves, holes = payload_spec.layout
        layout = [_encode_treespec(spec), [_encode_value(leaf) for leaf in leaves], list(holes)]
    return json.dumps(
        [tensor_specs, list(payload_spec.needs_grad), sorted(payload_spec.shared), layout]
    )


def decode_spec(text: str) -> PayloadSpec:
    """Return the spec that `encode_spec` has written as text.

    >>> spec = PayloadSpec.from_payload(Payload((torch.zeros(2, 3),), None, (True,)))
    >>> decode_spec(encode_spec(spec)) == spec, str(spec)
    (True, 'float32[2, 3]')
    """
    encoded_specs, needs_grad, shared, encoded_layout = json.loads(text)
    tensor_specs = tuple(
        None if s is None else TensorSpec(tuple(s[1]), tuple(s[2]), _parse_dtype(s[0]))
        for s in encoded_specs
    )
    layout = None
    if encoded_layout is not None:
        spec, leaves, holes = encoded_layout
        layout = PayloadLayout(
            _decode_treespec(spec), tuple(map(_decode_value, leaves)), tuple(holes)
        )
    return PayloadSpec(tensor_specs, tuple(needs_grad), frozenset(shared), layout)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


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
    for name, container_type in _CONTAINER_TYPES.items():
        if kind is container_type:
            return [name, _encode_value(context), children]
    # A class goes by its import path: the receiver imports the same one. For a namedtuple, pytree
    # stores the class as the context.
    if pytree.is_namedtuple_class(context):
        return ["namedtuple", [context.__module__, context.__qualname__], children]
    return ["registered", [kind.__module__, kind.__qualname__], _encode_value(context), children]


def _decode_treespec(encoded: Any) -> pytree.TreeSpec:
    if encoded is None:
        # Newer PyTorch has treespec_leaf() and deprecates the constructor LeafSpec().
        return pytree.treespec_leaf() if hasattr(pytree, "treespec_leaf") else pytree.LeafSpec()
    name, context, *fields = encoded
    children = [_decode_treespec(child) for child in fields[-1]]
    if name == "namedtuple":
        return pytree.TreeSpec(namedtuple, _import_class(*context), children)
    if name == "registered":
        return pytree.TreeSpec(_import_class(*context), _decode_value(fields[0]), children)
    return pytree.TreeSpec(_CONTAINER_TYPES[name], _decode_value(context), children)


def _import_class(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _encode_value(value: Any) -> Any:
    """Return a value as JSON. Types that JSON lacks become an object with one key: the type."""
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
        f"a {type(value).__name__} cannot be sent to another process, as stages exchange only "
        "tensors, numbers, strings and None, in tuples, lists, dicts and named tuples. Return "
        "those from the layer."
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
