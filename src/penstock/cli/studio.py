"""`penstock studio`: serve the studio on this machine, and open it in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from penstock.studio.server import StudioServer


def run(file: Path | None, port: int, browser: bool) -> None:
    """Serve the studio until Ctrl-C."""
    with StudioServer(port, file) as server:
        print(f"the studio is at {server.url} (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(server.url)
        server.serve_forever()
