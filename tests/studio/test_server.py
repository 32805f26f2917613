from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ArgumentError, RunError
from penstock.studio.build import PAGE
from penstock.studio.server import CONTENT_SECURITY_POLICY, MAX_FILE_BYTES, StudioServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StudioServer]:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0")
    with StudioServer(file=file, folder=PAGE) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: StudioServer, path: str, host: str = "localhost") -> tuple[int, str, str]:
    """Return the status, the media type and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    response = connection.getresponse()
    assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    body = response.read().decode("utf-8", "replace")
    connection.close()
    return response.status, response.headers.get_content_type(), body


def test_server_sends_the_page_with_its_media_types(server: StudioServer) -> None:
    assert server.url.endswith("/?open")
    assert get(server, "/?open")[:2] == (200, "text/html")
    assert get(server, "/app.js")[:2] == (200, "text/javascript")
    assert get(server, "/style.css")[:2] == (200, "text/css")
    assert get(server, "/opened") == (200, "application/octet-stream", "0F0 0B0")
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/nothing"])
def test_server_sends_nothing_outside_of_its_folder(server: StudioServer, path: str) -> None:
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
def test_server_refuses_requests_under_a_foreign_name(server: StudioServer, host: str) -> None:
    status, _, body = get(server, "/opened", host)
    assert status == 403
    assert "0F0" not in body


def test_server_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="'make studio' builds it"):
        StudioServer(folder=tmp_path)
    with pytest.raises(ArgumentError, match="there is no file"):
        StudioServer(file=tmp_path / "missing", folder=PAGE)
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ArgumentError, match="more than 32 MB"):
        StudioServer(file=tmp_path / "large", folder=PAGE)


def test_port_in_use_is_reported() -> None:
    with (
        StudioServer(folder=PAGE) as first,
        pytest.raises(RunError, match=r"cannot be used.*Choose another --port"),
    ):
        StudioServer(first.server_port, folder=PAGE)
