"""Measure what dropout costs in a pipe, and what it costs the unsplit model.

    python benchmarks/dropout.py                         # two CPU ranks, small models
    python benchmarks/dropout.py --devices 4             # four virtual GPUs of cuda:0
    python benchmarks/dropout.py --devices 8 --dtype bfloat16 --model gpt2

Two models, each with dropout 0 and with dropout 0.1: eight `nn.TransformerEncoderLayer`s in an
`nn.Sequential`, and GPT-2 of transformers with its own forward and loss. Each runs unsplit, one
micro-batch after another, and as a pipe under the runtimes `inline` and `threads`. Every round runs
each variant once, so that all see the same noise. The times are medians over the rounds, and the
ratio is the median over the rounds of dropout 0.1 over dropout 0; beside it, the same divided by
that of the unsplit model. `host` is the processor time of all threads, which other processes
disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.virtual import GpuLock

RATES = (0.0, 0.1)
RUNTIMES = ("inline", "threads")


class Sizes(NamedTuple):
    """The sizes of a model and its batch."""

    layers: int
    width: int
    heads: int
    tokens: int
    rows: int  # rows of a micro-batch
    chunks: int
    vocabulary: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.width} wide, {self.chunks} micro-batches of "
            f"{self.rows} x {self.tokens} tokens"
        )


SIZES = {
    ("encoder", "cpu"): Sizes(8, 128, 4, 64, 4, 4, 0),
    ("gpt2", "cpu"): Sizes(8, 128, 4, 64, 4, 4, 1000),
    ("encoder", "cuda"): Sizes(8, 512, 8, 128, 4, 32, 0),
    ("gpt2", "cuda"): Sizes(24, 1024, 16, 512, 2, 16, 32000),
}


class Variant(NamedTuple):
    """A model with one dropout rate: its forward and backward by name of the runtime."""

    steps: Mapping[str, Callable[[], Any]]
    model: nn.Module


class Taken(NamedTuple):
    """The seconds of a step, and the processor time of all threads."""

    wall: float
    host: float


def encoder(sizes: Sizes, rate: float) -> nn.Sequential:
    """Build a stack of encoder layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                sizes.width, sizes.heads, 4 * sizes.width, rate, batch_first=True
            )
            for _ in range(sizes.layers)
        )
    )


