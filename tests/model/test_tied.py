"""Tensors that are registered under several names."""

from __future__ import annotations

import torch
from torch import nn

from penstock.model.tied import find_tied_names


def test_tied_buffers_have_the_name_of_the_first() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mask = torch.ones(2)
    layers[0].register_buffer("mask", mask)
    layers[1].register_buffer("shared_mask", mask)
    layers[1].bias = layers[0].bias
    assert find_tied_names(layers) == {"1.bias": "0.bias", "1.shared_mask": "0.mask"}
