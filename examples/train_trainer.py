"""Train a Hugging Face model as a pipeline with `PipeTrainer`, in one process or under torchrun.

    python examples/train_trainer.py                                  two CPU ranks, in one process
    python examples/train_trainer.py --check                          and the same unsplit
    torchrun --nproc-per-node 2 examples/train_trainer.py             one process for each rank
    torchrun --nproc-per-node 4 examples/train_trainer.py --dp 2      two replicas of two ranks

Everything but `make_pipe` is what a script for the unsplit model has.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import penstock
from penstock.integrations.transformers import PipeTrainer

TOKENS = 64


def make_model() -> Any:
    """Return a small Llama with random weights. Use `from_pretrained` for a real one."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def make_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens that count up, of which the first labels are ignored."""
    starts = torch.arange(count) * 7
    ids = (starts[:, None] + torch.arange(16)) % TOKENS
    labels = ids.masked_fill(torch.arange(16) < 4, -100)
    return [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]


def make_pipe(model: Any, dp: int) -> penstock.Pipe:
    """Split the model over the processes of torchrun, or over two ranks of this process."""
    mesh = penstock.init(dp=dp) if "RANK" in os.environ else None
    devices = None if mesh is not None or torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    stages = None if mesh is not None else 2
    ids = torch.zeros(8, 16, dtype=torch.long)
    return penstock.Pipe(
        model,
        chunks=4,
        stages=stages,
        devices=devices,
        mesh=mesh,
        schedule="1f1b",
        balance="parameters",
        example={"input_ids": ids, "labels": ids},
    )


def train(trainer_class: type[Trainer], model: Any, folder: str, on_cpu: bool, rows: int) -> Any:
    """Train for 20 steps, and return the log."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=20,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=False,
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=make_rows(64), eval_dataset=make_rows(8)
    )
    trainer.train()
    return trainer.state.log_history


def main() -> None:
    """Parse the command line, train, and compare if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the unsplit Trainer")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipe, under torchrun")
    parser.add_argument("--out", default="out/trainer", help="the folder of the checkpoints")
    options = parser.parse_args()
    if options.check and "RANK" in os.environ:
        parser.error("--check trains the unsplit model in one process: start it without torchrun")
    pipe = make_pipe(make_model(), options.dp)
    on_cpu = pipe.device.type == "cpu"
    log = train(PipeTrainer, pipe, options.out, on_cpu, rows=8 // options.dp)
    if options.check:
        expected = train(Trainer, make_model(), f"{options.out}/unsplit", on_cpu, rows=8)
        pairs = [
            (entry[key], other[key])
            for entry, other in zip(log, expected, strict=True)
            for key in ("loss", "grad_norm", "eval_loss")
            if key in entry
        ]
        difference = max(abs(a - b) for a, b in pairs)
        print(f"largest difference from the unsplit Trainer: {difference:.1e}")


if __name__ == "__main__":
    main()
