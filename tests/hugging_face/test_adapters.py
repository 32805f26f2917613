"""Tests of LoRA adapters of peft: they train as in the unsplit model and have their own folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from penstock import Pipe
from tests.hugging_face.tiny import agree, batch_for, differing, gpt2, llama, piped

PARTS = {"llama": (llama, ["q_proj", "v_proj"]), "gpt2": (gpt2, ["c_attn"])}
each_model = pytest.mark.parametrize("name", PARTS)


def adapted(name: str, **more: Any) -> Any:
    made, parts = PARTS[name]
    turned = name == "gpt2"  # its layers are Conv1D
    chosen = {"r": 2, "lora_alpha": 4, "fan_in_fan_out": turned, "task_type": "CAUSAL_LM", **more}
    return get_peft_model(made(), LoraConfig(target_modules=parts, **chosen))


def randomize_adapters(model: nn.Module) -> None:
    """Fill the second matrices of the adapters, which start at zero and would give no gradients."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


@each_model
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_lora_adapters_train_as_in_the_unsplit_model(name: str, schedule: str) -> None:
    model = adapted(name)
    randomize_adapters(model)
    pipe = agree(model, batch_for(name), schedule=schedule)
    learned = {name for name, p in pipe.named_parameters() if p.grad is not None}
    assert learned == {name for name, p in pipe.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in learned)


def test_lora_adapters_with_gradient_checkpointing() -> None:
    model = adapted("llama")
    randomize_adapters(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    agree(model.train(), batch_for("llama"), checkpoint="never")


@each_model
def test_save_pretrained_of_lora_adapters(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    randomize_adapters(model)
    pipe = piped(model, batch_for(name))
    pipe.save_pretrained(tmp_path / "made")
    model.save_pretrained(tmp_path / "given")
    given = load_file(tmp_path / "given" / "adapter_model.safetensors")
    made = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert set(given) == set(made)
    assert all(torch.equal(given[key], made[key]) for key in given)
    names = {path.name for path in (tmp_path / "given").iterdir()}
    assert names == {path.name for path in (tmp_path / "made").iterdir()}
    base = PARTS[name][0]()
    base.load_state_dict(plain_of(model))
    again = PeftModel.from_pretrained(base, tmp_path / "made")
    assert differing(again, model) == []
    other = adapted(name)
    load_adapters(piped(other, batch_for(name)), tmp_path / "made")
    assert torch.equal(*(adapters_of(one) for one in (other, model)))


def load_adapters(pipe: Pipe, folder: Path) -> None:
    before = {name: p.clone() for name, p in pipe.named_parameters() if "lora_" not in name}
    pipe.load(folder)
    after = dict(pipe.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def adapters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.flatten() for name, p in model.named_parameters() if "lora_" in name])


def plain_of(model: nn.Module) -> dict[str, torch.Tensor]:
    begin = "base_model.model."
    found = model.state_dict().items()
    return {
        name.removeprefix(begin).replace(".base_layer", ""): tensor
        for name, tensor in found
        if "lora_" not in name
    }


@each_model
def test_load_of_the_base_model_below_lora_adapters(name: str, tmp_path: Path) -> None:
    base: Any = PARTS[name][0]()
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = adapted(name)
    pipe = piped(model, batch_for(name))
    pipe.load(tmp_path)
    found = plain_of(pipe)
    assert all(torch.equal(found[key], value) for key, value in base.state_dict().items())
    zeros = [p for key, p in pipe.named_parameters() if "lora_B" in key]
    assert zeros
    assert not any(p.any() for p in zeros)
