from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, Pipe
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.recompute import mark_recomputing
from tests.support import closely, each_checkpoint, each_runtime

FEATURES = 3


def deferred(norm: nn.Module, chunks: int) -> nn.Module:
    return DeferredStatsBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), chunks)


def same_statistics(a: nn.Module, b: nn.Module) -> bool:
    theirs = dict(b.named_buffers())
    return all(closely(buffer, theirs[name]) for name, buffer in a.named_buffers())


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(FEATURES), (8, FEATURES)),
        (nn.BatchNorm1d(FEATURES, momentum=0.5, eps=0.1), (8, FEATURES, 4)),
        (nn.BatchNorm1d(FEATURES, affine=False), (8, FEATURES)),
        (nn.BatchNorm2d(FEATURES, momentum=None), (8, FEATURES, 2, 5)),
        (nn.BatchNorm3d(FEATURES), (8, FEATURES, 2, 2, 2)),
        (nn.SyncBatchNorm(FEATURES), (8, FEATURES)),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_deferred_batch_norm_statistics_equal_those_of_the_whole_batch(
    norm: nn.BatchNorm1d, shape: tuple[int, ...], chunks: int
) -> None:
    torch.manual_seed(0)
    norm = norm.double()
    ours = deferred(norm, chunks)
    plain = nn.BatchNorm3d(FEATURES, norm.eps, norm.momentum, norm.affine).double()
    for _ in range(3):  # three mini-batches
        x = torch.randn(shape, dtype=torch.float64) * 3 + 5
        for piece in x.chunk(chunks):
            ours(piece)
        plain(x.view(8, FEATURES, -1, 1, 1))
        assert same_statistics(ours, plain)


def test_deferred_batch_norm_normalizes_each_micro_batch_separately() -> None:
    norm = nn.BatchNorm1d(FEATURES).double()
    ours = deferred(norm, 2)
    for piece in torch.randn(6, FEATURES, dtype=torch.float64).chunk(2):
        assert torch.equal(ours(piece), norm(piece))


def test_deferred_batch_norm_updates_statistics_after_the_last_micro_batch() -> None:
    ours = deferred(nn.BatchNorm1d(FEATURES), 3)
    before = copy.deepcopy(ours.state_dict())
    x = torch.randn(4, FEATURES)
    ours(x)
    ours(x)
    assert all(torch.equal(ours.state_dict()[name], before[name]) for name in before)
    ours(x)
    assert ours.num_batches_tracked == 1


def test_deferred_batch_norm_ignores_recomputations() -> None:
    ours = deferred(nn.BatchNorm1d(FEATURES), 2)
    x = torch.randn(4, FEATURES)
    ours(x)
    with mark_recomputing:
        ours(x)
    assert ours.num_batches_tracked == 0


def test_deferred_batch_norm_in_eval_mode_keeps_its_statistics() -> None:
    norm = nn.BatchNorm1d(FEATURES)
    norm(torch.randn(5, FEATURES))
    ours = deferred(norm, 2).eval()
    x = torch.randn(1, FEATURES)
    assert torch.equal(ours(x), norm.eval()(x))
    assert same_statistics(ours, norm)


def test_deferred_batch_norm_refuses_one_value_per_channel() -> None:
    """PyTorch refuses to normalize a single value per channel."""
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        deferred(nn.BatchNorm1d(FEATURES), 1)(torch.randn(1, FEATURES))


def test_deferred_batch_norm_refuses_one_dimensional_input() -> None:
    with pytest.raises(ValueError, match="expected at least 2D input"):
        deferred(nn.BatchNorm1d(FEATURES), 1)(torch.randn(FEATURES))


def test_convert_deferred_batch_norm_keeps_parameters_names_and_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    model[1].eval()
    norm = model[1][0]  # type: ignore[index]
    converted = DeferredStatsBatchNorm.convert_deferred_batch_norm(model, 4)
    ours = converted.get_submodule("1.0")
    assert isinstance(ours, DeferredStatsBatchNorm)
    assert (ours.chunks, ours.training, ours.eps, ours.momentum) == (4, False, 1e-5, 0.1)
    assert ours.weight is norm.weight
    assert ours.running_mean is norm.running_mean
    assert list(converted.state_dict()) == [
        "0.weight", "0.bias", "1.0.weight", "1.0.bias", "1.0.running_mean", "1.0.running_var",
        "1.0.num_batches_tracked",
    ]  # fmt: skip


