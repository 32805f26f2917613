"""`penstock`, and `python -m penstock`: the command line, if its libraries are there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from penstock.errors import MissingExtra


def main() -> None:
    """The entry point; without the extra, one line that says how to get it."""
    if any(find_spec(library) is None for library in ("typer", "rich")):
        missing = MissingExtra("typer and rich", "cli", "the command line")
        print(f"penstock: {missing}", file=sys.stderr)
        sys.exit(2)
    from penstock import cli

    cli.main()


if __name__ == "__main__":
    main()
