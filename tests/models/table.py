"""python -m tests.models.table: run every model in every trial and write docs/models.md.

It takes about ten minutes on two cores. With names, it runs only these and writes nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import PenstockError, Pipe
from tests.models.comparing import Different, Exhibited, every_trial
from tests.models.exhibits import ZOO
from tests.models.refused import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

INTRODUCTION = """\
# Tested models

Each of these models was split without any change to its code, and trained beside the unsplit model:
in 2, 3 and 4 stages, under `1f1b` and `zb-h1`, inline and in threads, with and without
recomputation, on batches of two lengths (or image sizes, or numbers of rows), and forward only. The
tests compare loss, outputs, buffers and the gradient of every parameter. `make test` runs a part of
this for two dozen of the models. This command runs all of it and writes this page:

```bash
make zoo
```

The models are tiny and have random weights, in float64, without dropout. The last column is the
largest difference in any of the tests, from the unsplit model run on the same micro-batches. If the
rows of a batch are independent (they are not with BatchNorm, or with a loss that compares rows),
the numbers also equal those of the whole batch at once.

*Units* are the submodules that are never cut. *Between stages* says what is sent for each
micro-batch with four stages: values from one stage to the next, skips straight to a later stage,
and parameters that several stages share.

"""
REFUSALS = """\
## Refused models and their error messages

Penstock refuses these when the pipe is made, or when the forward takes a path that it did not take
before. [Errors and restrictions](restrictions.md) says what to do, and what Penstock cannot detect.

"""


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    units: int
    between: str
    worst: float


def tried(name: str) -> Line | str:
    """Return the row of a model, or its error."""
    try:
        return _compared(name)
    except (PenstockError, Different) as error:
        return f"{error}"


def _compared(name: str) -> Line:
    exhibited = Exhibited(ZOO[name])
    worst, pipe = 0.0, None
    for trial in every_trial():
        pipe = exhibited.piped(trial)
        for at in (0, 1):
            for training in (True, False):
                worst = max(worst, exhibited.compared(trial, pipe, at, training))
    exhibited.as_before()
    assert pipe is not None
    return Line(len(pipe._placed_partition.partition.outline.units), between(pipe), worst)


def between(pipe: Pipe) -> str:
    """Describe what stages send and share."""
    outline = pipe._placed_partition.partition.outline
    skips = sum(flow.dst > flow.src + 1 for flow in outline.transfers)
    found = [
        (len(outline.transfers) - skips, "value"),
        (skips, "skip"),
        (len(outline.shared_parameters), "shared parameter"),
    ]
    return ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in found if n)


# ---- the page -----------------------------------------------------------------------------


def written(lines: Mapping[str, Line]) -> str:
    """Return the whole page."""
    return "".join([INTRODUCTION, *_models(lines), "\n", REFUSALS, *_refusals()])


def _models(lines: Mapping[str, Line]) -> Iterator[str]:
    yield f"## {len(lines)} models\n\n"
    yield '<details markdown="1">\n<summary>The whole table</summary>\n\n'
    yield "| model | from | units | between stages | differs by at most |\n|---|---|---|---|---|\n"
    for name, line in lines.items():
        exhibit = ZOO[name]
        cells = [exhibit.name, exhibit.source, str(line.units), line.between, size(line.worst)]
        yield f"| {' | '.join(cells)} |\n"
    yield "\n</details>\n"


def _refusals() -> Iterator[str]:
    yield "| model | from | error message |\n|---|---|---|\n"
    for one in REFUSED:
        message = " ".join(one.message().split()).replace("|", "\\|")
        yield f"| {one.name} | {one.source} | `{message}` |\n"


def size(difference: float) -> str:
    """Round a difference up to a power of ten."""
    return "0" if not difference else f"{10 ** _power(difference):.0e}"


def _power(difference: float) -> int:
    return next(power for power in range(-40, 40) if 10**power >= difference)


def listed(page: str) -> set[tuple[str, str]]:
    """Return the name and the source of each row of the page."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {(row[0].removeprefix("| "), row[1]) for row in rows}


def main(names: Iterable[str]) -> None:
    """Try the models in parallel, one process per core."""
    chosen = [name for name in ZOO if not names or any(n in name for n in names)]
    with multiprocessing.get_context("spawn").Pool(initializer=_begin) as pool:
        found: dict[str, Line | str] = {}
        for name, line in zip(chosen, pool.imap(tried, chosen), strict=True):
            found[name] = line
            print(f"{name}: {line}", flush=True)
    lines = {name: line for name, line in found.items() if isinstance(line, Line)}
    if len(lines) < len(found):
        sys.exit(f"{len(found) - len(lines)} of {len(found)} differ, or are refused")
    if not names:
        PAGE.write_text(written(lines))
        print(f"wrote {PAGE.name}: {len(lines)} models")


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # raised by transformers


if __name__ == "__main__":
    main(sys.argv[1:])
