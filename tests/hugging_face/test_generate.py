"""`pipe.generate` against the `generate` of the unsplit model, token for token."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed, nn

from penstock import PenstockTypeError, Pipe, RemoteError, RunError
from penstock.model.traced.whole_model import run_model_method
from tests.distributed.ranks import ranks
from tests.hugging_face.tiny import WORDS, bert, gpt2, llama, mixtral, t5

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers


class OwnModel(nn.Module):
    """A model that is not of transformers, with a `generate` of its own.

    It uses a parameter of its own and the weight of another unit between units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.positions = nn.Parameter(torch.randn(32, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4)
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x).cumsum(1)
        return x @ self.embed.weight.T, None

    def generate(self, ids: Tensor, new_tokens: int, temperature: float = 1.0) -> Tensor:
        for _ in range(new_tokens):
            logits, _ = self(ids)
            probabilities = torch.softmax(logits[:, -1] / temperature, -1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
        return ids


def lora() -> Any:
    adapters = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(llama(), adapters)


MODELS: dict[str, Any] = {
    "Llama": llama,
    "GPT-2": gpt2,
    "T5": t5,
    "Mixtral": mixtral,
    "Llama + LoRA": lora,
    "own": OwnModel,
    "GPT-2 with dropout": lambda: gpt2(resid_pdrop=0.5),
}
PADDING = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
NEW: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {**NEW, "do_sample": False},
    "sampling": {**NEW, "do_sample": True, "top_k": 10},
    "padding": {**NEW, "do_sample": True, "attention_mask": PADDING},
    "beams": {**NEW, "do_sample": False, "num_beams": 3},
    "no cache": {**NEW, "do_sample": False, "use_cache": False},
    "scores": {**NEW, "output_scores": True, "return_dict_in_generate": True},
}
OWN_CALL = {"new_tokens": 5, "temperature": 0.8}


