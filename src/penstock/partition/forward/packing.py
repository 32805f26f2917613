"""Packed sequences between units: how long each one is follows from the inputs.

`pack_padded_sequence` gives the numbers of rows at each place, as a tensor, together with what is
packed, which follows from units. Recurrent layers and `pad_packed_sequence` need these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.partition.forward.dry import make_dummy_tensor, make_fake_output
from penstock.partition.forward.faking import FakeTensorFactory
from penstock.partition.forward.trees import FunctionCall, flatten, unflatten

PACK_PADDED: Any = torch._VF._pack_padded_sequence
PAD_PACKED: Any = torch._VF._pad_packed_sequence


class PackedSequenceLengths:
    """Remembers the numbers of rows."""

    def __init__(self, fake_factory: FakeTensorFactory) -> None:
        self._fake_factory = fake_factory
        self._known_integers: dict[int, Tensor] = {}  # by the identity of what has no numbers

    def find_known_integers(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The numbers of those that have some, by identity."""
        return {
            id(t): self._known_integers[id(t)] for t in tensors if id(t) in self._known_integers
        }

    def compute(
        self, function_call: FunctionCall, input_only_tensors: dict[int, Tensor]
    ) -> Any | None:
        """What it gives, without the numbers of what is packed; None: not all lengths are known."""
        known = {**input_only_tensors, **self.find_known_integers(function_call.tensors)}
        if any(id(t) not in known for t in function_call.tensors if not t.is_floating_point()):
            return None
        found, _ = function_call.call_with_mapped_tensors(
            lambda t: known[id(t)] if id(t) in known else make_dummy_tensor(t)
        )
        leaves, spec = flatten(found)
        made = [make_fake_output(self._fake_factory, leaf, "") for leaf in leaves]
        for fake, real in zip(made, leaves, strict=True):
            if isinstance(real, Tensor) and not real.is_floating_point():
                self._known_integers[id(fake)] = real
        return unflatten(made, spec)
