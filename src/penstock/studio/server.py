"""Serve the studio on this machine: static files, for this machine only."""

from __future__ import annotations

import mimetypes
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from penstock.errors import ArgumentError, RunError

BUILT = Path(__file__).parent / "built"

# The page may load scripts, styles and data from this server, and from nowhere else.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "connect-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
MEDIA_TYPES = {
    **mimetypes.types_map,
    ".mjs": "text/javascript",
    ".js": "text/javascript",
    ".wasm": "application/wasm",
    ".json": "application/json",
    ".zip": "application/zip",
    ".svg": "image/svg+xml",
}
MAX_FILE_BYTES = 32 * 2**20


class StudioHandler(SimpleHTTPRequestHandler):
    """A handler that serves the built folder, and at `/opened` the file that was named."""

    extensions_map = MEDIA_TYPES
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, opened: bytes | None = None, **options: Any) -> None:
        self._opened = opened
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        """Answer with a file. A request under another host's name is refused.

        A foreign page whose name leads to this machine (DNS rebinding) could otherwise read the
        opened file.
        """
        if not re.fullmatch(r"(localhost|127\.0\.0\.1)(:\d+)?", self.headers.get("Host", "")):
            self.send_error(403, "this server is for localhost")
        elif self.path.partition("?")[0] == "/opened":
            self._send_opened()
        else:
            super().do_GET()

    def _send_opened(self) -> None:
        if self._opened is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(self._opened)))
        self.end_headers()
        self.wfile.write(self._opened)

    def list_directory(self, path: Any) -> None:
        """Refuse to list a folder."""
        self.send_error(404)

    def end_headers(self) -> None:
        """Add the headers that keep the page from loading anything from elsewhere."""
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing: a request is not news."""


class StudioServer(ThreadingHTTPServer):
    """A server of the studio on 127.0.0.1.

    Args:
        port: The port; 0 for any free one.
        file: A schedule or a saved timeline that the page opens.
        folder: The built studio.

    Raises:
        RunError: The studio is not built, or the port is in use.
        ArgumentError: The file is missing or too large.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, file: Path | None = None, folder: Path = BUILT) -> None:
        if not (folder / "index.html").is_file():
            raise RunError(
                f"there is no studio in {folder}. In a clone of the repository, 'make studio' "
                "builds it; it needs npm."
            )
        handler = partial(StudioHandler, directory=str(folder), opened=_read_file(file))
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as error:
            raise RunError(f"port {port} cannot be used: {error}. Choose another --port.") from None
        self._has_file = file is not None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{'?open' if self._has_file else ''}"


def _read_file(file: Path | None) -> bytes | None:
    if file is None:
        return None
    if not file.is_file():
        raise ArgumentError(f"there is no file '{file}'")
    with file.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ArgumentError(f"'{file}' has more than {MAX_FILE_BYTES // 2**20} MB")
    return content
