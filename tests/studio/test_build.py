from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.studio.build import PAGE, PYODIDE_FILES, build, zip_modules
from penstock.studio.requests import answer
from penstock.studio.server import CONTENT_SECURITY_POLICY

ALONE = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "site-packages" not in p and "/src" not in p)]
from penstock.studio.requests import answer
assert ".zip" in sys.modules["penstock"].__file__
assert "torch" not in sys.modules
print(answer(sys.argv[2]))
"""


def test_zipped_modules_work_without_anything_else(tmp_path: Path) -> None:
    archive = tmp_path / "penstock.zip"
    archive.write_bytes(zip_modules())
    request = json.dumps({"kind": "timeline", "setting": {"schedule": "zb-v"}})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, str(archive), request],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == answer(request)


def test_equal_modules_give_equal_archives() -> None:
    assert zip_modules() == zip_modules()


def test_build_writes_the_page_and_its_first_answers(tmp_path: Path) -> None:
    pyodide = tmp_path / "pyodide"
    pyodide.mkdir()
    for name in PYODIDE_FILES:
        (pyodide / name).write_text(name)
    build(tmp_path / "built", pyodide)
    first = json.loads((tmp_path / "built" / "first.json").read_text())
    request = json.dumps({"kind": "timeline", "setting": {}})
    assert first["timeline"] == json.loads(answer(request))
    copied = {file.name for file in (tmp_path / "built").iterdir()}
    assert {file.name for file in PAGE.iterdir()} < copied


def test_changed_download_of_pyodide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(command: list[str], cwd: str, **options: object) -> None:
        Path(cwd, "pyodide.tgz").write_bytes(b"something else")

    monkeypatch.setattr(subprocess, "run", pack)
    with pytest.raises(RunError, match="has the digest sha512-"):
        build(tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_page_has_the_policy_of_the_server_and_no_inline_code() -> None:
    text = (PAGE / "index.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    server = {rule.strip() for rule in CONTENT_SECURITY_POLICY.split(";")}
    page = {rule.strip() for rule in policy.split(";")}
    assert page <= server
    assert "style=" not in text
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=", text)


def test_page_asks_for_nothing_from_elsewhere() -> None:
    for file in PAGE.iterdir():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
