"""The calls of torchtitan's trainer and validator (version 0.3), reproduced without torchtitan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from penstock import ArgumentError
from penstock.integrations.torchtitan import PipeSchedule, make_pipelining_fn
from tests.distributed.ranks import ranks

TOKENS, IGNORED = 16, -100


class Decoder(nn.Module):
    """A small model with the methods that torchtitan's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, 8)
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})
        self.output = nn.Linear(8, TOKENS)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        h = self.tok_embeddings(tokens)
        if positions is not None:
            h = h + positions[..., None] / 10
        for layer in self.layers.values():
            h = torch.tanh(layer(h))
        return self.output(h)


def compute_loss(pred: Tensor, labels: Tensor, global_valid_tokens: Any = 1.0) -> Any:
    loss = nn.functional.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / global_valid_tokens, {}


def make_microbatches() -> list[tuple[dict[str, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(3)
    microbatches = []
    for ignored in range(4):
        tokens = torch.randint(TOKENS, (2, 6), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, :ignored] = IGNORED
        microbatches.append(
            ({"input": tokens, "positions": torch.arange(6.0).expand(2, 6)}, labels)
        )
    return microbatches


def build(**changes: Any) -> tuple[PipeSchedule, list[nn.Module], bool, bool]:
    """Call the pipelining function as `Trainer.__init__` does, with a model on meta."""
    with torch.device("meta"):
        model = Decoder()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("pp",))
    arguments = {
        "parallel_dims": SimpleNamespace(
            pp_enabled=True, dp_enabled=False, get_mesh=lambda _: mesh
        ),
        "training": SimpleNamespace(local_batch_size=8),
        "parallelism": SimpleNamespace(
            pipeline_parallel_schedule="Interleaved1F1B", pipeline_parallel_microbatch_size=2
        ),
        "compile_config": SimpleNamespace(enable=False),
        "ac_config": None,
        "dump_folder": "",
        "device": torch.device("cpu"),
        "model_config": None,
        "parallelize_fn": None,
        "loss_fn": compute_loss,
        **changes,
    }
    example = {"tokens": torch.zeros(8, 6, dtype=torch.long), "positions": torch.zeros(8, 6)}
    parts = make_pipelining_fn(example, balance="parameters")(model, **arguments)
    for part in parts[1]:
        part.to_empty(device="cpu")
        part.init_weights(buffer_device=None)  # type: ignore[operator]
        part.train()
    return parts


def train_as_torchtitan() -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss of a step, that of a validation, and the gradients of this rank."""
    schedule, parts, has_first, has_last = build()
    microbatches = make_microbatches()
    valid_tokens = sum((labels != IGNORED).sum() for _, labels in microbatches)
    arguments: dict[str, Any] = {
        "arg_mbs": [(inputs["input"],) for inputs, _ in microbatches] if has_first else None,
        "kwarg_mbs": [{"positions": inputs["positions"]} for inputs, _ in microbatches],
        "target_mbs": [labels for _, labels in microbatches] if has_last else None,
    }
    losses: list[Tensor] = []
    schedule.step(
        **arguments,
        losses=losses,
        loss_kwargs={"global_valid_tokens": valid_tokens},
        return_outputs=False,
    )
    sums: list[Tensor] = []
    for part in parts:
        part.eval()
    schedule.eval(**arguments, losses=sums)
    gradients = {
        n: p.grad for part in parts for n, p in part.named_parameters() if p.grad is not None
    }
    return torch.stack(losses).sum().item(), torch.stack(sums).sum().item(), gradients


def test_step_and_eval_are_those_of_the_unsplit_model() -> None:
    model = Decoder()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model.init_weights()
    microbatches = make_microbatches()
    tokens = torch.cat([inputs["input"] for inputs, _ in microbatches])
    positions = torch.cat([inputs["positions"] for inputs, _ in microbatches])
    labels = torch.cat([labels for _, labels in microbatches])
    valid_tokens = (labels != IGNORED).sum()
    loss, _ = compute_loss(model(tokens, positions), labels, valid_tokens)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    gradients: dict[str, Tensor] = {}
    for step_loss, eval_loss, part in ranks(2).run(train_as_torchtitan):
        assert step_loss == pytest.approx(loss.item(), rel=1e-6)
        assert eval_loss == pytest.approx(loss.item() * valid_tokens.item(), rel=1e-6)
        gradients |= part
    assert gradients.keys() == expected.keys()
    torch.testing.assert_close(gradients, expected)


def test_settings_of_parallelize_fn_are_refused() -> None:
    dims = SimpleNamespace(pp_enabled=True, dp_enabled=True, tp_enabled=True)
    with pytest.raises(
        ArgumentError, match="set up with dp, tp, compile, which its parallelize_fn"
    ):
        make_pipelining_fn(None)(
            Decoder(),
            parallel_dims=dims,
            training=None,
            parallelism=None,
            loss_fn=compute_loss,
            compile_config=SimpleNamespace(enable=True),
        )
