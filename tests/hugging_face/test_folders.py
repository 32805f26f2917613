"""Tests of models built on meta that are loaded from and saved to save_pretrained folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from penstock import ArgumentError, PenstockTypeError, Pipe
from penstock.checkpoint import safetensors_io
from tests.hugging_face.tiny import ALL, batch_for, differing, llama, mixtral, piped

each_model = pytest.mark.parametrize("name", ALL)


def on_meta(like: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = type(like)._from_config(like.config)
    return made


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@each_model
def test_meta_model_is_initialized_alike_for_any_number_of_stages(name: str) -> None:
    found = []
    for stages in (2, 3):
        torch.manual_seed(3)
        pipe = piped(on_meta(ALL[name]()), batch_for(name), stages=stages)
        assert not any(t.is_meta for t in (*pipe.parameters(), *pipe.buffers()))
        found.append({**dict(pipe.named_parameters()), **dict(pipe.named_buffers())})
    for key, tensor in found[0].items():
        assert torch.equal(tensor, found[1][key]), key
    buffers = dict(ALL[name]().named_buffers())
    assert all(torch.equal(found[0][key], buffer) for key, buffer in buffers.items())
    assert pipe.step(**batch_for(name)).loss.isfinite()


def test_process_that_is_not_the_main_one_writes_nothing(tmp_path: Path) -> None:
    """Newer Trainers of transformers pass `is_main_process`."""
    name = next(iter(ALL))
    pipe = piped(ALL[name](), batch_for(name))
    pipe.save_pretrained(tmp_path / "no", state_dict=None, is_main_process=False)
    pipe.save_pretrained(tmp_path / "yes", state_dict=None, is_main_process=True)
    assert [path.name for path in tmp_path.iterdir()] == ["yes"]


@each_model
def test_pretrained_folder_round_trip(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model: Any = ALL[name]().eval()
    model.save_pretrained(tmp_path / "given")
    batch = batch_for(name)
    pipe = piped(on_meta(model).eval(), batch)
    assert pipe.load(tmp_path / "given") is None
    assert differing(pipe, model) == []
    with torch.no_grad():
        assert (pipe(**batch).logits - model(**batch).logits).abs().max() < 1e-6
    assert pipe.save_pretrained(tmp_path / "made") == tmp_path / "made"
    given, made = stored_in(tmp_path / "given"), stored_in(tmp_path / "made")
    assert set(given) == set(made)
    assert all(torch.equal(given[key], made[key]) for key in given)
    for file in {path.name for path in (tmp_path / "given").iterdir()} - {"model.safetensors"}:
        assert (tmp_path / "made" / file).read_text() == (tmp_path / "given" / file).read_text()
    assert not list((tmp_path / "made").glob(".*"))
    assert differing(type(model).from_pretrained(tmp_path / "made"), model) == []


@pytest.mark.parametrize("made", [llama, mixtral])
def test_load_opens_each_safetensors_shard_twice(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral stores each expert separately, while the model has all of them in one tensor."""
    model = made(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    opened: list[Path] = []
    plain = safetensors_io.open_safetensors

    def noted(path: Path) -> Any:
        opened.append(path)
        return plain(path)

    monkeypatch.setattr(safetensors_io, "open_safetensors", noted)
    pipe = piped(on_meta(model), batch_for("llama"))
    pipe.load(tmp_path)
    assert differing(pipe, model) == []
    assert pipe.get_parameter("lm_head.weight") is pipe.get_parameter("model.embed_tokens.weight")
    assert len(opened) == 2 * len(set(opened))  # once for the header, once for the tensors
    pipe.save_pretrained(tmp_path)  # several shards become one file
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert differing(AutoModelForCausalLM.from_pretrained(tmp_path), model) == []


def test_load_of_a_base_model_with_or_without_its_prefix(tmp_path: Path) -> None:
    model: Any = llama()
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    base = piped(on_meta(model.model), {"input_ids": batch_for("llama")["input_ids"]})
    with pytest.warns(UserWarning, match=r"does not have: lm_head.weight. Tensors missing"):
        base.load(tmp_path / "whole")
    assert differing(base, model.model) == []
    again = piped(on_meta(model), batch_for("llama"))
    head = again.get_parameter("lm_head.weight").clone()
    with pytest.warns(UserWarning, match=r"has no tensor for lm_head.weight. Tensors missing"):
        again.load(tmp_path / "base")
    assert differing(again, model) == ["lm_head.weight"]
    assert torch.equal(again.get_parameter("lm_head.weight"), head)


def test_load_warns_of_another_head_and_refuses_another_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=2, pad_token_id=0)
    batch = {"input_ids": batch_for("llama")["input_ids"], "labels": torch.tensor([0, 1, 1, 0])}
    with torch.device("meta"):
        judge = LlamaForSequenceClassification(config)
    pipe = piped(judge, batch)
    with pytest.warns(
        UserWarning, match=r"no tensor for score.weight; and it has tensors that the model"
    ):
        pipe.load(tmp_path)
    assert pipe.step(**batch).loss.isfinite()
    config.num_hidden_layers = 4
    with torch.device("meta"):
        deeper = LlamaModel(config)
    with pytest.raises(ArgumentError, match=r"has no tensor for layers.3.self_attn.q_proj.weight"):
        piped(deeper, {"input_ids": batch["input_ids"]}).load(tmp_path)
    config.num_hidden_layers, config.hidden_size = 3, 8
    with torch.device("meta"):
        thinner = LlamaModel(config)
    with (
        pytest.warns(UserWarning, match=r"lm_head.weight"),
        pytest.raises(
            ArgumentError, match=r"embed_tokens.weight is \(40, 16\) there and \(40, 8\)"
        ),
    ):
        piped(thinner, {"input_ids": batch["input_ids"]}).load(tmp_path)


def test_load_ignores_buffers_saved_by_older_versions(tmp_path: Path) -> None:
    model: Any = llama()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**stored, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pipe = piped(on_meta(model), batch_for("llama"))
    pipe.load(tmp_path)
    assert differing(pipe, model) == []
    save_file({**stored, "model.extra": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"does not have: model.extra. It was saved"):
        pipe.load(tmp_path)


def test_load_refuses_different_values_for_tied_weights(tmp_path: Path) -> None:
    model: Any = llama()
    model.save_pretrained(tmp_path)
    tied = piped(on_meta(llama(tie_word_embeddings=True)), batch_for("llama"))
    with pytest.raises(ArgumentError, match=r"has different values for 'lm_head.weight' and 'mod"):
        tied.load(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    tied.load(tmp_path)
    assert differing(tied, model) == []


def test_save_pretrained_of_a_sequential_pipe_is_refused(tmp_path: Path) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2)
    with pytest.raises(
        PenstockTypeError, match=r"save_pretrained needs a transformers or peft model"
    ):
        pipe.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_failed_save_pretrained_keeps_the_previous_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = piped(llama(), batch_for("llama"))
    pipe.save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        pipe.get_parameter("lm_head.weight").zero_()

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("penstock.checkpoint.safetensors_io._write_chunk", fail)
    with pytest.raises(OSError, match="full"):
        pipe.save_pretrained(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert not list(tmp_path.glob(".*"))
