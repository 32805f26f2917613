"""Training curves of Hugging Face Trainers, unsplit and as pipes, to compare with each other.

`MODELS` are tiny models with dropout 0 and the rows of a dataset. `train` runs a Trainer and
returns its curve: loss and gradient norm of each step, and the losses of the evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from penstock import Pipe
from penstock.integrations.transformers import PipeTrainer
from tests.integrations.curve import Curve, Killed

Rows = list[dict[str, Any]]
VOCABULARY = 64


def make_llama(dropout: float = 0.0, layers: int = 4) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_llama_lora(dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, init_lora_weights=False
    )
    return get_peft_model(make_llama(), adapters)


def make_gpt2(dropout: float = 0.0) -> Any:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=4,
        n_head=2,
        n_positions=32,
        use_cache=False,
        **rates,
    )
    return GPT2LMHeadModel(config)


def make_bert(dropout: float = 0.0) -> Any:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)


def make_t5(dropout: float = 0.0) -> Any:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def make_vit(dropout: float = 0.0) -> Any:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


def make_text_rows(count: int, seed: int = 0, length: int = 10) -> Rows:
    """Return rows of tokens, of which each has another number of ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for index in range(count):
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: index % 7] = -100
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def make_image_rows(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    return [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]


@dataclass(frozen=True)
class ModelCase:
    """A tiny model and its data. `dropout` is the default rate of its family."""

    make: Callable[..., Any]
    make_rows: Callable[..., Rows] = make_text_rows
    dropout: float = 0.1


MODELS = {
    "Llama": ModelCase(make_llama),
    "GPT-2": ModelCase(make_gpt2),
    "BERT": ModelCase(make_bert),
    "T5": ModelCase(make_t5),
    "ViT": ModelCase(make_vit, make_image_rows),
    "Llama + LoRA": ModelCase(make_llama_lora),
}

TIED = ("GPT-2", "BERT", "T5")  # two of their layers share a weight


class KillAfterSave(TrainerCallback):  # type: ignore[misc]
    """Ends a run as soon as the checkpoint of a step is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def make_arguments(folder: str, **options: Any) -> TrainingArguments:
    defaults = {
        "output_dir": folder,
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": 7,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**defaults, **options})


def make_pipe(model: nn.Module, rows: Rows, **options: Any) -> Pipe:
    example = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    stages = options.pop("stages", 2)
    defaults: dict[str, Any] = {"chunks": 2, "balance": "parameters", "schedule": "1f1b"}
    if not {"mesh", "group"} & options.keys():
        defaults |= {"stages": stages, "devices": ["cpu"] * stages}
    return Pipe(model, example=example, **{**defaults, **options})


def train(
    case: ModelCase,
    folder: str,
    trainer_class: type[Trainer] = PipeTrainer,
    *,
    pipe_options: dict[str, Any] | None = None,
    train_rows: int = 22,
    eval_rows: int = 7,
    dropout: float = 0.0,
    curve: Curve | None = None,
    callbacks: list[Any] | None = None,
    resume: str | None = None,
    trainer_options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Curve:
    """Train a model from its first weights, or from a checkpoint, and return its curve.

    Without `pipe_options` the model is unsplit. A `curve` is continued.
    """
    set_seed(0)
    model, rows = case.make(dropout), case.make_rows(train_rows)
    if pipe_options is not None:
        model = make_pipe(model, rows, **pipe_options)
    trainer = trainer_class(
        model=model,
        args=make_arguments(folder, **arguments),
        train_dataset=rows,
        eval_dataset=case.make_rows(eval_rows, seed=1),
        callbacks=callbacks,
        **(trainer_options or {}),
    )
    curve = Curve() if curve is None else curve
    with suppress(Killed):
        trainer.train(resume_from_checkpoint=resume)
    curve.add(trainer.state.log_history)
    return curve
