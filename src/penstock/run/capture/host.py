"""Random numbers that the host draws: Python's own, and numpy's. A replay draws none of them."""

from __future__ import annotations

import random
import sys
from typing import Any

from penstock.run.capture.watching import Uncapturable


class Host:
    """Where these generators stand, before a step."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _of_numpy()

    def check(self) -> None:
        """After it: they stand there still."""
        for name, before, now in (
            ("random", self._python, random.getstate()),
            ("numpy.random", self._numpy, _of_numpy()),
        ):
            if str(before) != str(now):
                raise Uncapturable(
                    f"a layer draws from {name} in every step, and a replay would not: draw with "
                    "torch on the layer's device"
                )

    def put_back(self) -> None:
        """As if it had not been."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _of_numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None or not hasattr(numpy, "random") else numpy.random.get_state()
