"""The mirror of `torchgpipe`."""

from __future__ import annotations

from penstock.compat import add_submodules
from penstock.compat.balance import balance_by_size, balance_by_time
from penstock.compat.legacy_pipe import BalancedLegacyPipe, DeferredBatchNorm, verify_module
from penstock.compat.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from penstock.stage.recompute import is_checkpointing, is_recomputing

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"  # the release that is mirrored


class GPipe(BalancedLegacyPipe):
    """A pipe over an `nn.Sequential` that `balance` cuts into partitions on `devices`."""

    __module__ = "penstock.compat.torchgpipe.gpipe"


add_submodules(
    __name__,
    balance=[balance_by_size, balance_by_time],
    batchnorm=[DeferredBatchNorm],
    checkpoint=[is_checkpointing, is_recomputing],
    gpipe=[GPipe, verify_module],
    skip=[Namespace, Skippable, pop, skippable, stash, verify_skippables],
)
