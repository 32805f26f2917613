"""Train a Hugging Face language model that computes its own loss.

cd examples
python -m your_model.language_model
penstock check your_model.language_model:make --schedules 1f1b,zb-h1
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock


def model() -> LlamaForCausalLM:
    """Build a tiny Llama from a config; a model from `from_pretrained` works, too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def sentences(rows: int, length: int) -> dict[str, Any]:
    """Return sentences of consecutive tokens, each with a random start."""
    tokens = (torch.randint(64, (rows, 1)) + torch.arange(length)) % 64
    return {"input_ids": tokens, "labels": tokens}


def make() -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Return the model and a batch for `penstock check`."""
    return model(), sentences(rows=6, length=8)


def main(steps: int = 30) -> None:
    """Train the model on batches of two sequence lengths."""
    torch.set_num_threads(1)
    pipe = penstock.Pipe(model(), chunks=4, stages=2, example=sentences(16, 16), schedule="1f1b")
    print(pipe.summary())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        result = pipe.step(**sentences(rows=16, length=16 if step % 2 else 24))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {result.loss:.3f}")


if __name__ == "__main__":
    main()
