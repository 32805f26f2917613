"""Write docs/features.md from verdicts, and parse it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.features.common import COMMON
from tests.features.limits import LIMITS
from tests.features.more import MORE
from tests.features.table import SCHEDULES, Equal, Feature, Refused, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
FEATURES = {feature.name: feature for feature in (*COMMON, *MORE, *LIMITS)}

Verdicts = Mapping[tuple[str, str], Verdict]  # by feature and schedule

INTRODUCTION = """\
# Features under every schedule

Each cell of these tables is a test that ran: a small model of four stages trains as a pipe and,
for comparison, unsplit.

- **equal**: loss, outputs, buffers, and the gradients of all parameters and inputs equal those of
  the unsplit model.
- **refused**: the pipe raises an error, with the message in the note of that number. It never
  computes wrong numbers instead.

There is nothing in between: any other result fails the tests, and so does a cell of this page that
differs from what the tests find. This command writes the page:

```bash
make features
```

"""

HOW = """\
Unless a line below says otherwise, each test runs two steps of `pipe.step` with a step of SGD
between them, with 8 rows in 4 micro-batches, in float64, and compares them to 1e-10 with the
unsplit model on the whole batch. It does so inline without recomputation, and in threads with
`checkpoint="always"`. If your own model does something that is not listed, [check it](check.md).
"""


def written(verdicts: Verdicts) -> str:
    """Return the whole page."""
    notes = _notes(verdicts)
    parts = [
        INTRODUCTION,
        *_section("Common features", COMMON, verdicts, notes, HOW),
        *_section("Other features of models", MORE, verdicts, notes),
        *_section(
            "Limits",
            LIMITS,
            verdicts,
            notes,
            "[Errors and restrictions](restrictions.md) has each message, and says what to do.\n",
        ),
        *(f"{number}. {_quoted(message)}\n" for message, number in notes.items()),
    ]
    return "".join(parts)


def _section(
    title: str,
    features: Sequence[Feature],
    verdicts: Verdicts,
    notes: Mapping[str, int],
    text: str = "",
) -> Iterator[str]:
    yield f"## {title}\n\n"
    yield "| schedule | " + " | ".join(feature.name for feature in features) + " |\n"
    yield "|---" * (len(features) + 1) + "|\n"
    for schedule in SCHEDULES:
        cells = [_cell(verdicts[feature.name, schedule], notes) for feature in features]
        yield f"| `{schedule}` | " + " | ".join(cells) + " |\n"
    yield f"\n{text}\n" if text else "\n"
    yield from (f"- **{feature.name}**: {feature.compared}\n" for feature in features)
    yield "\n"


def _notes(verdicts: Verdicts) -> dict[str, int]:
    """Number the distinct messages in the order of the page."""
    found = [verdicts[name, schedule] for name in FEATURES for schedule in SCHEDULES]
    messages = dict.fromkeys(one.message for one in found if isinstance(one, Refused))
    return {message: number for number, message in enumerate(messages, start=1)}


def _cell(verdict: Verdict, notes: Mapping[str, int]) -> str:
    return "equal" if isinstance(verdict, Equal) else f"refused ({notes[verdict.message]})"


def _quoted(message: str) -> str:
    return f"`{' '.join(message.split())}`"


def read(page: str) -> dict[tuple[str, str], str]:
    """Return the content of each cell of the page; for a refusal, its message."""
    notes = dict(re.findall(r"^(\d+)\. `(.*)`$", page, re.MULTILINE))
    found, names = {}, []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| schedule |"):
            names = cells[1:]
        elif line.startswith("| `"):
            for name, cell in zip(names, cells[1:], strict=True):
                number = re.fullmatch(r"refused \((\d+)\)", cell)
                found[name, cells[0].strip("`")] = notes[number[1]] if number else cell
    return found


def shown(verdict: Verdict) -> str:
    """Return a verdict in the form that `read` returns."""
    return "equal" if isinstance(verdict, Equal) else " ".join(verdict.message.split())
