"""Training curves of TRL's SFTTrainer, unsplit and as a pipe."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import datasets
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from penstock.integrations.transformers import PipeTrainerMixin
from tests.integrations.curve import Curve, Killed
from tests.integrations.curves import (
    VOCABULARY,
    make_arguments,
    make_llama,
    make_llama_lora,
    make_pipe,
    make_text_rows,
)


class PipeSFTTrainer(PipeTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """The SFTTrainer for a pipe."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def make_rows(count: int, lengths: int) -> list[dict[str, str]]:
    """Return prompts, whose tokens are ignored by the loss, with completions of some lengths."""
    generator = torch.Generator().manual_seed(0)

    def write(length: int) -> str:
        numbers = torch.randint(VOCABULARY - 3, (length,), generator=generator).tolist()
        return " ".join(f"w{number}" for number in numbers)

    return [{"prompt": f"{write(3)} ", "completion": write(3 + i % lengths)} for i in range(count)]


def train_sft(
    folder: str,
    pipe_options: dict[str, Any] | None = None,
    *,
    lora: bool = False,
    curve: Curve | None = None,
    callbacks: list[Any] | None = None,
    resume: str | None = None,
    loss_type: str = "nll",
    train_rows: int = 22,
    eval_rows: int = 7,
    lengths: int = 5,
    **arguments: Any,
) -> Curve:
    """Train a Llama as `curves.train` does, with an SFTTrainer."""
    datasets.disable_progress_bars()
    set_seed(0)
    model = make_llama_lora() if lora else make_llama()
    if pipe_options is not None:
        model = make_pipe(model, make_text_rows(4), **pipe_options)
    defaults = make_arguments(folder, **arguments)
    names = {"learning_rate", *arguments, "max_steps", "logging_steps", "eval_strategy"}
    names |= {"eval_steps", "save_strategy", "report_to", "disable_tqdm", "use_cpu", "output_dir"}
    names |= {"per_device_train_batch_size", "per_device_eval_batch_size", "dataloader_pin_memory"}
    config = SFTConfig(
        bf16=False, loss_type=loss_type, **{name: getattr(defaults, name) for name in names}
    )
    trainer = (SFTTrainer if pipe_options is None else PipeSFTTrainer)(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(make_rows(train_rows, lengths)),
        eval_dataset=Dataset.from_list(make_rows(eval_rows, lengths)),
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )
    curve = Curve() if curve is None else curve
    with suppress(Killed):
        trainer.train(resume_from_checkpoint=resume)
    curve.add(trainer.state.log_history)
    return curve
