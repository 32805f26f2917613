"""The same scripts three ways: the model itself, torch.distributed.pipelining, and Penstock.

    python benchmarks/trust.py [--only WORD]

The first table has scripts that run to their end with torch.distributed.pipelining, and shows the
number that is farthest from the unsplit model's; the second has scripts that do not. All in float64
on the CPU, with fixed seeds. Pipelining's scripts run in a gloo process for each stage; one that
fails or hangs is reported as that. Ends with 1 if Penstock differs from the unsplit model.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from three_ways import REFUSED, SILENT
from three_ways.processes import LIMIT, Failure, in_processes
from three_ways.row import Found, Row, Script

ROUNDING = 1e-10  # a difference below it is none
OFF = ("pipelining is off by", "Penstock is off by")
NUMBERS = ("script", "compared", "at", "unsplit", "pipelining", "Penstock", *OFF)
ERRORS = ("script", "compared", "pipelining says", "Penstock is off by")

Place = tuple[str, tuple[int, ...]]


def differences(found: Found, expected: Found) -> dict[str, Tensor]:
    """By name, where both have numbers. What is missing altogether differs by infinity."""
    apart = {}
    for name, right in expected.items():
        if name not in found:
            apart[name] = torch.full_like(right, torch.inf)
            continue
        common = tuple(
            slice(min(n, m)) for n, m in zip(found[name].shape, right.shape, strict=True)
        )
        apart[name] = (found[name][common] - right[common]).abs()
    return apart


def worst(found: Found, expected: Found) -> tuple[float, Place]:
    """The largest difference, and where it is."""
    apart = differences(found, expected)
    name = max(apart, key=lambda name: apart[name].max().item())
    where = torch.unravel_index(apart[name].argmax(), apart[name].shape)
    return apart[name].max().item(), (name, tuple(int(index) for index in where))


def at(place: Place, found: Found | Failure) -> str:
    name, where = place
    if isinstance(found, Failure):
        return str(found)
    return f"{found[name][where]:.6f}" if name in found else "nothing"


def verdict(found: Found | Failure, expected: Found) -> str:
    if isinstance(found, Failure):
        return "fails"
    shapes = [
        f"{len(found[name])} rows for {len(right)}"
        for name, right in expected.items()
        if name in found and found[name].shape != right.shape
    ]
    apart, _ = worst(found, expected)
    return "; ".join([f"{apart:.1e}" if apart > ROUNDING else f"equal ({apart:.0e})", *shapes])


def is_equal(found: Found | Failure, expected: Found) -> bool:
    same_shapes = isinstance(found, dict) and {name: v.shape for name, v in found.items()} == {
        name: v.shape for name, v in expected.items()
    }
    return same_shapes and worst(found, expected)[0] <= ROUNDING  # type: ignore[arg-type]


def run(script: Script) -> Found | Failure:
    """In this process."""
    try:
        return script()
    except Exception as error:
        return Failure(0, f"{type(error).__name__}: {str(error).splitlines()[0]}", at=0.0)


def pipelined(rows: Sequence[Row], limit: float) -> list[Found | Failure]:
    """Pipelining's side of the rows: those with the same number of ranks in one group."""
    together: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        together[row.ranks].append(number)
    found: dict[int, Found | Failure] = {}
    for ranks, numbers in together.items():
        scripts = [rows[number].pipelining for number in numbers]
        found.update(zip(numbers, in_processes(scripts, ranks, limit), strict=True))
    return [found[number] for number in range(len(rows))]


def with_penstock(row: Row, limit: float) -> Found | Failure:
    if row.replicas == 1:
        return run(row.penstock)
    return in_processes([row.penstock], row.replicas, limit)[0]


def table(rows: Sequence[Row], columns: Sequence[str], limit: float) -> bool:
    """Prints it, row by row; is Penstock right in all of them?"""
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    right = True
    for row, peer in zip(rows, pipelined(rows, limit), strict=True):
        expected = row.unsplit()
        ours = with_penstock(row, limit)
        _, place = worst(peer if isinstance(peer, dict) else expected, expected)
        where = f"{place[0]}{list(place[1]) or ''}"
        values = {
            "script": row.title,
            "compared": row.compared,
            "at": where,
            "unsplit": at(place, expected),
            "pipelining": at(place, peer),
            "Penstock": at(place, ours),
            "pipelining says": str(peer) if isinstance(peer, Failure) else verdict(peer, expected),
            "pipelining is off by": verdict(peer, expected),
            "Penstock is off by": verdict(ours, expected),
        }
        print(f"| {' | '.join(values[column] for column in columns)} |")
        right = right and is_equal(ours, expected)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts with this in their title")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a group of peers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    versions = torch.__version__, penstock.__version__, platform.python_version()
    print("torch {}, penstock {}, Python {}".format(*versions))
    right = []
    for rows, columns in ((SILENT, NUMBERS), (REFUSED, ERRORS)):
        asked = [row for row in rows if given.only in row.title]
        right += [table(asked, columns, given.limit)] if asked else []
    sys.exit(0 if right and all(right) else 1)


if __name__ == "__main__":
    main()
