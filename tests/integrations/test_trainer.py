"""`PipeTrainer` and a plain Trainer of a pipe, against the Trainer of the unsplit model.

`make frameworks` compares more models and longer runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

from transformers import Trainer, set_seed

from penstock import ArgumentError, PenstockTypeError, Pipe
from penstock.integrations.transformers import OPTIMIZER_FOLDER, PipeTrainer
from tests.distributed.ranks import RanksFailed, ranks
from tests.hugging_face import tiny
from tests.integrations.curve import Curve
from tests.integrations.curves import (
    MODELS,
    VOCABULARY,
    KillAfterSave,
    ModelCase,
    make_arguments,
    make_pipe,
    train,
)
from tests.integrations.processes import (
    predict_on_ranks,
    train_on_ranks,
)

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers and accelerate

# Full batches only, as each other size of a batch is traced by itself. The tests of curves have
# smaller ones, too.
UNEVEN: dict[str, Any] = {"max_steps": 6, "eval_steps": 3}
SHORT: dict[str, Any] = {"train_rows": 24, "eval_rows": 8, **UNEVEN}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}


@pytest.mark.parametrize(
    ("name", "rows", "accumulation"),
    [("Llama", UNEVEN, 3), ("BERT", UNEVEN, 1), ("T5", SHORT, 3), ("ViT", SHORT, 1)],
    ids=["Llama", "BERT", "T5", "ViT"],
)
def test_pipe_trainer_has_the_curve_of_the_unsplit_model(
    name: str, rows: dict[str, Any], accumulation: int, tmp_path: Path
) -> None:
    options = {**rows, "gradient_accumulation_steps": accumulation}
    expected = train(MODELS[name], str(tmp_path), Trainer, **options)
    curve = train(MODELS[name], str(tmp_path), PipeTrainer, pipe_options={}, **options)
    assert curve.compute_difference(expected) < 1e-6
    assert (len(expected.steps), len(expected.evaluations)) == (6, 2)


def make_without_loss_kwargs(dropout: float) -> Any:
    model = MODELS["Llama"].make(dropout)
    model.accepts_loss_kwargs = False
    return model


@pytest.mark.parametrize("trainer_class", [PipeTrainer, Trainer])
def test_mean_losses_are_averaged_over_accumulated_batches(
    trainer_class: type[Trainer], tmp_path: Path
) -> None:
    case = ModelCase(make_without_loss_kwargs)
    options = {**SHORT, "gradient_accumulation_steps": 4}
    expected = train(case, str(tmp_path), Trainer, **options)
    curve = train(case, str(tmp_path), trainer_class, pipe_options={}, **options)
    assert curve.compute_difference(expected) < 1e-6


@pytest.mark.parametrize("name", ["GPT-2", "Llama + LoRA"])
def test_plain_trainer_has_the_curve_of_the_unsplit_model(name: str, tmp_path: Path) -> None:
    options = {**SHORT, "gradient_accumulation_steps": 3}
    expected = train(MODELS[name], str(tmp_path), Trainer, **options)
    curve = train(MODELS[name], str(tmp_path), Trainer, pipe_options={}, **options)
    assert curve.compute_difference(expected) < 1e-6


def compute_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
        {"trainer_options": {"compute_loss_func": compute_sum}, "gradient_accumulation_steps": 2},
        {"optim": "sgd", "max_grad_norm": 0.0, "gradient_checkpointing": True},
    ],
    ids=["label smoothing", "compute_loss_func", "no clipping"],
)
def test_other_losses_of_a_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    llama = MODELS["Llama"]
    expected = train(llama, str(tmp_path), Trainer, **SHORT, **options)
    curve = train(llama, str(tmp_path), pipe_options={"schedule": "zb-h1"}, **SHORT, **options)
    assert curve.compute_difference(expected) < 1e-6


def test_mixed_precision_trains_in_bfloat16(tmp_path: Path) -> None:
    llama = MODELS["Llama"]
    expected = train(llama, str(tmp_path), Trainer, **SHORT, bf16=True)
    curve = train(llama, str(tmp_path), pipe_options={}, **SHORT, bf16=True)
    exact = train(llama, str(tmp_path), pipe_options={}, **SHORT)
    assert curve.compute_difference(expected) < 5e-3
    assert curve.compute_difference(exact) > 1e-6  # autocast reaches the workers


def make_mixtral(dropout: float) -> Any:
    return tiny.mixtral(vocab_size=VOCABULARY, use_cache=False)


def make_gpt2_lora(dropout: float) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    return get_peft_model(MODELS["GPT-2"].make(), LoraConfig(r=4, **options))


RESUMED = {
    **MODELS,
    "Mixtral": ModelCase(make_mixtral),  # its experts have other names in a file
    "GPT-2 + LoRA": ModelCase(make_gpt2_lora),
}


@pytest.mark.parametrize(
    ("name", "trainer_class"),
    [
        ("GPT-2", PipeTrainer),
        ("Llama + LoRA", PipeTrainer),
        # safetensors refuses the weights that two layers share, unless the Trainer knows the model.
        ("GPT-2", Trainer),
        ("BERT", Trainer),
        ("T5", Trainer),
        ("GPT-2 + LoRA", Trainer),
        ("Mixtral", Trainer),
    ],
)
def test_run_that_is_killed_resumes_with_another_number_of_stages(
    name: str, trainer_class: type[Trainer], tmp_path: Path
) -> None:
    case, folder = RESUMED[name], str(tmp_path)
    expected = train(case, folder, Trainer, **SHORT)
    options = {**SHORT, **SAVES}
    kill = [KillAfterSave(4)]
    curve = train(case, folder, trainer_class, pipe_options={}, callbacks=kill, **options)
    assert max(curve.steps) == 4
    # An earlier run got further, and its checkpoint is replaced.
    (tmp_path / "checkpoint-6" / OPTIMIZER_FOLDER / "of an earlier run").mkdir(parents=True)
    again: dict[str, Any] = {
        "pipe_options": {"stages": 3, "chunks": 4},
        "resume": f"{folder}/checkpoint-4",
    }
    train(case, folder, trainer_class, curve=curve, **again, **options)
    assert curve.compute_difference(expected) < 1e-6


@pytest.mark.parametrize(
    ("trainer_class", "pipe_options"),
    [(Trainer, None), (PipeTrainer, {"stages": 3})],
    ids=["unsplit", "PipeTrainer"],
)
def test_checkpoint_of_a_plain_trainer_is_for_every_trainer(
    trainer_class: type[Trainer], pipe_options: dict[str, Any] | None, tmp_path: Path
) -> None:
    case, folder = MODELS["GPT-2"], str(tmp_path)
    options = {**SHORT, **SAVES}
    expected = train(case, folder, Trainer, **options)
    curve = train(case, folder, Trainer, pipe_options={}, callbacks=[KillAfterSave(4)], **options)
    again: dict[str, Any] = {"pipe_options": pipe_options, "resume": f"{folder}/checkpoint-4"}
    train(case, folder, trainer_class, curve=curve, **again, **options)
    assert curve.compute_difference(expected) < 1e-6


@pytest.mark.parametrize("trainer_class", [PipeTrainer, Trainer])
def test_checkpoint_of_a_pipe_is_read_by_from_pretrained(
    trainer_class: type[Trainer], tmp_path: Path
) -> None:
    set_seed(0)
    rows = MODELS["GPT-2"].make_rows(8)
    model = MODELS["GPT-2"].make()
    trainer = trainer_class(
        model=make_pipe(model, rows),
        args=make_arguments(str(tmp_path), eval_strategy="no", max_steps=1),
        train_dataset=rows,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert all(
        torch.equal(p, q) for p, q in zip(saved.parameters(), model.parameters(), strict=True)
    )


class Classifier(nn.Module):
    """A model that is not one of transformers, and leaves the loss to the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compute_mean(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


def test_model_of_ones_own_saves_and_resumes(tmp_path: Path) -> None:
    def make_trainer() -> Any:
        set_seed(0)
        example = torch.randn(4, 4)
        pipe = Pipe(Classifier(), 2, stages=2, devices=["cpu", "cpu"], example=example)
        rows = [{"x": torch.randn(4), "labels": torch.tensor(i % 3)} for i in range(8)]
        arguments = {"eval_strategy": "no", "max_steps": 8, "label_names": ["labels"], **SAVES}
        return PipeTrainer(
            model=pipe,
            args=make_arguments(str(tmp_path), **arguments),
            train_dataset=rows,
            compute_loss_func=compute_mean,
        )

    trainer = make_trainer()
    trainer.train()
    expected = [p.clone() for p in trainer.model.parameters()]
    again = make_trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(p, q) for p, q in zip(again.model.parameters(), expected, strict=True))


