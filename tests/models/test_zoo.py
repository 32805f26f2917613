"""Every model of the zoo, unchanged, equals itself as a pipe of 2, 3 and 4 stages."""

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
    pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
]
# The models of transformers and peft that `make test` runs besides all that are written here: each
# has something that the others do not have. `make zoo` runs all of them.
EVERY_DAY = """
    GPT-2; GPT-2, all hidden states; GPT-NeoX; GPT-J; OPT; BLOOM; Falcon; Llama; Mistral; Qwen2;
    Qwen3; Gemma; Gemma 2; Phi; Phi-3; Cohere; Mixtral; Mixtral, balanced experts; DeepSeek-V3;
    Qwen2-MoE; Mamba; Mamba 2; RWKV; BERT; BERT, spans; RoBERTa; DistilBERT; ALBERT; ELECTRA;
    DeBERTa; DeBERTa-v2; ModernBERT; XLNet; T5; BART; Pegasus; Whisper; Wav2Vec 2, CTC; ViT; Swin;
    ConvNeXt; SegFormer; CLIP; SigLIP; LLaVA; Llama, LoRA; GPT-2, LoRA
"""
CHOSEN = {" ".join(name.split()) for name in EVERY_DAY.split(";")}
NAMES = [name for name, one in ZOO.items() if one.source == "here" or one.name in CHOSEN]
NUMBERS = {name: number for number, name in enumerate(ZOO)}


@pytest.mark.parametrize("name", NAMES)
def test_zoo_model_as_a_pipe_equals_the_unsplit_model(name: str) -> None:
    """Each number of stages is combined with some of the schedules, batch sizes and modes."""
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
    exhibited.compared(four, exhibited.piped(four), at=1 - number % 2, training=True)
    exhibited.as_before()


def test_docs_models_page_lists_every_zoo_model() -> None:
    """If it does not, run `make zoo`."""
    found = listed(PAGE.read_text())
    assert {(one.name, one.source) for one in ZOO.values()} <= found
    assert {(one.name, one.source) for one in REFUSED} <= found


def test_zoo_has_the_expected_models() -> None:
    assert {one.name for one in ZOO.values() if one.source != "here"} >= CHOSEN
    assert len(NAMES) >= 80
    names = " ".join(ZOO)
    for name in ("ResNet", "U-Net", "DenseNet", "ViT", "diffusion U-Net", "mixture of experts"):
        assert name in names
    assert len(ZOO) >= 50
