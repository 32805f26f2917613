"""Every exhibit of the zoo gives its own numbers in 2, 3 and 4 stages, its code untouched."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.zoo.comparing import Exhibited, trials
from tests.zoo.exhibits import ZOO
from tests.zoo.refused import REFUSED
from tests.zoo.table import PAGE, listed

torch.set_num_threads(1)

pytestmark = [  # transformers' own
    pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
]
NAMES = [name for name, one in ZOO.items() if not one.slow]
NUMBERS = {name: number for number, name in enumerate(ZOO)}


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_gives_its_own_numbers(name: str) -> None:
    """Both schedules, sizes and modes; each number of stages, with one or the other of them."""
    if ZOO[name].warns:
        warnings.filterwarnings("ignore", ZOO[name].warns)
    exhibited, number = Exhibited(ZOO[name]), NUMBERS[name]
    two, three, four = trials(number)
    pipe = exhibited.piped(two)
    exhibited.compared(two, pipe, at=0, training=True)
    exhibited.compared(two, pipe, at=1, training=True)
    pipe = exhibited.piped(three)
    exhibited.compared(three, pipe, at=1, training=True)
    exhibited.compared(three, pipe, at=number % 2, training=False)
    pipe = exhibited.piped(four)
    exhibited.compared(four, pipe, at=0, training=True)
    exhibited.compared(four, pipe, at=1, training=True)
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
