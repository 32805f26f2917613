"""The networks of the papers in `examples/`, captured on a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock import Pipe
from tests.examples.test_models import MODELS
from tests.gpu.support import GPU, four, needs_gpu, replays_of

pytestmark = needs_gpu


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_networks_of_the_papers(name: str, schedule: str) -> None:
    small = MODELS[name]
    images, target = (tensor.to(GPU) for tensor in small.batch())
    graph, inline = (
        Pipe(
            small.model().to(GPU),
            2,
            devices=four()[:2],
            schedule=schedule,
            loss_fn=small.loss,
            runtime=runtime,
        )
        for runtime in ("graph", "inline")
    )
    for _ in range(4):
        losses = []
        for pipe in (graph, inline):
            pipe.zero_grad()
            losses.append(pipe.step(images, target=target).loss)
        torch.testing.assert_close(*losses)
        for captured, eager in zip(graph.parameters(), inline.parameters(), strict=True):
            torch.testing.assert_close(captured.grad, eager.grad)
    assert replays_of(graph) == 3
    torch.testing.assert_close(dict(graph.named_buffers()), dict(inline.named_buffers()))