def make(name: str) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return a model with random weights, a prompt, and an example batch."""
    torch.manual_seed(3)
    model = MODELS[name]()
    ids = torch.randint(3, WORDS, (4, 5))
    if name == "own":
        return model, ids, {"ids": ids}
    nn.init.normal_(model.get_output_embeddings().weight)  # or each token is followed by itself
    return model, ids, {"input_ids": ids, "labels": ids}


def generate(model: Any, ids: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """Return the tokens and scores, and random numbers that are drawn afterwards."""
    torch.manual_seed(5)
    result = model.generate(ids, **call)
    tensors = [result] if isinstance(result, Tensor) else [result.sequences, *result.scores]
    return [*tensors, torch.rand(3)]


def assert_equal(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# ---- one process ---------------------------------------------------------------------------


def make_pipe(model: Any, example: dict[str, Any]) -> Pipe:
    return Pipe(
        model, 2, stages=2, devices=["cpu", "cpu"], example=example, balance="parameters"
    ).eval()


@pytest.mark.parametrize(
    ("name", "calls"), [("Llama", list(CALLS)), ("GPT-2", list(CALLS)), ("T5", ["greedy"])]
)
def test_generate_has_the_tokens_of_the_unsplit_model(name: str, calls: list[str]) -> None:
    model, ids, example = make(name)
    unsplit = copy.deepcopy(model).eval()
    pipe = make_pipe(model, example)
    for call in calls:
        assert_equal(generate(pipe, ids, CALLS[call]), generate(unsplit, ids, CALLS[call]))


class OnSeveralDevices:
    """A pipe on one device whose `generate` runs as it does with several."""

    def __init__(self, pipe: Pipe) -> None:
        self.partition: Any = pipe.partition

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        part = self.partition
        locations = part._find_locations((0, 1), True)
        return run_model_method(part.model, part.units, locations, None, "generate", args, kwargs)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5", "Mixtral", "Llama + LoRA", "own"])
def test_generate_unit_by_unit(name: str) -> None:
    model, ids, example = make(name)
    unsplit = copy.deepcopy(model).eval()
    pipe = OnSeveralDevices(make_pipe(model, example))
    calls = [OWN_CALL] if name == "own" else [CALLS["sampling"], CALLS["greedy"]]
    for call in calls:
        assert_equal(generate(pipe, ids, call), generate(unsplit, ids, call))


def test_generate_uses_a_cache_and_leaves_no_trace() -> None:
    model, ids, example = make("Llama")
    pipe = make_pipe(model, example)
    lengths: list[int] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _, args, __: lengths.append(args[0].shape[1])
    )

    def read_attributes() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return [hooks, *(set(vars(m)) for m in model.modules())]

    model.generate(ids, **CALLS["greedy"])  # transformers installs hooks of its own
    before = read_attributes()
    for runner in (pipe, OnSeveralDevices(pipe)):
        lengths.clear()
        runner.generate(ids, **CALLS["greedy"])
        assert lengths == [5, 1, 1, 1, 1]
    assert read_attributes() == before
    hook.remove()
    assert not pipe.training
    assert not model.training
    pipe.train()
    pipe.generate(ids, **CALLS["greedy"])  # the mode is the caller's, as with the model
    assert pipe.training
    assert model.training


def test_generate_between_steps() -> None:
    model, ids, example = make("GPT-2")
    pipe = make_pipe(model, example).train()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    tokens = []
    for _ in range(2):
        pipe.step(**example)
        optimizer.step()
        optimizer.zero_grad()
        pipe.eval()
        tokens.append(pipe.generate(ids, **CALLS["sampling"]))
        unsplit = copy.deepcopy(model)
        assert_equal(
            generate(pipe, ids, CALLS["sampling"]), generate(unsplit, ids, CALLS["sampling"])
        )
        pipe.train()
    assert not torch.equal(*tokens)


def test_models_without_generate_are_refused() -> None:
    ids = torch.randint(3, WORDS, (4, 5))
    pipe = make_pipe(bert(), {"input_ids": ids})
    with pytest.raises(PenstockTypeError, match=r"^pipe.generate runs the generate of the model, "):
        pipe.generate(ids)
    layers = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    sequential = Pipe(layers, stages=2, devices=["cpu", "cpu"])
    with pytest.raises(PenstockTypeError, match=r"a Sequential has none\. Put the layers"):
        sequential.generate(ids)


# ---- processes -----------------------------------------------------------------------------


def make_pipe_over_ranks(name: str, **options: Any) -> tuple[Pipe, Any, Tensor]:
    model, ids, example = make(name)
    unsplit = copy.deepcopy(model).eval()
    group = distributed.group.WORLD
    options = {"chunks": 2, "balance": "parameters", **options}
    return Pipe(model, group=group, example=example, **options).eval(), unsplit, ids


def compare_on_ranks(name: str, calls: list[dict[str, Any]], options: dict[str, Any]) -> None:
    pipe, unsplit, ids = make_pipe_over_ranks(name, **options)
    for call in calls:
        assert_equal(generate(pipe, ids, call), generate(unsplit, ids, call))
    if "schedule" not in options:
        return
    # Ranks with other random states sample with that of the first.
    expected = generate(unsplit, ids, calls[0])[0]
    torch.manual_seed(5 + distributed.get_rank())
    result = pipe.generate(ids, **calls[0])
    tokens = result if isinstance(result, Tensor) else result.sequences
    assert torch.equal(tokens, expected)
    if distributed.get_rank():
        state = torch.Generator().manual_seed(5 + distributed.get_rank()).get_state()
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "size", "calls", "options"),
    [
        ("Llama", 2, list(CALLS), {}),
        ("GPT-2", 2, ["sampling", "padding", "beams"], {"schedule": "zb-v", "stages": 4}),
        ("T5", 2, ["sampling"], {}),
        ("Llama + LoRA", 2, ["sampling"], {}),
        ("GPT-2", 3, ["sampling", "greedy"], {"schedule": "1f1b"}),
    ],
)
def test_generate_over_processes(
    name: str, size: int, calls: list[str], options: dict[str, Any]
) -> None:
    ranks(size).run(compare_on_ranks, name, [CALLS[call] for call in calls], options)


def test_generate_of_ones_own_over_processes() -> None:
    ranks(2).run(compare_on_ranks, "own", [OWN_CALL], {})


def get_message(pipe: Pipe, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((RemoteError, RunError)) as caught:
        pipe.generate(*args, **kwargs)
    return str(caught.value)


def refuse_on_ranks() -> list[str]:
    rank = distributed.get_rank()
    pipe, unsplit, ids = make_pipe_over_ranks("Llama")
    messages = [
        get_message(pipe, ids + rank, **CALLS["greedy"]),
        get_message(pipe, ids, **{**CALLS["greedy"], "top_k": 5 + rank}),
        get_message(
            pipe, ids, **CALLS["greedy"], output_hidden_states=True, return_dict_in_generate=True
        ),
    ]
    # After an error, the pipe can be called again.
    assert_equal(generate(pipe, ids, CALLS["greedy"]), generate(unsplit, ids, CALLS["greedy"]))
    own, _, _ = make_pipe_over_ranks("own")
    own.partition.model.generate = lambda ids: torch.tensor([random.Random(rank).random() > 0.8])
    messages.append(get_message(own, ids))
    dropout, _, _ = make_pipe_over_ranks("GPT-2 with dropout")
    messages.append(get_message(dropout.train(), ids, **CALLS["greedy"]))
    return messages


def test_generate_over_processes_refuses_what_would_differ() -> None:
    for messages in ranks(2).run(refuse_on_ranks):
        prompt, option, hidden, random_result, dropout = messages
        assert "sample values of tensor 0" in prompt
        assert "input 'top_k': 5 on rank 0; 6 on rank 1" in option
        assert "tensors that were taken from inside units" in hidden
        assert "the ranks have generated different tokens" in random_result
        assert "drew random numbers on rank" in dropout
        assert "Call pipe.eval() before" in dropout
