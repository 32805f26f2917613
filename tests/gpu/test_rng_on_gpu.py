"""Random numbers of cells on a GPU, whose default generator all virtual GPUs share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.stage.rng import DrawRedirect, _shared_generator_locks, redirect_draws
from penstock.torch_compat import drop_with_generator
from tests.gpu.support import GPU, needs_gpu

pytestmark = needs_gpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("size", [7, 1024, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_with_a_generator_equals_dropout_with_the_default_one(
    dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(size, device=GPU, dtype=dtype, requires_grad=True)
    generator = torch.Generator(GPU).manual_seed(5)
    torch.manual_seed(5)
    for _ in range(3):  # the generators move on alike
        dropped = drop_with_generator(generator, x, 0.1, True)
        assert dropped is not None
        expected = torch.native_dropout(x, 0.1, True)
        for found, wanted in zip(dropped, expected, strict=True):
            assert found.dtype is wanted.dtype
            assert torch.equal(found, wanted)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (dropped[0], expected[0])]
        assert torch.equal(*grads)


def test_dropout_in_a_cell_on_gpu_does_not_wait_for_other_cells() -> None:
    """Each draw waited for the shared generator: dropout in threads cost 40 % of a step."""
    x = torch.randn(64, device=GPU)
    with _shared_generator_locks[GPU], redirect_draws(DrawRedirect(3)):
        in_a_cell = functional.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(in_a_cell, functional.dropout(x, 0.5))


def test_attention_dropout_in_a_cell_on_gpu_leaves_the_default_generator_alone() -> None:
    query = torch.randn(2, 4, 16, 32, device=GPU, dtype=torch.bfloat16)
    torch.manual_seed(3)
    expected = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    before = torch.cuda.get_rng_state()
    with redirect_draws(DrawRedirect(3)):
        found = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert torch.equal(found, expected)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_gradients_of_dropout_in_a_cell_on_gpu_are_those_of_dropout() -> None:
    x = torch.randn(64, 33, device=GPU, requires_grad=True)
    with redirect_draws(DrawRedirect(3)):
        in_a_cell = [functional.dropout(x, 0.3), functional.dropout(x.T, 0.3)]
    torch.manual_seed(3)
    expected = [functional.dropout(x, 0.3), functional.dropout(x.T, 0.3)]
    for found, wanted in zip(in_a_cell, expected, strict=True):
        assert torch.equal(found, wanted)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, wanted)]
        assert torch.equal(*grads)
