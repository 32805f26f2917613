"""`penstock.compat.fairscale`: its `Pipe` has the interface of torchgpipe's `GPipe`."""

from __future__ import annotations

from penstock.compat.fairscale.nn import Pipe
from penstock.compat.fairscale.nn.pipe import balance, batchnorm, skip

from penstock.compat import fairscale
from penstock.compat.torchgpipe import GPipe


def test_fairscale_pipe_is_importable_from_three_modules() -> None:
    assert fairscale.nn.Pipe is fairscale.nn.pipe.Pipe is fairscale.Pipe is Pipe
    assert Pipe.__name__ == "Pipe"
    assert not issubclass(Pipe, GPipe)


def test_fairscale_submodules() -> None:
    assert balance.balance_by_time.__name__ == "balance_by_time"
    assert {"skippable", "stash", "pop", "Namespace", "verify_skippables"} <= set(skip.__all__)
    assert batchnorm.__all__ == ["DeferredBatchNorm"]
