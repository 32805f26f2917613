"""Measure the time per token of `pipe.generate` against `generate` of the unsplit model.

    torchrun --nproc-per-node 2 benchmarks/generate.py [--hidden 384] [--layers 8] [--rounds 9]

Llama and GPT-2 with random weights generate greedily, with caches of keys and values. Every round
runs each variant once, so that all see the same noise. While a variant of one process runs, the
other process waits. Each process has one thread. The ratio is that of the medians.

one process      two stages on two CPU ranks in the first process
two processes    one stage in each; a call lasts until the slower one is done
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import penstock

VOCABULARY = 8192
PROMPT = 16


def make_llama(hidden: int, layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
    )
    return LlamaForCausalLM(config)


def make_gpt2(hidden: int, layers: int) -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=hidden, n_layer=layers, n_head=hidden // 32, n_positions=512
    )
    return GPT2LMHeadModel(config)


def measure(generate: Callable[[], Tensor], seconds: list[float], tokens: int) -> Tensor:
    """Add the seconds per token to a list, and return the tokens."""
    start = time.perf_counter()
    result = generate()
    seconds.append((time.perf_counter() - start) / tokens)
    return result


def compare(make: Callable[[int, int], Any], args: argparse.Namespace, mesh: Any) -> str:
    """Return a line of the table: milliseconds per token, and ratios to the unsplit model."""
    torch.manual_seed(0)
    unsplit = make(args.hidden, args.layers).eval()
    ids = torch.randint(3, VOCABULARY, (args.rows, PROMPT))
    example = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"example": example, "balance": "parameters"}
    local = penstock.Pipe(
        copy.deepcopy(unsplit), stages=2, devices=["cpu", "cpu"], **options
    ).eval()
    spread = penstock.Pipe(copy.deepcopy(unsplit), mesh=mesh, **options).eval()
    call: dict[str, Any] = {
        "max_new_tokens": args.tokens,
        "min_new_tokens": args.tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    seconds: list[list[float]] = [[], [], []]
    for round_index in range(args.rounds + 1):
        dist.barrier()
        if dist.get_rank() == 0:
            expected = measure(lambda: unsplit.generate(ids, **call), seconds[0], args.tokens)
            result = measure(lambda: local.generate(ids, **call), seconds[1], args.tokens)
            assert torch.equal(result, expected)
        dist.barrier()
        begin = time.perf_counter()
        result = spread.generate(ids, **call)
        dist.barrier()
        seconds[2].append((time.perf_counter() - begin) / args.tokens)
        if dist.get_rank() == 0:
            assert torch.equal(result, expected)
        if round_index == 0:
            seconds = [[], [], []]
    if dist.get_rank():
        return ""
    medians = [statistics.median(times) * 1e3 for times in seconds]
    ratios = [f"{median / medians[0]:5.2f}" for median in medians[1:]]
    return "  ".join(
        [f"{unsplit.config.model_type:6}", *(f"{median:13.2f}" for median in medians), *ratios]
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    mesh = penstock.init()
    lines = [compare(make, args, mesh) for make in (make_llama, make_gpt2)]
    if dist.get_rank() == 0:
        print(
            f"milliseconds per token: {args.layers} layers of width {args.hidden}, {args.rows} rows"
        )
        print("model         unsplit    one process  two processes        ratios")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
