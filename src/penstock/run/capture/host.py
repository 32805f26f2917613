"""Random numbers that the host draws: Python's own, and numpy's. A replay draws none of them."""

from __future__ import annotations

import random
import sys
from typing import Any

from penstock.run.capture.watching import CaptureError


class HostRngGuard:
    """Where these generators stand, before a step."""

    def __init__(self) -> None:
        self._python_state = random.getstate()
        self._numpy_state = _get_numpy_state()

    def check_unchanged(self) -> None:
        """After it: they stand there still."""
        for name, before, now in (
            ("random", self._python_state, random.getstate()),
            ("numpy.random", self._numpy_state, _get_numpy_state()),
        ):
            if str(before) != str(now):
                raise CaptureError(
                    f"a layer draws from {name} in every step, and a replay would not: draw with "
                    "torch on the layer's device"
                )

    def restore(self) -> None:
        """As if it had not been."""
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            sys.modules["numpy"].random.set_state(self._numpy_state)


def _get_numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None or not hasattr(numpy, "random") else numpy.random.get_state()
