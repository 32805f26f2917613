"""Compare Penstock and torch.distributed.pipelining with the unsplit model on the same scripts.

    python benchmarks/trust.py [--only WORD]

The first table has scripts that run without an error with torch.distributed.pipelining, and shows
the number that differs most from the unsplit model. The second table has scripts that fail. All run
in float64 on the CPU, with fixed seeds. The pipelining scripts run in one gloo process per stage. A
script that fails or hangs is reported. The exit code is 1 if Penstock differs from the unsplit
model.
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

ROUNDING = 1e-10  # smaller differences count as rounding
OFF = ("pipelining is off by", "Penstock is off by")
NUMBERS = ("script", "compared", "at", "unsplit", "pipelining", "Penstock", *OFF)
ERRORS = ("script", "compared", "pipelining says", "Penstock is off by")

Place = tuple[str, tuple[int, ...]]


def differences(actual: Found, expected: Found) -> dict[str, Tensor]:
    """Return absolute differences by name, on the common rows; infinity for a missing tensor."""
    distances = {}
    for name, wanted in expected.items():
        if name not in actual:
            distances[name] = torch.full_like(wanted, torch.inf)
            continue
        common = tuple(
            slice(min(n, m)) for n, m in zip(actual[name].shape, wanted.shape, strict=True)
        )
        distances[name] = (actual[name][common] - wanted[common]).abs()
    return distances


def worst(actual: Found, expected: Found) -> tuple[float, Place]:
    """Return the largest difference and its place."""
    distances = differences(actual, expected)
    name = max(distances, key=lambda name: distances[name].max().item())
    where = torch.unravel_index(distances[name].argmax(), distances[name].shape)
    return distances[name].max().item(), (name, tuple(int(index) for index in where))


def at(place: Place, result: Found | Failure) -> str:
    name, where = place
    if isinstance(result, Failure):
        return str(result)
    return f"{result[name][where]:.6f}" if name in result else "nothing"


def verdict(result: Found | Failure, expected: Found) -> str:
    if isinstance(result, Failure):
        return "fails"
    shapes = [
        f"{len(result[name])} rows for {len(wanted)}"
        for name, wanted in expected.items()
        if name in result and result[name].shape != wanted.shape
    ]
    distance, _ = worst(result, expected)
    return "; ".join(
        [f"{distance:.1e}" if distance > ROUNDING else f"equal ({distance:.0e})", *shapes]
    )


def is_equal(result: Found | Failure, expected: Found) -> bool:
    same_shapes = isinstance(result, dict) and {name: v.shape for name, v in result.items()} == {
        name: v.shape for name, v in expected.items()
    }
    return same_shapes and worst(result, expected)[0] <= ROUNDING  # type: ignore[arg-type]


def run(script: Script) -> Found | Failure:
    """Run a script in this process."""
    try:
        return script()
    except Exception as error:
        return Failure(0, f"{type(error).__name__}: {str(error).splitlines()[0]}", at=0.0)


def pipelined(rows: Sequence[Row], limit: float) -> list[Found | Failure]:
    """Run the pipelining scripts; those with the same number of ranks share a process group."""
    together: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        together[row.ranks].append(number)
    results: dict[int, Found | Failure] = {}
    for ranks, numbers in together.items():
        scripts = [rows[number].pipelining for number in numbers]
        results.update(zip(numbers, in_processes(scripts, ranks, limit), strict=True))
    return [results[number] for number in range(len(rows))]


def with_penstock(row: Row, limit: float) -> Found | Failure:
    if row.replicas == 1:
        return run(row.penstock)
    return in_processes([row.penstock], row.replicas, limit)[0]


def table(rows: Sequence[Row], columns: Sequence[str], limit: float) -> bool:
    """Print a table row by row, and return whether Penstock is right in all rows."""
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
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds for a group of processes"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = torch.__version__, penstock.__version__, platform.python_version()
    print("torch {}, penstock {}, Python {}".format(*versions))
    right = []
    for rows, columns in ((SILENT, NUMBERS), (REFUSED, ERRORS)):
        selected = [row for row in rows if args.only in row.title]
        right += [table(selected, columns, args.limit)] if selected else []
    sys.exit(0 if right and all(right) else 1)


if __name__ == "__main__":
    main()
