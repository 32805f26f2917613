"""Abort of a gloo group from another thread.

`ProcessGroup.abort`, `shutdown` and `destroy_process_group` do not wake a thread that is inside a
gloo `wait()` (measured with PyTorch 2.13). A receive that times out does: gloo then closes the
connection, and every pending operation on it fails within milliseconds.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch

from penstock.runtime.distributed.links import PointToPointGroup

_ABORT_TAG = 2**31 - 7  # nothing is ever sent under this tag


def abort_gloo(group: PointToPointGroup) -> None:
    """Make every operation of the group fail: pending ones and later ones."""
    byte = torch.empty(1, dtype=torch.uint8)
    # One receive per peer, as a connection that is closed already raises at once.
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([byte], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
