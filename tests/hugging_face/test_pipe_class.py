"""`isinstance` takes a pipe of a transformers model for that model, and for a pipe.

The Trainer of transformers saves and inspects a PreTrainedModel in other ways than other modules.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import can_return_loss, find_labels

from penstock import ArgumentError, Pipe
from tests.hugging_face import tiny

CPUS = ["cpu", "cpu"]
IDS = torch.arange(32).reshape(4, 8)


class Tower(PreTrainedModel):  # type: ignore[misc]
    """A model of one's own, without the hooks of transformers that pickle refuses."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.post_init()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return x if labels is None else (x - labels).square().mean()


def make_tower() -> tuple[Tower, Pipe]:
    model = Tower(PreTrainedConfig())
    return model, Pipe(model, 2, stages=2, devices=CPUS, example=torch.ones(4, 4))


def make_gpt2() -> tuple[Any, Pipe]:
    model = tiny.gpt2(use_cache=False)
    return model, Pipe(model, 2, stages=2, devices=CPUS, example=IDS)


def test_pipe_is_an_instance_of_its_models_class() -> None:
    model, pipe = make_gpt2()
    assert isinstance(pipe, Pipe)
    assert isinstance(pipe, type(model))
    assert isinstance(pipe, PreTrainedModel)
    assert not isinstance(pipe, nn.Sequential)
    assert type(pipe) is Pipe
    assert pipe.__class__ is pipe.__class__
    assert pipe.__class__.__name__ == type(model).__name__
    assert not pipe.is_gradient_checkpointing
    with pytest.raises(AttributeError, match="resize_token_embeddings"):
        pipe.resize_token_embeddings(50)


def test_other_pipes_have_their_own_class() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stages=2, devices=CPUS)
    assert pipe.__class__ is Pipe
    assert not isinstance(pipe, PreTrainedModel)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_labels_are_found_in_the_class(name: str) -> None:
    model = getattr(tiny, name)()
    example = torch.zeros(4, 3, 8, 8) if name == "vit" else IDS
    pipe = Pipe(model, 2, stages=2, devices=CPUS, example=example)
    assert find_labels(pipe.__class__) == find_labels(type(model)) == ["labels"]
    assert can_return_loss(pipe.__class__) == can_return_loss(type(model))
    expected = inspect.signature(type(model).forward)
    assert inspect.signature(pipe.__class__.forward) == expected


def copy_by_pickle(pipe: Pipe) -> Any:
    return pickle.loads(pickle.dumps(pipe))


def derive_class(pipe: Pipe) -> Any:
    """Do what PyTorch's `replicate` and `fully_shard` do."""
    pipe.__class__ = type("Derived", (pipe.__class__,), {})
    return pipe


@pytest.mark.parametrize("make_other", [copy.copy, copy.deepcopy, copy_by_pickle, derive_class])
def test_copies_are_pipes(make_other: Any) -> None:
    model, pipe = make_tower()
    x, y = torch.randn(4, 4), torch.zeros(4, 4)
    other = make_other(pipe)
    assert isinstance(other, Pipe)
    assert isinstance(other, Tower)
    assert type(other) is (Pipe if make_other is not derive_class else other.__class__)
    assert other.stages == 2
    torch.testing.assert_close(other(x), model(x))  # products of fewer rows may round otherwise
    torch.testing.assert_close(other.step(x, labels=y).loss, model(x, labels=y))


def test_regions_that_accelerate_compiles_stay_in_a_pipe() -> None:
    utils = pytest.importorskip("accelerate.utils")
    model, pipe = make_gpt2()
    compiled = utils.compile_regions(pipe, backend="eager")
    assert isinstance(compiled, Pipe)
    assert compiled.stages == 2
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)


def test_compiled_pipe_runs_as_a_pipe() -> None:
    model, pipe = make_gpt2()
    compiled = torch.compile(pipe, backend="eager")
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)


def test_adapters_can_be_added_to_a_pipe() -> None:
    peft = pytest.importorskip("peft")
    model, pipe = make_gpt2()
    options = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    adapted = peft.get_peft_model(pipe, peft.LoraConfig(r=2, **options))
    loss = adapted(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss, model(input_ids=IDS, labels=IDS).loss)
    loss.backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)


def test_pipe_of_a_model_with_adapters_is_a_peft_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    pipe = Pipe(model, 2, stages=2, devices=CPUS, example=IDS)
    assert isinstance(pipe, peft.PeftModel)
    assert isinstance(pipe, Pipe)
    assert pipe.active_adapters == ["default"]
    assert pipe.get_base_model() is model.get_base_model()


# ---- state dicts ---------------------------------------------------------------------------


def test_state_dict_with_the_names_of_a_file_is_loaded(tmp_path: Path) -> None:
    # transformers stores each expert of Mixtral apart, and the model has them in one tensor. The
    # Trainer passes what is in the file to `load_state_dict`, without strict.
    from safetensors.torch import load_file

    saved, model = tiny.mixtral(), tiny.mixtral()
    saved.save_pretrained(tmp_path)
    pipe = Pipe(model, 2, stages=2, devices=CPUS, example=IDS)
    state = load_file(tmp_path / "model.safetensors")
    assert state.keys() != pipe.state_dict().keys()
    result = pipe.load_state_dict({**state, "nothing": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([], ["nothing"])
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())


def test_state_dict_for_save_pretrained_is_refused(tmp_path: Path) -> None:
    _, pipe = make_gpt2()
    assert pipe.save_pretrained(tmp_path, state_dict=None) == tmp_path
    with pytest.raises(ArgumentError, match="a pipe writes its own tensors"):
        pipe.save_pretrained(tmp_path, state_dict=pipe.state_dict())  # type: ignore[arg-type]