# ---- processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)])
def test_trainer_over_processes(size: int, replicas: int, tmp_path: Path) -> None:
    expected = train(MODELS["Llama"], str(tmp_path), Trainer, **SHORT)
    batch = 4 // replicas
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    options = {**SHORT, **sizes, **SAVES}
    curves = ranks(size).run(train_on_ranks, "Llama", str(tmp_path), replicas, options)
    assert max(curve.compute_difference(expected) for curve in curves) < 1e-6
    if replicas > 1:
        return
    # The checkpoint goes on in one process, with another number of stages.
    again = {**SHORT, "pipe_options": {"stages": 3}, "resume": f"{tmp_path}/checkpoint-4"}
    curve = Curve({n: curves[0].steps[n] for n in range(1, 5)}, {3: curves[0].evaluations[3]})
    train(MODELS["Llama"], str(tmp_path), curve=curve, **again)
    assert curve.compute_difference(expected) < 1e-6


def test_predictions_of_replicas_are_gathered_once(tmp_path: Path) -> None:
    rows = MODELS["Llama"].make_rows(7)
    set_seed(0)
    model = MODELS["Llama"].make().eval()
    with torch.no_grad():
        expected = model(input_ids=torch.stack([row["input_ids"] for row in rows])).logits
    for predictions in ranks(4).run(predict_on_ranks, "Llama", 2, str(tmp_path)):
        torch.testing.assert_close(predictions, expected)