def test_convert_deferred_batch_norm_leaves_other_norms() -> None:
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    model = nn.Sequential(plain, nn.LayerNorm(3), nn.InstanceNorm1d(3))
    assert list(DeferredStatsBatchNorm.convert_deferred_batch_norm(model).children()) == list(model)
    ours = DeferredStatsBatchNorm(3, chunks=2)
    assert DeferredStatsBatchNorm.convert_deferred_batch_norm(ours, ours.chunks) is ours
    other = DeferredStatsBatchNorm.convert_deferred_batch_norm(ours, 5)
    assert isinstance(other, DeferredStatsBatchNorm)
    assert (ours.chunks, other.chunks) == (2, 5)


# ---- in a pipe ----------------------------------------------------------------------------


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("rows", [2, 6, 9])
def test_deferred_batch_norm_in_a_pipe_counts_mini_batches(
    rows: int, checkpoint: str, runtime: str
) -> None:
    """Each mini-batch counts once, however many micro-batches it has.

    One that failed half-way does not count.
    """
    norm = nn.BatchNorm1d(FEATURES).double()
    pipe = Pipe(
        nn.Sequential(nn.Identity(), copy.deepcopy(norm), nn.Linear(3, 1).double()), 3, checkpoint,
        deferred_batch_norm=True, stages=3, runtime=runtime,
    )  # fmt: skip
    for _ in range(2):
        x = torch.randn(rows, FEATURES, dtype=torch.float64).repeat_interleave(2, dim=0)
        pipe(x).sum().backward()
        norm(x)
        assert same_statistics(pipe[1], norm)

    class Burst(Exception): ...

    def burst(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        raise Burst

    hook = pipe[1].register_forward_hook(burst)
    with pytest.raises(Burst):
        pipe(x)
    hook.remove()
    pipe(x)
    norm(x)
    assert same_statistics(pipe[1], norm)


class NormedBlock(nn.Module):
    """A block with a BatchNorm in it, which the pipe replaces together with the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(x), training=self.training)


def normed_pipe() -> tuple[nn.Sequential, Pipe]:
    linear = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
    model = nn.Sequential(NormedBlock(), linear)
    return model, Pipe(model, chunks=2, stages=2, devices=["cpu"] * 2, deferred_batch_norm=True)


def test_mode_and_momentum_of_the_model_reach_a_pipe_with_deferred_batch_norm() -> None:
    """`model.eval()` left the pipe's own BatchNorm and block in training mode."""
    model, pipe = normed_pipe()
    x = torch.randn(4, FEATURES, dtype=torch.float64)
    block = model[0]
    assert isinstance(block, NormedBlock)
    pipe(x)
    model.eval()
    torch.testing.assert_close(pipe(x), model(x))
    model.train()
    block.norm.momentum = 1.0
    pipe(x)
    torch.testing.assert_close(block.norm.running_mean, x.mean(0))


def test_last_mode_counts_with_deferred_batch_norm_whoever_set_it() -> None:
    model, pipe = normed_pipe()
    block, x = model[0], torch.randn(4, FEATURES, dtype=torch.float64)
    for modules in (pipe, model), (model, pipe):
        modules[0].eval()
        modules[1].train()
        pipe(x)
        assert block.training
        assert all(module.training for module in pipe[0].modules())
    pipe[0].eval()  # freezes the statistics
    pipe(x)
    assert not block.training
    assert pipe[1].training


def test_hooks_of_a_batch_norm_run_when_it_is_deferred() -> None:
    model, pipe = normed_pipe()
    calls: list[int] = []
    block = model[0]
    assert isinstance(block, NormedBlock)
    block.norm.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        pipe(torch.randn(4, FEATURES, dtype=torch.float64))
    assert len(calls) == 2


def test_deferred_batch_norm_refuses_statistics_of_instance_norm() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(FEATURES, track_running_stats=True), nn.Identity())
    with pytest.raises(ArgumentError, match="InstanceNorm1d has track_running_stats=True"):
        Pipe(model, chunks=2, stages=2, devices=["cpu"] * 2, deferred_batch_norm=True)
