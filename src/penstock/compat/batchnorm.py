"""Deferred BatchNorm with the buffers that old state dicts have."""

from __future__ import annotations

import torch

from penstock.stage import deferred_batchnorm


class DeferredBatchNorm(deferred_batchnorm.DeferredStatsBatchNorm):
    """As Penstock's, and two buffers that are in every old checkpoint, zero between batches."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, chunks)
        for name in ("sum", "sum_squares"):
            self.register_buffer(name, torch.zeros(num_features))