def gpt2(sizes: Sizes, rate: float) -> nn.Module:
    """Build GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        n_positions=sizes.tokens,
        vocab_size=sizes.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=rate,
        embd_pdrop=rate,
        attn_pdrop=rate,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def square_mean(output: Tensor) -> Tensor:
    """Return a loss that needs no target."""
    return output.float().square().mean()


def build_encoder(sizes: Sizes, rate: float, devices: list[Any], dtype: torch.dtype) -> Variant:
    """Return the steps of the encoder layers."""
    home = torch.device("cpu" if devices[0] == "cpu" else "cuda:0")
    model = encoder(sizes, rate).to(home, dtype)
    x = torch.randn(sizes.chunks * sizes.rows, sizes.tokens, sizes.width, device=home, dtype=dtype)

    def unsplit() -> None:
        for rows in x.chunk(sizes.chunks):
            (square_mean(model(rows)) / sizes.chunks).backward()

    stages = [len(part) for part in torch.arange(sizes.layers).tensor_split(len(devices))]
    pipes = {
        runtime: Pipe(
            model, sizes.chunks, "never", stages=stages, devices=devices, schedule="1f1b",
            loss_fn=square_mean, runtime=runtime, audit="off",
        )
        for runtime in RUNTIMES
    }  # fmt: skip
    steps = {runtime: lambda pipe=pipe: pipe.step(x) for runtime, pipe in pipes.items()}
    return Variant({"unsplit": unsplit, **steps}, model)


def build_gpt2(sizes: Sizes, rate: float, devices: list[Any], dtype: torch.dtype) -> Variant:
    """Return the steps of GPT-2, whose output has the loss."""
    home = torch.device("cpu" if devices[0] == "cpu" else "cuda:0")
    model = gpt2(sizes, rate).to(home, dtype)
    shape = sizes.chunks * sizes.rows, sizes.tokens
    ids = torch.randint(sizes.vocabulary, shape, device=home)

    def unsplit() -> None:
        for rows in ids.chunk(sizes.chunks):
            (model(input_ids=rows, labels=rows).loss / sizes.chunks).backward()

    batch = {"input_ids": ids, "labels": ids}
    pipes = {
        runtime: Pipe(
            model, sizes.chunks, "never", stages=len(devices), devices=devices, schedule="1f1b",
            example=batch, balance="parameters", runtime=runtime, audit="off",
        )
        for runtime in RUNTIMES
    }  # fmt: skip
    steps = {runtime: lambda pipe=pipe: pipe.step(**batch) for runtime, pipe in pipes.items()}
    return Variant({"unsplit": unsplit, **steps}, model)


BUILDERS = {"encoder": build_encoder, "gpt2": build_gpt2}


def measure(step: Callable[[], Any], model: nn.Module, is_gpu: bool) -> Taken:
    """Run a step, and wait for it."""
    model.zero_grad()
    if is_gpu:
        torch.cuda.synchronize()
    wall, host = time.perf_counter(), time.process_time()
    step()
    if is_gpu:
        torch.cuda.synchronize()
    return Taken(time.perf_counter() - wall, time.process_time() - host)


def compare(name: str, devices: list[Any], dtype: torch.dtype, rounds: int, lock: GpuLock) -> None:
    """Print the table of one model."""
    is_gpu = devices[0] != "cpu"
    sizes = SIZES[name, "cuda" if is_gpu else "cpu"]
    with lock.hold(exclusive=False):
        variants = {rate: BUILDERS[name](sizes, rate, devices, dtype) for rate in RATES}
    durations: dict[tuple[str, float], list[Taken]] = {}
    for round_index in range(rounds + 2):
        for runtime in ("unsplit", *RUNTIMES):
            for rate in RATES[:: 1 if round_index % 2 else -1]:
                with lock.hold(exclusive=True):
                    taken = measure(variants[rate].steps[runtime], variants[rate].model, is_gpu)
                if round_index > 1:  # the first rounds learn what the stages do, and warm up
                    durations.setdefault((runtime, rate), []).append(taken)
    print(f"\n{name}: {sizes}\n")
    print("| | dropout 0 | dropout 0.1 | ratio | over unsplit | ratio, host | over unsplit |")
    print("|---|---|---|---|---|---|---|")
    own = [1.0, 1.0]
    for runtime in ("unsplit", *RUNTIMES):
        without, drops = (durations[runtime, rate] for rate in RATES)
        pairs = list(zip(drops, without, strict=True))
        ratios = [
            statistics.median(with_[clock] / none[clock] for with_, none in pairs)
            for clock in range(2)
        ]
        own = ratios if runtime == "unsplit" else own
        times = [
            1e3 * statistics.median(taken.wall for taken in column) for column in (without, drops)
        ]
        cells = [runtime, *(f"{ms:.1f} ms" for ms in times)]
        for ratio, unsplit in zip(ratios, own, strict=True):
            cells += [f"{ratio:.3f}", f"{ratio / unsplit:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, help="virtual GPUs; without it, two CPU ranks")
    parser.add_argument("--model", choices=sorted(BUILDERS), help="by default both")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lock", help="a file by which processes that share the GPU take turns")
    args = parser.parse_args()
    devices: list[Any] = ["cpu", "cpu"]
    if args.devices:
        devices = list(penstock.virtual_devices("cuda:0", args.devices))
    else:
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if args.devices else "CPU"
    print(f"{where}, {len(devices)} ranks, torch {torch.__version__}, {args.dtype}, 1f1b, no")
    print(f"recomputation, medians of {args.rounds} rounds")
    for name in BUILDERS:
        if args.model in (None, name):
            compare(name, devices, getattr(torch, args.dtype), args.rounds, GpuLock(args.lock))


if __name__ == "__main__":
    main()
