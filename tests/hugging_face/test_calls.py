"""Tests that transformers models in a pipe accept their usual arguments, with exact results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock import AuditError, CutError, NoChunk
from penstock.errors import RunError
from penstock.model.huggingface import find_planned_units
from penstock.model.traced.units import find_units
from tests.hugging_face.tiny import TEXTS, agree, batch_for, gpt2, llama, mixtral, piped, words

each_text = pytest.mark.parametrize("name", TEXTS)


@each_text
def test_output_hidden_states(name: str) -> None:
    batch = batch_for(name)
    asked = {**batch, "output_hidden_states": True}
    agree(TEXTS[name](), batch, asked)
    agree(TEXTS[name](output_hidden_states=True), batch, stages=2)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_output_attentions(name: str) -> None:
    """Attentions leave the blocks through hooks, so the blocks are split into smaller units."""
    batch = {**batch_for(name), "output_attentions": True}
    agree(TEXTS[name](attn_implementation="eager"), batch)


@each_text
def test_attention_mask_differs_between_micro_batches(name: str) -> None:
    """The models take different paths with and without padding."""
    batch = batch_for(name)
    whole = torch.ones(4, 6, dtype=torch.int64)
    padded = whole.clone()
    padded[0, 4:] = 0
    padded[1, 5:] = 0
    pipe = agree(TEXTS[name](), *({**batch, "attention_mask": m} for m in (whole, padded, whole)))
    assert len(pipe.state_dict()) > 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_inputs_embeds_position_ids_and_attention_mask(name: str) -> None:
    labels = words()
    embedded = torch.randn(4, 6, 16, dtype=torch.float64)
    agree(TEXTS[name](), {"inputs_embeds": embedded, "labels": labels})
    batch = {"input_ids": labels, "labels": labels}
    backwards = torch.arange(6).flip(0).expand(4, 6)
    agree(TEXTS[name](use_cache=False), {**batch, "position_ids": backwards})
    low = torch.finfo(torch.float64).min
    mask = torch.zeros(4, 1, 6, 6, dtype=torch.float64).masked_fill(torch.rand(6, 6) < 0.3, low)
    agree(TEXTS[name](), {**batch, "attention_mask": mask})


def test_packed_sequences_are_refused_where_the_unsplit_model_would_not_separate_them() -> None:
    """With a cache, transformers lets a sequence see those before it in its row."""
    batch = batch_for("llama")
    packed = {**batch, "position_ids": torch.arange(6).remainder(3).expand(4, 6)}
    pipe = piped(llama().double(), batch)
    with pytest.raises(CutError, match="the position_ids given to LlamaForCausalLM restart"):
        pipe.step(**packed)
    agree(llama(use_cache=False), packed)


def test_position_ids_with_one_row_need_no_chunk() -> None:
    batch = batch_for("llama")
    positions = torch.arange(6)[None]
    with pytest.raises(ValueError, match=r"position_ids, of shape \(1, 6\), has size 1 on dim 0"):
        piped(llama(), {**batch, "position_ids": positions})
    pipe = piped(llama(), {**batch, "position_ids": NoChunk(positions)})
    result = pipe.step(**batch, position_ids=NoChunk(positions))
    assert abs(result.loss - pipe.step(**batch).loss) < 1e-6


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_return_dict_false_gives_tuples(name: str) -> None:
    agree(TEXTS[name](), {**batch_for(name), "return_dict": False})


@pytest.mark.parametrize(("name", "reentrant"), list(zip(TEXTS, [False, True] * 2, strict=True)))
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = TEXTS[name]().train()
    how = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    agree(model, batch_for(name), checkpoint="never")  # otherwise everything is recomputed twice


def test_gradient_checkpointing_around_dropout_is_refused() -> None:
    model = gpt2(resid_pdrop=0.1).train()
    model.gradient_checkpointing_enable()
    batch = batch_for("gpt2")
    with pytest.raises(RuntimeError, match=r"draws random numbers inside torch.utils.checkpoint"):
        piped(model, batch).step(**batch)


@each_text
def test_use_cache_is_refused(name: str) -> None:
    batch = batch_for(name)
    with pytest.raises(
        CutError, match=r"^use_cache was given to \w+, but a cache of keys and valu"
    ):
        piped(TEXTS[name](), {**batch, "use_cache": True})
    pipe = piped(TEXTS[name](), {**batch, "use_cache": False})
    with pytest.raises(CutError, match=r"^use_cache was given to"):
        pipe(**batch, use_cache=True)


def test_mixture_of_experts_with_router_loss() -> None:
    """Router logits leave the blocks through hooks; their loss is computed at the end.

    It balances the experts over all rows, so the audit refuses it, unless the rows that it tries
    choose their experts alike, as with one of 16 seeds.
    """
    torch.manual_seed(1)
    batch = batch_for("mixtral")
    agree(mixtral(), batch)
    batch = {**batch, "output_router_logits": True}
    with pytest.raises(AuditError, match="is not the sum of those for two parts"):
        agree(mixtral(), batch)
    agree(mixtral(), batch, audit="off")


def test_pipeline_plan_of_the_model_names_the_units() -> None:
    model = llama()
    assert "model.layers" in find_planned_units(model)
    assert list(find_units(model, find_planned_units(model))) == list(find_units(model))
    assert find_planned_units(gpt2()) == []


class Planned(nn.Module):
    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self._pp_plan = plan
        self.tower = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.dropout = nn.Dropout(0.0)


def test_pipeline_plan_that_does_not_fit_is_ignored() -> None:
    fitting = {"tower": (), "pair": (), "dropout": ()}
    assert find_planned_units(Planned(fitting)) == ["tower", "pair"]
    assert find_planned_units(Planned({**fitting, "norm": ()})) == []
    whole = nn.ModuleDict({"model": Planned({})})
    whole._pp_plan = {"model": ()}  # type: ignore[assignment]
    assert find_planned_units(whole) == []


def test_spans_outside_of_the_text_are_refused_where_micro_batches_have_different_numbers() -> None:
    """Its loss is the mean of two cross-entropies, which ignore such positions."""
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        vocab_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(config).double()
    ids, inside = torch.randint(1, 40, (4, 7)), torch.tensor([1, 2, 3, 4])
    batch = {"input_ids": ids, "start_positions": inside, "end_positions": inside + 1}
    agree(model, batch)
    outside = inside.where(inside > 1, 99)
    pipe = piped(model, batch)
    calls: list[Callable[..., Any]] = [pipe, pipe.step]
    for call in calls:
        with pytest.raises(RunError, match="averages over targets that count"):
            call(**{**batch, "start_positions": outside, "end_positions": outside})
