"""Compare Hugging Face Trainers that train a pipe with the same Trainers on the unsplit model.

    python -m tests.integrations.frameworks            all rows; a few minutes
    python -m tests.integrations.frameworks T5 SFT     rows with one of these words

Every row trains 20 steps in float32, on uneven last batches and labels of which some are ignored,
with evaluations in between. It prints the largest relative difference of any loss or gradient norm.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from transformers import Trainer, logging

from penstock.integrations.transformers import PipeTrainer
from tests.distributed.ranks import ranks
from tests.integrations.curves import MODELS, UNTIED, Curve, KillAfterSave, train
from tests.integrations.processes import train_on_ranks
from tests.integrations.sft import train_sft

TOLERANCE = 1e-6
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
EVEN: dict[str, Any] = {
    "train_rows": 24,
    "eval_rows": 8,
}  # accelerate repeats rows where replicas get too few

Row = tuple[str, Callable[[str], float]]


@cache
def train_unsplit(name: str, accumulation: int, even: bool = False, tied: bool = True) -> Curve:
    case = MODELS[name] if tied else UNTIED[name]
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, Any] = EVEN if even else {}
        return train(case, folder, Trainer, gradient_accumulation_steps=accumulation, **rows)


@cache
def train_unsplit_sft(accumulation: int, lora: bool) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        return train_sft(folder, gradient_accumulation_steps=accumulation, lora=lora)


def compare_trainer(name: str, trainer_class: type[Trainer], accumulation: int) -> Row:
    # A plain Trainer looks for labels in the forward of the class, which is that of all pipes.
    labels: dict[str, Any] = {} if trainer_class is PipeTrainer else {"label_names": ["labels"]}

    def run(folder: str) -> float:
        options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, **labels}
        curve = train(MODELS[name], folder, trainer_class, pipe_options={}, **options)
        return curve.compute_difference(train_unsplit(name, accumulation))

    title = "PipeTrainer" if trainer_class is PipeTrainer else "Trainer(model=pipe)"
    return f"{name:13} {title:20} accumulation {accumulation}", run


def compare_resumed(name: str, trainer_class: type[Trainer]) -> Row:
    is_plain = trainer_class is Trainer
    options: dict[str, Any] = {**SAVES, "label_names": ["labels"]} if is_plain else SAVES
    # The checkpoints of a plain Trainer refuse tied weights; see docs/frameworks.md.
    tied = not is_plain or name not in UNTIED

    def run(folder: str) -> float:
        case = MODELS[name] if tied else UNTIED[name]
        first, second = {"stages": 2}, {"stages": 3, "chunks": 4}
        kill = [KillAfterSave(10)]
        curve = train(case, folder, trainer_class, pipe_options=first, callbacks=kill, **options)
        assert max(curve.steps) == 10
        checkpoint = f"{folder}/checkpoint-10"
        train(
            case,
            folder,
            trainer_class,
            pipe_options=second,
            curve=curve,
            resume=checkpoint,
            **options,
        )
        return curve.compute_difference(train_unsplit(name, 1, tied=tied))

    title = "Trainer(model=pipe)" if is_plain else "PipeTrainer"
    weights = "" if tied else ", untied weights"
    return f"{name:13} {title:20} killed at step 10, resumed with 3 stages{weights}", run


def train_with_dropout(name: str) -> Row:
    def run(folder: str) -> float:
        case = MODELS[name]
        curve = train(case, folder, pipe_options={}, dropout=case.dropout, learning_rate=1e-2)
        losses = [loss for loss, _ in curve.steps.values()]
        assert all(map(math.isfinite, losses))
        assert sum(losses[-5:]) < sum(losses[:5]), losses
        return 0.0

    return f"{name:13} {'PipeTrainer':20} default dropout, the loss falls", run


def compare_sft(accumulation: int, lora: bool) -> Row:
    def run(folder: str) -> float:
        curve = train_sft(folder, {}, gradient_accumulation_steps=accumulation, lora=lora)
        return curve.compute_difference(train_unsplit_sft(accumulation, lora))

    name = "Llama + LoRA" if lora else "Llama"
    return f"{name:13} {'SFTTrainer':20} accumulation {accumulation}", run


def compare_resumed_sft() -> Row:
    def run(folder: str) -> float:
        curve = train_sft(folder, {"stages": 2}, callbacks=[KillAfterSave(10)], **SAVES)
        assert max(curve.steps) == 10
        checkpoint = f"{folder}/checkpoint-10"
        train_sft(folder, {"stages": 3}, curve=curve, resume=checkpoint, **SAVES)
        return curve.compute_difference(train_unsplit_sft(1, False))

    return f"{'Llama':13} {'SFTTrainer':20} killed at step 10, resumed with 3 stages", run


def compare_processes(name: str, size: int, replicas: int, accumulation: int) -> Row:
    def run(folder: str) -> float:
        options = {
            **EVEN,
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 4 // replicas,
            "per_device_eval_batch_size": 4 // replicas,
        }
        curves: list[Curve] = ranks(size).run(train_on_ranks, name, folder, replicas, options)
        expected = train_unsplit(name, accumulation, even=True)
        return max(curve.compute_difference(expected) for curve in curves)

    where = f"pp {size // replicas} x dp {replicas}, accumulation {accumulation}"
    return f"{name:13} {'PipeTrainer':20} {size} processes: {where}", run


def compare_resumed_processes(name: str) -> Row:
    def run(folder: str) -> float:
        killed = {"callbacks": [KillAfterSave(10)], **SAVES}
        curves: list[Curve] = ranks(2).run(train_on_ranks, name, folder, 1, killed)
        curve, checkpoint = curves[0], f"{folder}/checkpoint-10"
        assert max(curve.steps) == 10
        train(MODELS[name], folder, pipe_options={"stages": 3}, curve=curve, resume=checkpoint)
        return curve.compute_difference(train_unsplit(name, 1))

    return (
        f"{name:13} {'PipeTrainer':20} 2 processes: killed at step 10, then one with 3 stages",
        run,
    )


def list_rows() -> Iterator[Row]:
    for name in MODELS:
        for accumulation in (1, 3):
            yield compare_trainer(name, PipeTrainer, accumulation)
            yield compare_trainer(name, Trainer, accumulation)
        yield compare_resumed(name, PipeTrainer)
        if name != "T5":  # it always ties its embeddings, which a plain Trainer cannot save
            yield compare_resumed(name, Trainer)
        yield train_with_dropout(name)
    for accumulation in (1, 3):
        yield compare_sft(accumulation, lora=False)
    yield compare_sft(3, lora=True)
    yield compare_resumed_sft()
    for accumulation in (1, 3):
        yield compare_processes("Llama", 2, 1, accumulation)
        yield compare_processes("Llama", 4, 2, accumulation)
    yield compare_resumed_processes("Llama")


def main(words: list[str]) -> int:
    """Print a table, and return 1 if a row differs."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    os.environ["HF_HUB_OFFLINE"] = "1"
    failed = []
    for title, run in list_rows():
        if words and not any(word in title for word in words):
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            difference = run(folder)
        seconds = time.perf_counter() - begin
        is_equal = difference <= TOLERANCE
        failed += [] if is_equal else [title]
        mark = "equal" if is_equal else "DIFFERS"
        print(f"{title:84} {difference:8.1e}  {mark}  {seconds:5.1f} s", flush=True)
    print(f"{len(failed)} rows differ by more than {TOLERANCE:g}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
