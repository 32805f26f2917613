"""Models that a pipe refuses, and the messages."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock import PenstockError, Pipe
from tests.models import models_habits as habits
from tests.models import models_refused as models
from tests.models.architecture import SEED, Batch, called, numbers, squares, tokens
from tests.models.hugging_face import BASE, IMAGE, SEQ2SEQ, model


@dataclass(frozen=True)
class Refused:
    """A model that is refused when the pipe is made, or at the latest after these batches."""

    name: str
    source: str
    build: Callable[[], nn.Module]
    batches: tuple[Batch, ...]
    words: str  # a part of the message

    def message(self, stages: int = 3) -> str:
        """Return the message of the PenstockError, without folders and line numbers."""
        torch.manual_seed(SEED)
        random.seed(SEED)
        try:
            pipe = Pipe(
                self.build().double(),
                chunks=2,
                stages=stages,
                devices=["cpu"] * stages,
                example=self.batches[0],
                loss_fn=squares,
                balance="parameters",
                runtime="inline",
            )
            for batch in self.batches:
                called(pipe, batch)
        except PenstockError as error:
            return re.sub(r"(?<=[\s(])/\S*/", "", re.sub(r"(\.py):\d+", r"\1", str(error)))
        return "nothing"


def _rows(length: int = 5) -> Batch:
    return (numbers(4, length, 4),)


def _hugging_face(kind: str, config: str, base: dict[str, Any], **settings: Any) -> nn.Module:
    """Build a model with these attributes set on its modules, for example LayerDrop."""
    made = model(kind, config, base)
    for name, value in settings.items():
        for module in made.modules():
            if hasattr(module, name):
                setattr(module, name, value)
    return made


def _compiled() -> nn.Module:
    compiled = torch.compile(habits.Remembering(), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


REFUSED = [
    Refused("LayerDrop", "here", models.Dropping, (_rows(),) * 8, "the forward took another path"),
    Refused(
        "BART with LayerDrop",
        "transformers",
        partial(
            _hugging_face, "BartForConditionalGeneration", "BartConfig", SEQ2SEQ, layerdrop=0.5
        ),
        ({"input_ids": tokens(4, 6), "labels": tokens(4, 5)},),
        "random numbers decide what the forward does next",
    ),
    Refused(
        "goes on while a block's output is small",
        "here",
        models.Peeking,
        (_rows(),),
        "reads a value that was computed from unit 'blocks.0'",
    ),
    Refused(
        "keeps the rows that a block likes",
        "here",
        models.Selecting,
        (_rows(),),
        "reads a value that was computed from unit 'inner'",
    ),
    Refused(
        "a unit that the example did not call",
        "here",
        models.Sometimes,
        (_rows(5), _rows(9)),
        "Make the Pipe with an example like these",
    ),
    Refused(
        "a running mean that another stage reads",
        "here",
        models.Lagging,
        (_rows(),),
        "the forward changes the buffer 'mean' between units",
    ),
    Refused(
        "a hook that computes, and puts away what it gets",
        "here",
        models.Doubling,
        (_rows(),),
        "a tensor that unit 'blocks.0.0' made but did not return",
    ),
    Refused(
        "ViLT",
        "transformers",
        partial(model, "ViltModel", "ViltConfig", {**BASE, **IMAGE, "max_image_length": -1}),
        ({"input_ids": tokens(4, 6), "pixel_values": numbers(4, 3, 8, 8)},),
        "the forward took another path",
    ),
    Refused(
        "an object that blocks fill, and others read",
        "here",
        models.Noting,
        (_rows(),),
        "unit 'blocks.1' receives a Notes that contains a tensor of a unit",
    ),
    Refused(
        "a cache of keys and values",
        "transformers",
        partial(model, "GPT2LMHeadModel", "GPT2Config", BASE),
        ({"input_ids": tokens(4, 6), "use_cache": True},),
        "use_cache was given to GPT2LMHeadModel",
    ),
    Refused(
        "compiled as a whole", "here", _compiled, (_rows(),), "the model is compiled as a whole"
    ),
]
