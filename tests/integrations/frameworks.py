"""Compare Trainers of Hugging Face and Lightning on a pipe with the same on the unsplit model.

    python -m tests.integrations.frameworks            all rows; a few minutes
    python -m tests.integrations.frameworks T5 SFT     rows with one of these words

Every row trains 20 steps in float32, on uneven last batches and labels of which some are ignored,
with evaluations in between. It prints the largest relative difference of any loss or gradient norm.
Rows in bfloat16 print it in parts of what that precision allows, times 1e-6.
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
from tests.integrations.curve import Curve
from tests.integrations.curves import MODELS, TIED, KillAfterSave, train
from tests.integrations.lightning_curves import PACKAGES, fit, run_fabric
from tests.integrations.lightning_processes import fit_on_ranks, run_fabric_on_ranks
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
def train_unsplit(name: str, accumulation: int, even: bool = False) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, Any] = EVEN if even else {}
        return train(
            MODELS[name], folder, Trainer, gradient_accumulation_steps=accumulation, **rows
        )


@cache
def train_unsplit_sft(accumulation: int, lora: bool) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        return train_sft(folder, gradient_accumulation_steps=accumulation, lora=lora)


def compare_trainer(name: str, trainer_class: type[Trainer], accumulation: int) -> Row:
    def run(folder: str) -> float:
        options: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
        curve = train(MODELS[name], folder, trainer_class, pipe_options={}, **options)
        return curve.compute_difference(train_unsplit(name, accumulation))

    title = "PipeTrainer" if trainer_class is PipeTrainer else "Trainer(model=pipe)"
    return f"{name:13} {title:20} accumulation {accumulation}", run


def compare_resumed(name: str, trainer_class: type[Trainer]) -> Row:
    def run(folder: str) -> float:
        case = MODELS[name]
        first, second = {"stages": 2}, {"stages": 3, "chunks": 4}
        kill = [KillAfterSave(10)]
        curve = train(case, folder, trainer_class, pipe_options=first, callbacks=kill, **SAVES)
        assert max(curve.steps) == 10
        checkpoint = f"{folder}/checkpoint-10"
        train(
            case,
            folder,
            trainer_class,
            pipe_options=second,
            curve=curve,
            resume=checkpoint,
            **SAVES,
        )
        return curve.compute_difference(train_unsplit(name, 1))

    title = "PipeTrainer" if trainer_class is PipeTrainer else "Trainer(model=pipe)"
    tied = ", tied" if name in TIED else ""
    return f"{name:13} {title:20} killed at step 10, resumed with 3 stages{tied}", run


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


# ---- Lightning -----------------------------------------------------------------------------------

BF16_TOLERANCE = 2e-2  # bfloat16 has 8 bits, and micro-batches are rounded one by one
LIGHTNING: dict[str, dict[str, Any]] = {
    "accumulation 1": {},
    "accumulation 3": {"accumulate_grad_batches": 3},
    "clipping by norm": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "float64": {"precision": "64-true"},
    "bfloat16": {"precision": "bf16-mixed"},
    "manual": {"kind": "Manual"},
    "manual, accumulation 3": {"kind": "Manual", "module_options": {"accumulation": 3}},
    "manual, two optimizers": {"kind": "TwoOptimizers"},
}
LOSS_METHODS = {"loss_methods": ("compute_loss",)}


def _name_lightning(what: str, where: str) -> str:
    return f"{'Lightning':13} {what:20} {where}"


def _allow_bf16(difference: float, options: dict[str, Any]) -> float:
    """Return the difference, in parts of what its precision allows."""
    is_bf16 = str(options.get("precision")).startswith("bf16")
    return difference * TOLERANCE / BF16_TOLERANCE if is_bf16 else difference


def compare_lightning(package: str, name: str, schedule: str, **pipe_options: Any) -> Row:
    def run(folder: str) -> float:
        options = LIGHTNING[name]
        expected = fit(package, **options).curve
        pipe = {"schedule": schedule, **pipe_options}
        curve = fit(package, pipe_options=pipe, **options).curve
        return _allow_bf16(curve.compute_difference(expected), options)

    door = ", loss_methods" if pipe_options else ""
    return _name_lightning("Trainer", f"{package}: {name}, {schedule}{door}"), run


def compare_fabric(package: str, kind: str, accumulation: int, precision: str = "32-true") -> Row:
    def run(folder: str) -> float:
        options: dict[str, Any] = {
            "kind": kind,
            "accumulation": accumulation,
            "clip": {"max_norm": 0.3},
            "precision": precision,
        }
        curve = run_fabric(package, pipe_options={}, **options)
        difference = curve.compute_difference(run_fabric(package, **options))
        return _allow_bf16(difference, options)

    where = f"{package}: {kind}, accumulation {accumulation}, {precision}"
    return _name_lightning("Fabric", where), run


def compare_lightning_resumed(fabric: bool, processes: int) -> Row:
    def run(folder: str) -> float:
        if processes:
            function = run_fabric_on_ranks if fabric else fit_on_ranks
            options = {"folder": folder, "kill_at": 10}
            curve: Curve = ranks(processes).run(function, 1, options)[0]
        elif fabric:
            curve = run_fabric(pipe_options={}, folder=folder, kill_at=10)
        else:
            curve = fit(pipe_options={}, folder=folder, kill_at=10).curve
        assert max(curve.steps) == 10
        other = {"stages": 3}
        if fabric:
            run_fabric(pipe_options=other, curve=curve, resume=f"{folder}/step-10.ckpt")
            return curve.compute_difference(run_fabric())
        checkpoint = f"{folder}/epoch=1-step=10.ckpt"
        fit(pipe_options=other, curve=curve, resume=checkpoint)
        return curve.compute_difference(fit().curve)

    where = f"{processes} processes" if processes else "one process"
    what = "Fabric" if fabric else "Trainer"
    return _name_lightning(what, f"{where}: killed at step 10, then one with 3 stages"), run


def compare_lightning_processes(fabric: bool, size: int, dp: int, accumulation: int) -> Row:
    def run(folder: str) -> float:
        rows: dict[str, Any] = {
            "rows": 20
        }  # even for two replicas, and uneven for micro-batches of one
        if fabric:
            options: dict[str, Any] = {"accumulation": accumulation, "clip": {"max_norm": 0.3}}
            expected = run_fabric(**rows, **options)
        else:
            options = {"accumulate_grad_batches": accumulation, "gradient_clip_val": 0.3}
            expected = fit(**rows, **options).curve
        function = run_fabric_on_ranks if fabric else fit_on_ranks
        curves: list[Curve] = ranks(size).run(function, dp, {**rows, **options})
        return max(curve.compute_difference(expected) for curve in curves)

    where = f"{size} processes: pp {size // dp} x dp {dp}, accumulation {accumulation}"
    return _name_lightning("Fabric" if fabric else "Trainer", where), run


def compare_manual_processes(size: int, dp: int) -> Row:
    def run(folder: str) -> float:
        options: dict[str, Any] = {"kind": "Manual", "rows": 20}
        expected = fit(**options).curve
        arguments = {**options, "pipe_options": LOSS_METHODS}
        curves: list[Curve] = ranks(size).run(fit_on_ranks, dp, arguments)
        return max(curve.compute_difference(expected) for curve in curves)

    return _name_lightning("Trainer", f"{size} processes: pp {size // dp} x dp {dp}, manual"), run


def list_lightning_rows() -> Iterator[Row]:
    for package in PACKAGES:
        for name in LIGHTNING:
            yield compare_lightning(package, name, "1f1b")
        for kind in ("Automatic", "Network"):
            for accumulation in (1, 3):
                yield compare_fabric(package, kind, accumulation)
    yield compare_lightning("lightning", "accumulation 3", "zb-h1")
    yield compare_lightning("lightning", "manual", "zb-h1", **LOSS_METHODS)
    yield compare_lightning("lightning", "manual, two optimizers", "1f1b", **LOSS_METHODS)
    yield compare_fabric("lightning", "Network", 1, "bf16-mixed")
    for fabric in (False, True):
        for processes in (0, 2):
            yield compare_lightning_resumed(fabric, processes)
        for accumulation in (1, 3):
            yield compare_lightning_processes(fabric, 2, 1, accumulation)
            yield compare_lightning_processes(fabric, 4, 2, accumulation)
    for size, dp in ((2, 1), (4, 2)):
        yield compare_manual_processes(size, dp)


def list_rows() -> Iterator[Row]:
    for name in MODELS:
        for accumulation in (1, 3):
            yield compare_trainer(name, PipeTrainer, accumulation)
            yield compare_trainer(name, Trainer, accumulation)
        yield compare_resumed(name, PipeTrainer)
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
    yield from list_lightning_rows()


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
