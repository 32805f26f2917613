"""A BatchNorm whose running statistics advance once per mini-batch, as without micro-batches.

A plain BatchNorm in a pipe updates its running statistics once per micro-batch, with the statistics
of that micro-batch. `DeferredStatsBatchNorm` collects the statistics of all micro-batches and
updates once, with those of the whole mini-batch. The normalisation itself still uses each
micro-batch by itself, as the others have not been computed yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ArgumentError
from penstock.stage.recompute import in_recomputation
from penstock.stage.stage import Stage
from penstock.state_copy import MODULE_INTERNALS
from penstock.torch_compat import BatchNormBase, NormBase


class DeferredStatsBatchNorm(BatchNormBase):
    """A BatchNorm that updates its running statistics once after `chunks` micro-batches.

    Args:
        num_features: The number of channels, dim 1 of the input.
        eps: As in `nn.BatchNorm2d`.
        momentum: As in `nn.BatchNorm2d`.
        affine: As in `nn.BatchNorm2d`.
        chunks: The number of micro-batches of a mini-batch.
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
        """Start a mini-batch of this many micro-batches, and drop what was collected."""
        self.chunks = chunks
        self._microbatches_seen = 0
        self._rows = 0
        self._mean: Tensor | None = None
        self._sum_squared_deviations: Tensor | None = None  # from the mean, per channel

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise one micro-batch, and collect its statistics in training."""
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        self._check_input_dim(input)
        # The forward of a recomputation has counted this micro-batch.
        if self.track_running_stats and not in_recomputation():
            self._accumulate_microbatch(input)
        return functional.batch_norm(
            input, None, None, self.weight, self.bias, training=True, eps=self.eps
        )

    @torch.no_grad()
    def _accumulate_microbatch(self, input: Tensor) -> None:
        assert self.running_mean is not None
        # Every dim but the channels counts, as in BatchNorm. Low-precision activations are
        # converted to the dtype of the running statistics before they are summed.
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input.detach().to(self.running_mean.dtype)
        rows = values.numel() // values.size(1)
        self._microbatches_seen += 1
        if rows:
            self._merge_statistics(values, dims, rows)
        if self._microbatches_seen == self.chunks and self._rows:
            self._update_running_stats()

    def _merge_statistics(self, values: Tensor, dims: list[int], rows: int) -> None:
        """Combine the statistics of a micro-batch with those of the earlier ones.

        Means and sums of squared deviations are combined as in the parallel algorithm of Chan et
        al. A sum of squares and a sum would be simpler, but lose precision when the mean is large
        compared to the standard deviation.
        """
        mean = values.mean(dims)
        spread = values.var(dims, unbiased=False) * rows
        if self._mean is None or self._sum_squared_deviations is None:
            self._rows, self._mean, self._sum_squared_deviations = rows, mean, spread
        else:
            total_rows = self._rows + rows
            gap = mean - self._mean
            self._sum_squared_deviations = (
                self._sum_squared_deviations + spread + gap * gap * (self._rows * rows / total_rows)
            )
            self._mean = self._mean + gap * (rows / total_rows)
            self._rows = total_rows

    def _update_running_stats(self) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self._mean is not None
        assert self._sum_squared_deviations is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:  # a cumulative average, as in nn.BatchNorm2d
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - momentum).add_(self._mean, alpha=momentum)
        # BatchNorm keeps the unbiased variance, although it normalises with the biased one.
        variance = self._sum_squared_deviations / max(self._rows - 1, 1)
        self.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)
        self.begin_minibatch(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Return the module with every BatchNorm in it replaced by a deferred one.

        Parameters and buffers are shared with the given module. Modules that contain a BatchNorm
        are copied, not deeply, so that the given module stays as it is.
        """
        if isinstance(module, cls) and module.chunks == chunks:
            return module
        if isinstance(module, BatchNormBase) and module.track_running_stats:
            return cls._from_batch_norm(module, chunks)
        if isinstance(module, NormBase) and module.track_running_stats:
            raise ArgumentError(
                f"deferred_batch_norm=True is for BatchNorm, and {type(module).__name__} has "
                "track_running_stats=True, too: its statistics would advance once for each "
                "micro-batch. Leave one of the two options out."
            )
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
    def _from_batch_norm(cls, module: BatchNormBase, chunks: int) -> DeferredStatsBatchNorm:
        new = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
        if module.affine:
            new.weight, new.bias = module.weight, module.bias
        for name, buffer in module._buffers.items():
            new.register_buffer(name, cast(Any, buffer))
        tables = vars(module).items()
        vars(new).update({name: table for name, table in tables if name.endswith("_hooks")})
        return new.train(module.training)


class SharedSettings:
    """The settings of modules and of the copies that a conversion has made of them.

    Settings are attributes such as `training` and `momentum`. Users set them on the model that they
    passed or on the pipe, and both must see them, as they do without a conversion.

    Args:
        module: The module that was converted.
        converted: The module with copies in it.
    """

    def __init__(self, module: nn.Module | None = None, converted: nn.Module | None = None) -> None:
        # Weak references: on a rank, a pipe keeps the layers of its own stages only.
        self._pairs: list[tuple[ReferenceType[nn.Module], ReferenceType[nn.Module]]] = []
        if module is not None and converted is not None:
            copies = dict(converted.named_modules(remove_duplicate=False))
            self._pairs = [
                (ref(original), ref(copies[name]))
                for name, original in module.named_modules()
                if copies[name] is not original
            ]
        self._last = [self._read(original) for original, _ in self._pairs]

    def __reduce__(self) -> tuple[type[SharedSettings], tuple[()]]:
        return SharedSettings, ()  # a copy of a pipe does not follow the model

    def sync(self) -> None:
        """Give both sides the settings that were changed on one of them since the last time."""
        for index, (original, copied) in enumerate(self._pairs):
            ours, theirs = self._read(original), self._read(copied)
            last, model, pipe_module = self._last[index], original(), copied()
            if model is None or pipe_module is None:
                continue
            for name, value in ours.items():
                if name not in theirs or value is not last.get(name):
                    vars(pipe_module)[name] = value
                elif theirs[name] is not value:
                    vars(model)[name] = theirs[name]
            self._last[index] = self._read(original)

    def _read(self, module: ReferenceType[nn.Module]) -> dict[str, Any]:
        attributes = getattr(module(), "__dict__", {}).items()  # None has no attributes
        return {k: v for k, v in attributes if k == "training" or k not in MODULE_INTERNALS}


def find_deferred_batch_norms(stages: Iterable[Stage]) -> list[DeferredStatsBatchNorm]:
    """Return the deferred BatchNorm modules of the stages, without duplicates."""
    norms = [m for s in stages for m in s.modules() if isinstance(m, DeferredStatsBatchNorm)]
    return list(dict.fromkeys(norms))
