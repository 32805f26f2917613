"""Measure what the audit costs: the first step with and without it, and the steps after it.

    python benchmarks/audit.py                                  # five models, 2, 4 and 8 chunks
    python benchmarks/audit.py --model gpt2 --chunks 4 --door call --parts
    python benchmarks/audit.py --device cuda                    # two virtual GPUs
    python benchmarks/audit.py --fresh                          # each first step in a new process
    python benchmarks/audit.py --large --rows 8                 # GPT-2, ResNet-50 and a ViT

Every round builds a pipe with the audit and one without, makes the first step of each, and then
some steps in turns, so that both see the same noise. Rounds take turns in which of the two is
first. Times are processor time of all threads on a CPU, and wall time on a GPU or with
`--clock wall`; ratios are medians over the rounds. "With the pipe" also counts the making of the
pipe, which traces the model. The promise is a first step of at most 1 + 1.5 / chunks
of one without the audit, one and a half micro-batches more, and at most 1.01 for the steps after
it: "later steps" is the median of the ratios of neighbouring steps, in all rounds. "Later calls" is
the ratio of the calls of functions that Python makes in such a step, its own and those of PyTorch:
it has no noise, and shows all that the audit could add. "Beyond one micro-batch" is what the audit
takes beyond the unsplit micro-batch itself, with the time of one of a later step, in milliseconds.

The pipes are new, but the process is not: a warm-up has loaded what PyTorch and Penstock load at
their first use. Both sides leave that out. With `--fresh`, each first step is that of a script: it
is made in a process of its own, which is forked before anything has run. There both sides have it.

A micro-batch has four rows by default, eight times as many for the MLP. The audit runs two rows
together and apart, which are the forwards of four rows: in a micro-batch of four rows, as much as
its whole forward, and in one of eight rows half of it. `--rows 8` shows that.

`--large` measures models of common sizes instead: GPT-2 with 124 million parameters on 64 tokens a
row, ResNet-50 and ViT-S/16 on images of 224 x 224 pixels. A step takes seconds, so there are three
rounds with two later steps each, with 2 and 4 chunks, through `pipe.step`, unless others are given.

The runtime is "inline", where a step takes as long as its micro-batches together, as in that
formula. On p parallel ranks it takes (chunks + p - 1) / p micro-batches, but the unsplit model
still runs its stages one after another: one and a half micro-batches are a first step of
1 + 1.5 * p / (chunks + p - 1). The column "micro-batches more" counts in those of a later step.

`--parts` adds the parts of the audit, in milliseconds: the forward and the backward of the unsplit
model, the comparison of rows, the comparison of states, and the digests while the pipe runs. The
rest of the audit is isolation.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.runtime.audit.audited_call import Audit
from penstock.runtime.audit.cell_recorder import CellRecorder
from penstock.runtime.audit.reference import Reference
from penstock.runtime.audit.rows import RowsCheck
from penstock.runtime.audit.state_check import StateCheck

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from nanogpt.model import GPT, GPTConfig

PARTS: dict[str, list[tuple[type, str]]] = {
    "forward": [(Reference, "run_forward")],
    "backward": [(Reference, "run_backward")],
    "rows": [(RowsCheck, "compare_rows")],
    "states": [(StateCheck, "compare")],
    "digests": [
        (CellRecorder, "before_compute"),
        (CellRecorder, "after_compute"),
        (Audit, "check_step"),
    ],
}


class Clock:
    """Adds up the seconds of the parts of audits. A part inside another one counts once."""

    def __init__(self, read_time: Callable[[], float]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._read_time, self._is_running = read_time, False
        for part, methods in PARTS.items():
            for owner, name in methods:
                self._watch(part, owner, name)

    def _watch(self, part: str, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running and part != "digests":
                return method(*args, **kwargs)
            self._is_running, begin = part != "digests", self._read_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += self._read_time() - begin
                self._is_running = False

        setattr(owner, name, timed)


# ---- models --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model and a batch for it.

    Attributes:
        model: The model.
        inputs: The inputs by name.
        target: The target of `loss_fn`; None if the model computes its own loss.
        loss_fn: The loss function.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    target: Tensor | None = None
    loss_fn: Callable[..., Tensor] | None = None


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm_1(self.conv_1(x)))
        return functional.relu(self.shortcut(x) + self.norm_2(self.conv_2(y)))


class Classifier(nn.Module):
    """A small ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        self.blocks = nn.ModuleList(map(Residual, [width, *widths], widths))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, input: Tensor) -> Tensor:
        x = functional.relu(self.stem(input))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def build_mlp(rows: int, device: str) -> Case:
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    batch = torch.randn(2, 8 * rows, 512, device=device)
    model = nn.Sequential(*layers).to(device)
    return Case(model, {"input": batch[0]}, batch[1], nn.MSELoss())


def build_resnet(rows: int, device: str) -> Case:
    images = torch.randn(rows, 3, 32, 32, device=device)
    target = torch.randint(10, (rows,), device=device)
    model = Classifier(24).to(device)
    return Case(model, {"input": images}, target, nn.CrossEntropyLoss())


