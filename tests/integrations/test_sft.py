"""TRL's SFTTrainer with a pipe, against the SFTTrainer of the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install 'torch-penstock[frameworks]'")

from penstock import ArgumentError
from tests.integrations.curves import KillAfterSave
from tests.integrations.sft import train_sft

pytestmark = pytest.mark.filterwarnings("default")  # those of TRL and datasets

SHORT: dict[str, Any] = {"max_steps": 5, "eval_steps": 3}


def test_sft_trainer_of_a_pipe_with_accumulation(tmp_path: Path) -> None:
    options = {**SHORT, "max_steps": 3, "gradient_accumulation_steps": 3}
    expected = train_sft(str(tmp_path), **options)
    curve = train_sft(str(tmp_path), {"schedule": "zb-h1"}, **options)
    assert curve.compute_difference(expected) < 1e-6


def test_sft_trainer_resumes_with_another_number_of_stages(tmp_path: Path) -> None:
    # Batches of one size, as each other size is traced by itself.
    short = {**SHORT, "train_rows": 24, "eval_rows": 8, "lengths": 1}
    options = {**short, "save_strategy": "steps", "save_steps": 4}
    expected = train_sft(str(tmp_path), lora=True, **short)
    kill = [KillAfterSave(4)]
    curve = train_sft(str(tmp_path), {"stages": 2}, lora=True, callbacks=kill, **options)
    assert max(curve.steps) == 4
    again: dict[str, Any] = {"lora": True, "curve": curve, "resume": f"{tmp_path}/checkpoint-4"}
    train_sft(str(tmp_path), {"stages": 3}, **again, **options)
    assert curve.compute_difference(expected) < 1e-6


def test_other_loss_of_the_sft_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="loss_type='dft' and activation_offloading=False were"):
        train_sft(str(tmp_path), {}, **SHORT, loss_type="dft")
