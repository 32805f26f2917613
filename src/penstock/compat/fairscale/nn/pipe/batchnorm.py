"""BatchNorm that counts mini-batches."""

from penstock.compat.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
