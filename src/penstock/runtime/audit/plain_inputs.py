"""Inputs that are no tensors: objects, strings and containers, which each micro-batch gets whole.

A layer may take an entry of them for each row: `zip(x, meta.weights)`. A micro-batch then takes the
first ones, and that shows only once they differ. So the whole batch is compared when such an input
has other contents than before. Single numbers and flags are left out: they hold nothing by row.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from datetime import date, time, timedelta
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from penstock.fingerprint import CachedHash, Fingerprinter, ObjectIdentity
from penstock.microbatch import Chunk, NoChunk
from penstock.runtime.request import Request

_IMMUTABLE_TYPES = (bytes, complex, range, date, time, timedelta)
_SKIPPED_TYPES = frozenset((Tensor, NoChunk, Chunk, bool, int, float, type(None)))
# So many contents are compared one by one, as those of a state or a phase. If there are more, they
# are others in every call, and every doubling is compared.
_MAX_COMPARED = 4
_MAX_KNOWN = 64


class PlainInputs:
    """Tells when the inputs of one kind of call that are no tensors have new contents."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._count = 0

    def have_new_contents(self, request: Request) -> bool:
        """Return whether the whole batch should be compared, for what these inputs hold."""
        values = [
            value
            for value in (*request.inputs, *request.keyword_inputs.values())
            if type(value) not in _SKIPPED_TYPES
        ]
        if not values:
            return False
        contents = CachedHash(_ContentFingerprinter()(values))
        if contents in self._known:
            return False
        if len(self._known) < _MAX_KNOWN:
            self._known.add(contents)
        self._count += 1
        return self._count <= _MAX_COMPARED or not self._count & (self._count - 1)

    def forget(self) -> None:
        """Let the next call be compared, after an error."""
        self._known.clear()
        self._count = 0


class _ContentFingerprinter(Fingerprinter):
    """Computes fingerprints of contents alone, without the numbers of tensors.

    Most scripts make new objects for each batch, so their identity does not count.
    """

    max_objects = 1_000

    def _of_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _IMMUTABLE_TYPES):
            return value
        if isinstance(value, bytearray | array):
            return type(value), bytes(value)
        result = super()._of_contents(value, depth)
        # An object counts by its identity and attributes.
        if isinstance(result, tuple) and result and isinstance(result[0], ObjectIdentity):
            return (type(value), *result[1:])
        if isinstance(result, ObjectIdentity):
            return (type(value),)
        return result

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        return Tensor

    def _of_function(self, value: FunctionType | MethodType, depth: int) -> Hashable:
        if isinstance(value, MethodType):
            return type(value), self(value.__func__, depth), self(value.__self__, depth)
        return super()._of_function(value, depth)
