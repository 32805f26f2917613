"""Packed sequences between units: how long each one is follows from the inputs.

`pack_padded_sequence` gives the numbers of rows at each place, as a tensor, together with what is
packed, which follows from units. Recurrent layers and `pad_packed_sequence` need these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.partition.forward.dry import any_numbers, as_fake
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.trees import Called, flatten, unflatten

PACK: Any = torch._VF._pack_padded_sequence
PAD: Any = torch._VF._pad_packed_sequence


class Packing:
    """Remembers the numbers of rows."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        self._told: dict[int, Tensor] = {}  # by the identity of what has no numbers

    def told(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The numbers of those that have some, by identity."""
        return {id(t): self._told[id(t)] for t in tensors if id(t) in self._told}

    def computed(self, asked: Called, free: dict[int, Tensor]) -> Any | None:
        """What it gives, without the numbers of what is packed; None: not all lengths are known."""
        known = {**free, **self.told(asked.tensors)}
        if any(id(t) not in known for t in asked.tensors if not t.is_floating_point()):
            return None
        found, _ = asked.with_each(lambda t: known[id(t)] if id(t) in known else any_numbers(t))
        leaves, spec = flatten(found)
        made = [as_fake(self._fakes, leaf, "") for leaf in leaves]
        for fake, real in zip(made, leaves, strict=True):
            if isinstance(real, Tensor) and not real.is_floating_point():
                self._told[id(fake)] = real
        return unflatten(made, spec)