def test_predictions_need_outputs_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="only the last rank of the pipe has outputs"):
        ranks(2).run(predict_on_ranks, "Llama", 1, str(tmp_path), "last")


# ---- refusals ------------------------------------------------------------------------------


def make_trainer(tmp_path: Path, trainer_class: Any = PipeTrainer, **options: Any) -> Any:
    rows = MODELS["Llama"].make_rows(8)
    pipe = make_pipe(MODELS["Llama"].make(), rows, **options.pop("pipe_options", {}))
    arguments = make_arguments(str(tmp_path), **options.pop("arguments", {}))
    return trainer_class(**{"model": pipe, "train_dataset": rows, "args": arguments, **options})


def test_model_that_is_not_a_pipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockTypeError, match=r"PipeTrainer trains a penstock\.Pipe, not Llama"):
        make_trainer(tmp_path, model=MODELS["Llama"].make(), eval_dataset=[])


def test_subclass_with_its_own_loss_is_refused(tmp_path: Path) -> None:
    class Weighted(PipeTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    with pytest.raises(ArgumentError, match=r"Weighted\.compute_loss would not be called"):
        make_trainer(tmp_path, Weighted, eval_dataset=[])


@pytest.mark.parametrize("trainer_class", [PipeTrainer, Trainer])
def test_recomputation_that_the_pipe_does_not_do_is_refused(
    trainer_class: type[Trainer], tmp_path: Path
) -> None:
    arguments = {"gradient_checkpointing": True, "eval_strategy": "no"}
    options = {"pipe_options": {"checkpoint": "never"}, "arguments": arguments}
    trainer = make_trainer(tmp_path, trainer_class, **options)
    with pytest.raises(ArgumentError, match="the pipe was made with checkpoint='never'"):
        trainer.train()


def test_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, arguments={"eval_strategy": "no"})
    with pytest.raises(ArgumentError, match=r"has no model\.safetensors"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
