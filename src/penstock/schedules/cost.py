"""The cost of actions: seconds, and activation memory in bytes or any other unit.

The memory functions at the end add up which activations of a lane are alive at the same time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isclose

from penstock.errors import ArgumentError
from penstock.schedules.ir import OP_RULES, Compute, Op, lifetimes

_SHOWN_STAGES = 8  # in the repr of a cost


@dataclass(frozen=True)
class Cost:
    """The cost of each action, with one entry per stage.

    B takes as long as I and W together.

    Attributes:
        F: Seconds of a forward.
        I: Seconds of the gradient of the inputs.
        W: Seconds of the gradient of the weights.
        activation: The size of what one micro-batch keeps on the stage for its backward.
        send: Seconds from the moment a message is made until it arrives. A message in flight does
            not occupy any rank.
        weight_activation: The size of what is left of the activation after its I, until its W.
            Empty means all of it.
        stage_input: The size of what a recomputed micro-batch keeps from its F to its R. Empty
            means nothing.
        R: Seconds of a recomputation. Empty means as long as F.
        links: Seconds of a message between two stages, by (source, target), where they differ from
            `send`.

    Raises:
        ArgumentError: The entries are not one per stage, or a number is negative or not finite.

    Example:
        >>> Cost(F=(1, 2), I=(1, 2), W=(1, 2), activation=(1, 1)).seconds(Compute(Op.B, 1, 0))
        4
    """

    F: tuple[float, ...]
    I: tuple[float, ...]
    W: tuple[float, ...]
    activation: tuple[float, ...]
    send: float = 0.0
    weight_activation: tuple[float, ...] = ()
    stage_input: tuple[float, ...] = ()
    R: tuple[float, ...] = ()
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        """Return the columns that are set, on one line; long ones by their ends."""
        shown = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, tuple) and len(value) > _SHOWN_STAGES:
                value = f"({value[0]:g}, ..., {value[-1]:g}: {len(value)} stages)"
            elif isinstance(value, Mapping) and len(value) > _SHOWN_STAGES:
                value = f"<{len(value)} links>"
            shown += [f"{entry.name}={value}"] if value or entry.name == "send" else []
        return f"Cost({', '.join(shown)})"

    def __post_init__(self) -> None:
        columns = {}
        for name in ("F", "I", "W", "R", "activation", "weight_activation", "stage_input"):
            column = tuple(getattr(self, name))
            object.__setattr__(self, name, column)
            if column or name not in _OPTIONAL_COLUMNS:
                columns[name] = column
        if len({len(column) for column in columns.values()}) > 1:
            sizes = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
            raise ArgumentError(f"each column needs one entry per stage, but {sizes}")
        numbers = [
            ("send", self.send),
            *((f"link {pair}", self.links[pair]) for pair in self.links),
        ]
        for name, column in columns.items():
            numbers += [(f"{name} of stage {stage}", number) for stage, number in enumerate(column)]
        for name, number in numbers:
            if not 0 <= number < float("inf"):
                raise ArgumentError(f"{name} is {number}: a cost is a number from 0 up")
        for stage, (part, whole) in enumerate(
            zip(self.weight_activation, self.activation, strict=False)
        ):
            if part > whole:
                raise ArgumentError(
                    f"weight_activation of stage {stage} is {part}, more than its activation, "
                    f"{whole}: it is the part that I does not free"
                )

    @staticmethod
    def even(
        placement: Sequence[int], F: float = 1.0, I: float = 1.0, W: float = 1.0, send: float = 0.0
    ) -> Cost:
        """Return the cost in which every rank has the same share of the model.

        Args:
            placement: The rank of each stage.
            F: Seconds of a forward through all stages of one rank.
            I: The same for the gradient of the inputs.
            W: The same for the gradient of the weights.
            send: Seconds until a message arrives.

        Returns:
            The cost, with each rank's seconds divided evenly among the stages it owns. The
            activations of a rank's stages add up to 1.
        """
        owned = Counter(placement)

        def divided(share: float) -> tuple[float, ...]:
            return tuple(share / owned[rank] for rank in placement)

        return Cost(divided(F), divided(I), divided(W), divided(1.0), send)

    def scaled(self, factors: Sequence[float]) -> Cost:
        """Return this cost with the seconds of each stage multiplied by its factor.

        Args:
            factors: One factor for each stage.

        >>> Cost.even((0, 1)).scaled([1, 1.5]).F
        (1.0, 1.5)
        """
        columns = [
            tuple(number * factor for number, factor in zip(column, factors, strict=True))
            for column in (self.F, self.I, self.W, self.R or (0.0,) * len(factors))
        ]
        return replace(
            self, F=columns[0], I=columns[1], W=columns[2], R=columns[3] if self.R else ()
        )

    def seconds(self, action: Compute) -> float:
        """Return how long the action occupies its rank.

        Args:
            action: The action.
        """
        return self._seconds_by_op[action.op][action.stage]

    def send_seconds(self, src: int, dst: int) -> float:
        """Return how long a message takes from one stage to another, on another rank.

        Args:
            src: The stage that sends.
            dst: The stage that receives.
        """
        return self.links.get((src, dst), self.send) if self.links else self.send

    @property
    def kept_sizes(self) -> tuple[float, ...]:
        """The size of what each stage keeps of a micro-batch between its I and its W."""
        return self.weight_activation or self.activation

    @cached_property
    def _seconds_by_op(self) -> dict[Op, tuple[float, ...]]:
        columns = {"F": self.F, "I": self.I, "W": self.W, "R": self.R or self.F}
        return {
            op: tuple(map(sum, zip(*[columns[name] for name in rule.cost], strict=True)))
            for op, rule in OP_RULES.items()
        }


_OPTIONAL_COLUMNS = ("weight_activation", "stage_input", "R")


def exceeds(size: float, cap: float) -> bool:
    """Return True if `size` is above `cap` by more than rounding errors of sums."""
    return size > cap and not isclose(size, cap, rel_tol=1e-9)


def track_live_memory(lane: Sequence[Compute], cost: Cost) -> Iterator[tuple[int, bool, float]]:
    """Yield how much is alive after each change in a lane: (index, at its end, size).

    The second item is True if the change happens at the end of that action, False at its start.
    A rank does one thing at a time, so the order of its lane decides and seconds do not matter.
    """
    changes: dict[tuple[int, bool], float] = defaultdict(float)
    for (stage, _), (born, last) in lifetimes(lane).items():
        changes[born, False] += cost.activation[stage]
        changes[last, True] -= cost.activation[stage]
    if cost.weight_activation:
        # After an I only a part is kept, until the W. A full backward keeps nothing for later.
        steps = {action: step for step, action in enumerate(lane) if action.op in (Op.I, Op.W)}
        for action, step in steps.items():
            end = steps.get(action._replace(op=Op.W))
            if action.op is Op.I and end is not None:
                freed = cost.activation[action.stage] - cost.weight_activation[action.stage]
                changes[step, True] -= freed
                changes[end, True] += freed
    if cost.stage_input:
        forwards = {a: step for step, a in enumerate(lane) if a.op is Op.F}
        for step, action in enumerate(lane):
            if action.op is Op.R:
                size = cost.stage_input[action.stage]
                changes[forwards.get(action._replace(op=Op.F), step), False] += size
                changes[step, False] -= size
    # Sorting puts a start (False) before an end (True) of the same action: both are alive in it.
    size = 0.0
    for (step, at_end), change in sorted(changes.items()):
        size += change
        # Rounding removes float errors of the sum; adding 0.0 turns -0.0 into 0.0.
        yield step, at_end, round(size, 12) + 0.0


def fits_in_memory(lane: Sequence[Compute], cost: Cost, cap: float) -> bool:
    """Return True if the lane never holds more than `cap`."""
    return not any(exceeds(size, cap) for _, _, size in track_live_memory(lane, cost))


def expand_memory_caps(memory: float | Sequence[float], ranks: int) -> list[float]:
    """Return the cap of each rank, from one number for all ranks or one per rank."""
    caps = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(caps) != ranks:
        raise ArgumentError(
            f"memory has {len(caps)} entries for {ranks} ranks: give one number for all, or one "
            "per rank"
        )
    return caps
