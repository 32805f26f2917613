"""The mirror of the pipeline parts of `fairscale`.

Its `Pipe` is torchgpipe's `GPipe` under another name.
"""

from __future__ import annotations

from typing import Any

from penstock.compat import add_submodules
from penstock.compat.balance import balance_by_size, balance_by_time
from penstock.compat.legacy_pipe import BalancedLegacyPipe, DeferredBatchNorm, verify_module
from penstock.compat.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from penstock.stage.recompute import is_checkpointing, is_recomputing

__all__ = ["Pipe", "nn"]

__version__ = "0.4.13"  # the release that is mirrored


class FairscalePipe(BalancedLegacyPipe):
    """A pipe over an `nn.Sequential` that `balance` cuts into partitions on `devices`."""

    __module__ = "penstock.compat.fairscale.nn.pipe.pipe"
    __qualname__ = "Pipe"


FairscalePipe.__name__ = "Pipe"  # users see and pickle it under the old library's name
Pipe = FairscalePipe
nn: Any  # made below

add_submodules(__name__, nn=[Pipe])
add_submodules(f"{__name__}.nn", pipe=[Pipe, is_checkpointing, is_recomputing])
add_submodules(
    f"{__name__}.nn.pipe",
    balance=[balance_by_size, balance_by_time],
    batchnorm=[DeferredBatchNorm],
    checkpoint=[is_checkpointing, is_recomputing],
    pipe=[Pipe, verify_module],
    skip=[Namespace, Skippable, pop, skippable, stash, verify_skippables],
)
