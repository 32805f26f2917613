"""Profiles for tests: even ones, and random small ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from penstock.planning import (
    DeviceProfile,
    LinkProfile,
    PerRows,
    Profile,
    UnitProfile,
    UnitSeconds,
    ValueProfile,
)


def even_profile(
    units: int = 8, ranks: int = 2, rows: int = 8, memory: float = float("inf"), send: float = 0.0
) -> Profile:
    """Return a profile of equal units in a chain: each row takes a second for F, I and W."""
    second = PerRows(0.0, 1.0)
    return Profile(
        "even",
        rows,
        tuple(
            UnitProfile(
                f"layer.{index}",
                {"cpu": UnitSeconds(second, second, second)},
                parameter_bytes=100.0,
                gradient_bytes=100.0,
                activation=PerRows(0.0, 10.0),
            )
            for index in range(units)
        ),
        tuple(ValueProfile(index, (index + 1,), PerRows(0.0, 1.0)) for index in range(units - 1)),
        (DeviceProfile("cpu", memory),) * ranks,
        LinkProfile(latency=send),
        optimizer_factor=2.0,
    )


def random_profile(seed: int) -> Profile:
    """Return a small profile with unequal units, devices and links, and perhaps skips."""
    draw = Random(seed)
    ranks = draw.randint(1, 4)
    units = draw.randint(ranks, 8)

    def number(low: float, high: float) -> PerRows:
        return PerRows(round(draw.uniform(0, low), 3), round(draw.uniform(low, high), 3))

    def seconds() -> UnitSeconds:
        return UnitSeconds(number(0.2, 2.0), number(0.2, 2.0), number(0.1, 1.5))

    kinds = ("fast", "slow")
    values = [ValueProfile(i, (i + 1,), number(0.5, 4.0)) for i in range(units - 1)]
    if units > 2 and draw.random() < 0.4:
        src = draw.randrange(units - 2)
        values.append(ValueProfile(src, (draw.randrange(src + 2, units),), number(0.5, 2.0)))
    if units > 2 and seed % 4 == 0:  # a large one over the whole model
        skips = Random(f"skip {seed}")
        size = PerRows(0.0, round(skips.uniform(2.0, 40.0), 3))
        values.append(ValueProfile(0, (units - 1,), size, has_grad=skips.random() < 0.7))
    return Profile(
        f"random {seed}",
        draw.randint(1, 6),
        tuple(
            UnitProfile(
                f"unit.{index}",
                {kind: seconds() for kind in kinds},
                parameter_bytes=draw.randint(0, 40),
                gradient_bytes=draw.randint(0, 40),
                activation=(activation := number(2.0, 10.0)),
                weight_activation=draw.choice(
                    [None, PerRows(activation.fixed / 2, activation.per_row / 2)]
                ),
                workspace=number(0.1, 2.0),
            )
            for index in range(units)
        ),
        tuple(values),
        tuple(
            DeviceProfile(draw.choice(kinds), speed=draw.choice([1, 1, 2])) for _ in range(ranks)
        ),
        LinkProfile(round(draw.uniform(0, 0.5), 3), draw.choice([10.0, 100.0])),
        {(0, 1): LinkProfile(0.3, 5.0)} if ranks > 1 and draw.random() < 0.5 else {},
        optimizer_factor=draw.choice([0.0, 2.0]),
        runtimes={"threads": 0.1, "graph": 0.02} if draw.random() < 0.3 else {"threads": 0.0},
    )


def with_memory(profile: Profile, memory: float) -> Profile:
    return replace(profile, devices=tuple(replace(d, memory=memory) for d in profile.devices))
