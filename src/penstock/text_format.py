"""Bytes, seconds, counts, names and foreign text as text for a terminal."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.errors import ArgumentError


def choose_byte_unit(size: float) -> tuple[float, str]:
    """Return the decimal unit for a number of bytes: how many bytes it has, and its name."""
    # 0.9995: from there on three digits round up to the next unit, "1 MB" instead of "1e+03 KB".
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
    return next((unit for unit in units if size >= 0.9995 * unit[0]), (1.0, "B"))


def format_bytes(size: float) -> str:
    """Return a number of bytes with three significant digits.

    >>> format_bytes(512), format_bytes(999_950), format_bytes(1_536_000)
    ('512 B', '1 MB', '1.54 MB')
    """
    factor, name = choose_byte_unit(size)
    return f"{size / factor:.3g} {name}"


_BYTES_PER_UNIT = {
    "": 1.0,
    "B": 1.0,
    **{f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)},
}


def parse_bytes(text: str) -> float:
    """Return the number of bytes that a text names. KB is 1,000 bytes and KiB 1,024.

    >>> parse_bytes("24GB"), parse_bytes("1.5 GiB"), parse_bytes("512")
    (24000000000.0, 1610612736.0, 512.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    factor = _BYTES_PER_UNIT.get(match[2].upper()) if match else None
    try:
        if match and factor is not None:
            return float(match[1]) * factor
    except ValueError:
        pass
    raise ArgumentError(
        f"{text!r} is not a number of bytes: write a number and a unit, such as '24GB' or '1.5GiB' "
        "(B, KB, MB, GB, TB, KiB, MiB, GiB or TiB)"
    )


def format_binary_bytes(size: float) -> str:
    """Return a number of bytes in the binary units that are usual for the memory of a device.

    >>> format_binary_bytes(512), format_binary_bytes(7 * 2**30)
    ('512 bytes', '7.00 GiB')
    """
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {name}"
    return f"{size:g} bytes"


def format_gib(size: float, digits: int = 1) -> str:
    """Return a number of bytes in GiB.

    >>> format_gib(70 * 2**30), format_gib(2**28, digits=2)
    ('70.0 GiB', '0.25 GiB')
    """
    return f"{size / 2**30:.{digits}f} GiB"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in decimal gigabytes per second.

    >>> format_bandwidth(12_340_000_000)
    '12.34 GB/s'
    """
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits.

    >>> format_seconds(1.25), format_seconds(0.0125), format_seconds(2e-6), format_seconds(0.9997)
    ('1.25 s', '12.5 ms', '2 µs', '1 s')
    """
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"


def format_count(count: int) -> str:
    """Return a number of parameters as papers write it.

    >>> format_count(1_685), format_count(124_439_808)
    ('1,685', '124M')
    """
    for factor, letter in ((1e9, "B"), (1e6, "M")):
        if count >= 0.9995 * factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:,}"


def format_plural(count: int, noun: str) -> str:
    """Return a number of things.

    >>> format_plural(1, "rank"), format_plural(8, "micro-batch")
    ('1 rank', '8 micro-batches')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def format_number(value: float) -> str:
    """Return a number with four significant digits, and with a prefix if it is large.

    >>> format_number(21.0), format_number(1 / 3), format_number(2_500_000_000)
    ('21', '0.3333', '2.5G')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 9999.5):
            return f"{value / factor:.4g}{prefix}"
    return f"{value:.4g}"


class TimeUnit(NamedTuple):
    """A unit of time: how many of them are one second, and the name."""

    per_second: float
    name: str

    def format(self, seconds: float) -> str:
        """Return a time in this unit, as text.

        >>> choose_time_unit(0.25).format(0.0125), choose_time_unit(21.0).format(9.0)
        ('12.5 ms', '9')
        """
        return f"{format_number(seconds * self.per_second)} {self.name}".rstrip()


def choose_time_unit(makespan: float) -> TimeUnit:
    """Return the unit for a timeline.

    Seconds are written without a name, because in a simulation they may stand for anything.
    """
    if makespan >= 1 or makespan == 0:
        return TimeUnit(1.0, "")
    return TimeUnit(1e3, "ms") if makespan >= 1e-3 else TimeUnit(1e6, "µs")


def make_printable(text: str, max_length: int | None = None) -> str:
    r"""Return text from elsewhere with control characters escaped, and cut to a length.

    A file name, a file or an error of a model may hold escape sequences, which would colour a
    terminal, rename its window or move its cursor. Line ends stay.

    >>> print(make_printable("\x1b[31mred", 9), make_printable("abcdef", 5))
    \x1b[3... ab...
    """
    if max_length is not None:
        text = text[: max_length + 1]  # the rest is cut off in any case
    shown = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
    if max_length is not None and len(shown) > max_length:
        return f"{shown[: max_length - 3]}..."
    return shown


def format_stages(stages: tuple[int, ...] | list[int]) -> str:
    """Return the stages as words for a sentence.

    >>> format_stages([2]), format_stages([0, 2, 3])
    ('stage 2', 'stages 0, 2 and 3')
    """
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"


def collapse_name_ranges(names: list[str]) -> list[str]:
    """Replace names with consecutive numbers by a range.

    >>> collapse_name_ranges(["wte", "h.0", "h.1", "h.2", "ln_f"])
    ['wte', 'h.0 to h.2', 'ln_f']
    """
    runs: list[list[str]] = []
    for name in names:
        if runs and _next_name(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]


def _next_name(name: str) -> str | None:
    """Return the name with its last number increased by one, or None if it has no number."""
    parts = name.split(".")
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].isdigit():
            return ".".join([*parts[:index], str(int(parts[index]) + 1), *parts[index + 1 :]])
    return None
