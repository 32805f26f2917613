"""Tensors that are registered under several names."""

from __future__ import annotations

import torch
from torch import nn

from penstock import Pipe
from penstock.model.tied import find_tied_names, find_tied_tensors


def test_tied_buffers_have_the_name_of_the_first() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mask = torch.ones(2)
    layers[0].register_buffer("mask", mask)
    layers[1].register_buffer("shared_mask", mask)
    layers[1].bias = layers[0].bias
    assert find_tied_names(layers) == {"1.bias": "0.bias", "1.shared_mask": "0.mask"}


def test_tied_tensors_are_those_that_several_ranks_have() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight, third.weight = first.weight, first.weight
    third.bias = second.bias
    layers = nn.Sequential(first, second, third)
    partition = Pipe(layers, stages=3, devices=["cpu"] * 3)._placed_partition.partition
    weight, bias = find_tied_tensors(partition.stages, (0, 1, 2), rank=1)
    assert (weight.name, weight.ranks, len(weight.locations)) == ("0.weight", (0, 1, 2), 1)
    assert (bias.name, bias.ranks, bias.local_tensor) == ("1.bias", (1, 2), second.bias)
    # The second and the third stage are on one rank, which has their bias for itself.
    (weight,) = find_tied_tensors(partition.stages, (0, 1, 1), rank=1)
    assert (weight.ranks, len(weight.locations)) == ((0, 1), 2)
