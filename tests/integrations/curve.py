"""The curve of a training run, to compare with that of another run."""

from __future__ import annotations

from dataclasses import dataclass, field


class Killed(Exception):
    """Stands for the kill of a run."""


@dataclass
class Curve:
    """What a run has logged: (loss, gradient norm) by step, and the evaluation loss by step."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)

    def add(self, log_history: list[dict[str, float]]) -> None:
        for entry in log_history:
            step = int(entry["step"])
            if "grad_norm" in entry:
                self.steps[step] = entry["loss"], entry["grad_norm"]
            if "eval_loss" in entry:
                self.evaluations[step] = entry["eval_loss"]

    def compute_difference(self, other: Curve) -> float:
        """Return the largest relative difference of any number. Raise if one is missing."""
        assert self.steps.keys() == other.steps.keys(), (self.steps.keys(), other.steps.keys())
        assert self.evaluations.keys() == other.evaluations.keys()
        pairs = [
            *(
                (a, b)
                for k in self.steps
                for a, b in zip(self.steps[k], other.steps[k], strict=True)
            ),
            *((self.evaluations[k], other.evaluations[k]) for k in self.evaluations),
        ]
        return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
