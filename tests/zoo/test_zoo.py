"""Every exhibit of the zoo gives its own numbers in 2, 3 and 4 stages, its code untouched."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.comparing import Exhibited, trials
from tests.zoo.exhibits import ZOO
from tests.zoo.refused import REFUSED
from tests.zoo.table import PAGE, listed

torch.set_num_threads(1)

NAMES = [name for name, one in ZOO.items() if not one.slow]
NUMBERS = {name: number for number, name in enumerate(ZOO)}


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_gives_its_own_numbers(name: str) -> None:
    """Training on both sizes and forward only on one; which schedule has how many stages varies."""
    exhibited = Exhibited(ZOO[name])
    for number, trial in enumerate(trials(NUMBERS[name])):
        pipe = exhibited.piped(trial)
        for at in (0, 1):
            exhibited.compared(trial, pipe, at, training=True)
        exhibited.compared(trial, pipe, number % 2, training=False)
    exhibited.as_before()


def test_the_page_lists_every_exhibit() -> None:
    """If it does not: `make zoo`."""
    found = listed(PAGE.read_text())
    assert {(one.name, one.source) for one in ZOO.values()} <= found
    assert {(one.name, one.source) for one in REFUSED} <= found


def test_there_are_enough() -> None:
    names = " ".join(ZOO)
    for name in ("ResNet", "U-Net", "DenseNet", "ViT", "diffusion U-Net", "mixture of experts"):
        assert name in names
    assert len(ZOO) >= 50
