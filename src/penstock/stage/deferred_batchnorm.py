"""BatchNorm whose running statistics advance once a mini-batch, as without micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.stage.recompute import is_recomputing
from penstock.stage.stage import Stage


class DeferredStatsBatchNorm(_BatchNorm):
    """Normalises each micro-batch by itself, and tracks the statistics of all of them together.

    After `chunks` forwards the running statistics advance, by those of the whole mini-batch.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.begin_minibatch(chunks)

    def begin_minibatch(self, chunks: int) -> None:
        """A mini-batch of so many micro-batches begins."""
        self.chunks = chunks
        self._microbatches_seen = 0
        self._rows = 0
        self._mean: Tensor | None = None
        self._sum_squared_deviations: Tensor | None = None  # sum of squared distances from the mean

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """As BatchNorm's."""
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        self._check_input_dim(input)
        if not is_recomputing():
            self._accumulate_microbatch(input)
        return functional.batch_norm(
            input, None, None, self.weight, self.bias, training=True, eps=self.eps
        )

    @torch.no_grad()
    def _accumulate_microbatch(self, input: Tensor) -> None:
        assert self.running_mean is not None
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input.detach().to(self.running_mean.dtype)
        rows = values.numel() // values.size(1)
        self._microbatches_seen += 1
        if rows:
            self._merge_statistics(values, dims, rows)
        if self._microbatches_seen == self.chunks and self._rows:
            self._update_running_stats()

    def _merge_statistics(self, values: Tensor, dims: list[int], rows: int) -> None:
        mean = values.mean(dims)
        spread = values.var(dims, unbiased=False) * rows
        if self._mean is None or self._sum_squared_deviations is None:
            self._rows, self._mean, self._sum_squared_deviations = rows, mean, spread
        else:  # two groups put together
            both = self._rows + rows
            gap = mean - self._mean
            self._sum_squared_deviations = (
                self._sum_squared_deviations + spread + gap * gap * (self._rows * rows / both)
            )
            self._mean = self._mean + gap * (rows / both)
            self._rows = both

    def _update_running_stats(self) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self._mean is not None
        assert self._sum_squared_deviations is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - momentum).add_(self._mean, alpha=momentum)
        variance = self._sum_squared_deviations / max(self._rows - 1, 1)
        self.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)
        self.begin_minibatch(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """The module, with every BatchNorm in it replaced; parameters and buffers are shared.

        What has one in it is copied, not deeply, so that the given module stays as it is.
        """
        if isinstance(module, cls):
            module.begin_minibatch(chunks)
            return module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            return cls._from_batch_norm(module, chunks)
        children = {
            name: child and cls.convert_deferred_batch_norm(child, chunks)
            for name, child in module._modules.items()
        }
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        new = copy(module)
        new._modules = children
        return new

    @classmethod
    def _from_batch_norm(cls, module: _BatchNorm, chunks: int) -> DeferredStatsBatchNorm:
        new = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
        if module.affine:
            new.weight, new.bias = module.weight, module.bias
        for name, buffer in module._buffers.items():
            new.register_buffer(name, cast(Any, buffer))
        return new.train(module.training)


def find_deferred_batch_norms(stages: Iterable[Stage]) -> list[DeferredStatsBatchNorm]:
    """Those in stages, each once."""
    found = [m for s in stages for m in s.modules() if isinstance(m, DeferredStatsBatchNorm)]
    return list(dict.fromkeys(found))
