"""The entry point of `penstock` and `python -m penstock`, the command line.

The command line needs typer and rich, which come with the extra `cli`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from penstock.errors import MissingExtra


def main() -> None:
    """Run the command line, or print how to install its libraries if they are missing."""
    if any(find_spec(library) is None for library in ("typer", "rich")):
        missing = MissingExtra("typer and rich", "cli", "the command line")
        print(f"penstock: {missing}", file=sys.stderr)
        sys.exit(2)
    try:
        from penstock import cli

        cli.main()
    except KeyboardInterrupt:  # before or after a command, which handle it themselves
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