def build_nanogpt(rows: int, device: str) -> Case:
    tokens = torch.randint(65, (2, rows, 64), device=device)
    model = GPT(GPTConfig(65, context=64, width=256)).to(device)
    return Case(model, {"ids": tokens[0], "targets": tokens[1]})


def build_gpt2(
    rows: int,
    device: str,
    width: int,
    layers: int,
    length: int = 64,
    heads: int = 4,
    vocabulary: int = 512,
) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (rows, length), device=device)
    model = GPT2LMHeadModel(config).to(device)
    return Case(model, {"input_ids": tokens, "labels": tokens})


def build_image_case(model: nn.Module, rows: int, device: str) -> Case:
    images = torch.randn(rows, 3, 224, 224, device=device)
    labels = torch.randint(1000, (rows,), device=device)
    return Case(model.to(device), {"pixel_values": images, "labels": labels})


def build_resnet50(rows: int, device: str) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    return build_image_case(
        ResNetForImageClassification(ResNetConfig(num_labels=1000)), rows, device
    )


def build_vit_small(rows: int, device: str) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000
    )
    return build_image_case(ViTForImageClassification(config), rows, device)


SMALL_MODELS: dict[str, Callable[[int, str], Case]] = {
    "mlp": build_mlp,
    "nanogpt": build_nanogpt,
    "resnet": build_resnet,
    "gpt2-tiny": lambda rows, device: build_gpt2(rows, device, 32, 2),
    "gpt2": lambda rows, device: build_gpt2(rows, device, 512, 4),
}
LARGE_MODELS: dict[str, Callable[[int, str], Case]] = {
    "gpt2-124m": lambda rows, device: build_gpt2(rows, device, 768, 12, 64, 12, 50257),
    "resnet50": build_resnet50,
    "vit-small": build_vit_small,
}
MODELS = {**SMALL_MODELS, **LARGE_MODELS}


# ---- measurement ---------------------------------------------------------------------------------


class Trainer:
    """A fresh pipe of one of the models, and its batch.

    Attributes:
        seconds: How long it took to make the pipe.
    """

    def __init__(self, args: argparse.Namespace, name: str, chunks: int, audit: str) -> None:
        torch.manual_seed(0)
        self._case = MODELS[name](chunks * args.rows, args.device)
        self._args = args
        begin = args.read_time()
        self._pipe = penstock.Pipe(
            self._case.model,
            chunks,
            args.checkpoint,
            stages=2,
            devices=args.devices,
            balance="parameters",
            schedule="1f1b",
            runtime=args.runtime,
            audit=audit,
            loss_fn=self._case.loss_fn,
            example=self._case.inputs,
        )
        self.seconds = args.read_time() - begin

    def time_step(self, door: str) -> float:
        """Return the seconds of one step."""
        inputs: dict[str, Any] = {**self._case.inputs}
        target, loss_fn = self._case.target, self._case.loss_fn
        begin = self._args.read_time()
        if door == "step":
            if target is not None:
                inputs["target"] = target
            self._pipe.step(**inputs)
        else:
            output: Any = self._pipe(**inputs)
            if loss_fn is not None:
                loss_fn(output, target).backward()
            else:
                (output[1] if isinstance(output, tuple) else output.loss).backward()
        if self._args.device != "cpu":
            torch.accelerator.synchronize()
        seconds: float = self._args.read_time() - begin
        self._case.model.zero_grad()
        return seconds

    def count_calls(self, door: str) -> int:
        """Return how many functions Python calls in one step, in this thread."""
        count = 0

        def note_call(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note_call)
        try:
            self.time_step(door)
        finally:
            sys.setprofile(None)
        return count


class Measurement(NamedTuple):
    """The results of one round, with the audit and without it.

    Attributes:
        first: The ratio of the first steps.
        with_pipe: The same with the making of the pipes.
        microbatches: How many micro-batches of a later step the audit takes.
        beyond: The milliseconds that it takes beyond one micro-batch.
        later: The ratios of neighbouring later steps.
        calls: The ratio of the calls that Python makes in a later step.
    """

    first: float
    with_pipe: float
    microbatches: float
    beyond: float
    later: list[float]
    calls: float


def measure(
    args: argparse.Namespace, name: str, door: str, chunks: int, is_audited_first: bool
) -> Measurement:
    gc.collect()
    on, off = (Trainer(args, name, chunks, audit) for audit in ("first", "off"))
    if is_audited_first:
        audited, without = on.time_step(door), off.time_step(door)
    else:
        without, audited = off.time_step(door), on.time_step(door)
    steps: list[tuple[float, float]] = []
    for step in range(args.later):
        if step % 2:
            seconds, other = on.time_step(door), off.time_step(door)
        else:
            other, seconds = off.time_step(door), on.time_step(door)
        steps.append((seconds, other))
    microbatch = statistics.median(other for _, other in steps) / chunks
    return Measurement(
        audited / without,
        (on.seconds + audited) / (off.seconds + without),
        (audited - without) / microbatch,
        (audited - without - microbatch) * 1e3,
        [seconds / other for seconds, other in steps],
        on.count_calls(door) / off.count_calls(door),
    )


