"""Tensors without numbers, all on one device, wherever a model's own are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class FakeTensorFactory:
    """Makes them, one for each tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._moved_fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with what they were made of

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """The same without numbers."""
        if isinstance(tensor, FakeTensor) and tensor.device == self.device:
            return tensor
        if tensor.device == self.device:
            if tensor.is_leaf:
                return self.mode.from_tensor(tensor)
            return self.mode.from_tensor(tensor.detach()).requires_grad_()  # else it would warn
        if id(tensor) not in self._moved_fakes:
            with self.mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._moved_fakes[id(tensor)] = made.requires_grad_(tensor.requires_grad), tensor
        return self._moved_fakes[id(tensor)][0]
