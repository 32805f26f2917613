"""python -m tests.features: run every feature under every schedule and write docs/features.md."""

from __future__ import annotations

import torch

from tests.features.page import FEATURES, PAGE, written
from tests.features.table import SCHEDULES, verdict

torch.set_num_threads(1)


def main() -> None:
    verdicts = {}
    for name, feature in FEATURES.items():
        print(name)
        for schedule in SCHEDULES:
            verdicts[name, schedule] = verdict(feature, schedule)
    PAGE.write_text(written(verdicts))
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