def time_first_step(
    args: argparse.Namespace, name: str, door: str, chunks: int, audit: str
) -> tuple[float, float]:
    """Return the seconds of a first step in a new process, and those with the making of its pipe.

    The process is a fork of this one, which has imported everything and computed nothing.
    """
    read_end, write_end = os.pipe()
    process = os.fork()
    if not process:
        try:
            trainer = Trainer(args, name, chunks, audit)
            seconds = trainer.time_step(door)
            os.write(write_end, json.dumps([seconds, seconds + trainer.seconds]).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        seconds, with_pipe = json.load(pipe)
    os.waitpid(process, 0)
    return seconds, with_pipe


def measure_fresh(args: argparse.Namespace) -> None:
    """Print the ratios of first steps in new processes."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 (here, so that no process does)

    columns = ["model", "door", "chunks", "first step", "promised", "with the pipe"]
    columns += ["milliseconds", "with the audit"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in args.model:
        for door in args.door:
            for chunks in args.chunks:
                rounds = []
                for index in range(args.rounds):
                    kinds = ("first", "off") if index % 2 else ("off", "first")
                    times = {a: time_first_step(args, name, door, chunks, a) for a in kinds}
                    rounds.append((*times["first"], *times["off"]))
                audited, _, without, _ = (statistics.median(c) for c in zip(*rounds, strict=True))
                first = statistics.median(r[0] / r[2] for r in rounds)
                with_pipe = statistics.median(r[1] / r[3] for r in rounds)
                cells = [name, door, str(chunks), f"{first:.2f}", f"{1 + 1.5 / chunks:.2f}"]
                cells += [f"{with_pipe:.2f}", f"{without * 1e3:.0f}", f"{audited * 1e3:.0f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="by default 5")
    parser.add_argument("--model", action="append", choices=MODELS, help="by default all small")
    parser.add_argument("--large", action="store_true", help="the large models")
    parser.add_argument("--chunks", action="append", type=int, help="by default 2, 4 and 8")
    parser.add_argument("--door", action="append", choices=("step", "call"), help="default both")
    parser.add_argument("--runtime", default="inline")
    parser.add_argument("--checkpoint", default="never")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--later", type=int, help="steps after the first one, by default 39")
    parser.add_argument("--parts", action="store_true", help="show the parts of the audit")
    parser.add_argument("--clock", choices=("cpu", "wall"), help="by default cpu on a CPU")
    parser.add_argument("--fresh", action="store_true", help="each first step in a new process")
    args = parser.parse_args()
    args.model = args.model or list(LARGE_MODELS if args.large else SMALL_MODELS)
    args.chunks = args.chunks or ([2, 4] if args.large else [2, 4, 8])
    args.door = args.door or (["step"] if args.large else ["step", "call"])
    args.rounds = args.rounds or (3 if args.large else 5)
    args.later = args.later or (2 if args.large else 39)
    is_cpu = args.device == "cpu"
    args.devices = ["cpu", "cpu"] if is_cpu else penstock.virtual_devices("cuda:0", 2)
    clock_name = args.clock or ("cpu" if is_cpu else "wall")
    args.read_time = time.process_time if clock_name == "cpu" else time.perf_counter
    print(
        f"torch {torch.__version__}, {args.device}, {clock_name} time, "
        f"micro-batches of {args.rows} rows, "
        f"checkpoint={args.checkpoint!r}, {args.later} later steps, {args.rounds} rounds\n"
    )
    if args.fresh:
        measure_fresh(args)
        return
    clock = Clock(args.read_time) if args.parts else None
    parts: Sequence[str] = tuple(PARTS) if clock is not None else ()
    columns = ["model", "door", "chunks", "first step", "promised", "with the pipe"]
    columns += ["micro-batches more", "beyond one micro-batch", "later steps", "later calls"]
    columns += parts
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in args.model:
        Trainer(args, name, 2, "first").time_step("step")  # warm-up
        for door in args.door:
            for chunks in args.chunks:
                if clock is not None:
                    clock.seconds.clear()
                rounds = [measure(args, name, door, chunks, i % 2 > 0) for i in range(args.rounds)]
                first = statistics.median(r.first for r in rounds)
                with_pipe = statistics.median(r.with_pipe for r in rounds)
                more = statistics.median(r.microbatches for r in rounds)
                beyond = statistics.median(r.beyond for r in rounds)
                later = statistics.median(ratio for r in rounds for ratio in r.later)
                calls = statistics.median(r.calls for r in rounds)
                cells = [name, door, str(chunks), f"{first:.2f}", f"{1 + 1.5 / chunks:.2f}"]
                cells += [f"{with_pipe:.2f}", f"{more:.2f}", f"{beyond:.1f}"]
                cells += [f"{later:.3f}", f"{calls:.4f}"]
                if clock is not None:
                    cells += [f"{clock.seconds[part] / args.rounds * 1e3:.0f}" for part in parts]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
