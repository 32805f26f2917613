"""Models of the zoo, unchanged, equal themselves as a pipe. `make zoo` tries all of them."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.models.comparing import Exhibited, trials
from tests.models.exhibits import ZOO
from tests.models.refused import REFUSED
from tests.models.table import PAGE, listed

torch.set_num_threads(1)

pytestmark = [  # raised by transformers
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
]
# The models that `make test` runs: each has something that the others do not have.
DAILY = """
    ResNet; U-Net; ViT; nanoGPT; encoder-decoder, tied; mixture of experts; LSTM stack;
    dataclass, keyword-only inputs; nested dicts, ModuleDict; CLIP towers; in-place glue; hooks;
    attributes set in forward; checkpoint around blocks; compiled blocks; features by hooks;
    buffers that count; blocks in a generator; options and side inputs; GPT-2 (transformers);
    Llama (transformers); T5 (transformers); Wav2Vec 2, CTC (transformers); Llama, LoRA (peft)
"""
NAMES = [" ".join(name.split()) for name in DAILY.split(";")]
NUMBERS = {name: number for number, name in enumerate(ZOO)}


@pytest.mark.parametrize("name", NAMES)
def test_zoo_model_as_a_pipe_equals_the_unsplit_model(name: str) -> None:
    """Models take turns with the numbers of stages, schedules and batch sizes.

    One trains on batches of two sizes, and the next one trains and evaluates. `make zoo` tries
    every combination for every model.
    """
    if ZOO[name].warns:
        warnings.filterwarnings("ignore", ZOO[name].warns)
    exhibited, number = Exhibited(ZOO[name]), NUMBERS[name]
    two, more = trials(number)
    trains_only = NAMES.index(name) % 2 == 0
    trial = two if trains_only else more
    pipe = exhibited.piped(trial)
    exhibited.compared(trial, pipe, at=1, training=True)
    if trains_only:
        exhibited.compared(trial, pipe, at=0, training=True)
    else:
        exhibited.compared(trial, pipe, at=number % 2, training=False)
    exhibited.as_before()


def test_docs_models_page_lists_every_zoo_model() -> None:
    """If it does not, run `make zoo`."""
    found = listed(PAGE.read_text())
    assert {(one.name, one.source) for one in ZOO.values()} <= found
    assert {(one.name, one.source) for one in REFUSED} <= found


def test_zoo_has_the_expected_models() -> None:
    assert set(NAMES) <= ZOO.keys()
    assert len(ZOO) >= 213
    assert {one.source for one in ZOO.values()} == {"here", "transformers", "peft"}
