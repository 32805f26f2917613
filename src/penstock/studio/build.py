"""Build the studio: one static folder with the page, Pyodide and the modules that the page needs.

    python -m penstock.studio.build

Pyodide comes from npm, in one fixed release whose digest is checked. The folder works from any web
server. Nothing in it asks for anything outside of it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from penstock.errors import RunError
from penstock.studio.requests import COMPARED, answer

PACKAGE = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "page"
BUILT = Path(__file__).parent / "built"

PYODIDE = "314.0.7"
PYODIDE_DIGEST = (  # the `integrity` of this release on npm
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
)
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")

# The modules that the page imports, without torch. tests/studio/test_build.py imports them alone.
MODULES = (
    "__init__.py",
    "errors.py",
    "display.py",
    "text_format.py",
    "tracebacks.py",
    "vocabulary.py",
    "config.py",
    "model_summary.py",
    "schedules",
    "planning",
    "draw",
    "studio/__init__.py",
    "studio/requests.py",
    "studio/settings.py",
)

NOTICE = f"""This folder contains Pyodide {PYODIDE} (https://pyodide.org), without its list of
packages, under the Mozilla Public License 2.0, and the standard library of Python under the PSF
licence. The source of Pyodide is at https://github.com/pyodide/pyodide.
"""


def build(folder: Path = BUILT, pyodide: Path | None = None) -> None:
    """Write the studio to a folder, which is replaced.

    Args:
        folder: The folder to write.
        pyodide: A folder with Pyodide's files, from an earlier build; None to download them.
    """
    with TemporaryDirectory() as temporary:
        new = Path(temporary) / "studio"
        shutil.copytree(PAGE, new)
        if pyodide is None:
            _unpack_pyodide(_download_pyodide(), new / "pyodide")
        else:
            shutil.copytree(pyodide, new / "pyodide")
        (new / "penstock.zip").write_bytes(zip_modules())
        (new / "first.json").write_text(json.dumps(_first_answers()))
        (new / "NOTICE.txt").write_text(NOTICE)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(new, folder)


def zip_modules() -> bytes:
    """Return an archive of the modules that the page needs. Equal modules give equal bytes."""
    files = [
        file
        for name in MODULES
        for file in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    ]
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
        for file in sorted(files):
            archive.writestr(
                ZipInfo(f"penstock/{file.relative_to(PACKAGE).as_posix()}"),
                file.read_bytes(),
                compress_type=ZIP_DEFLATED,
            )
    return buffer.getvalue()


def _first_answers() -> dict[str, object]:
    """Return the answers that the page shows at once, while Pyodide still starts."""
    requests: dict[str, dict[str, object]] = {
        "catalog": {"kind": "catalog"},
        "timeline": {"kind": "timeline", "setting": {}},
        "compare": {"kind": "compare", "setting": {}, "names": COMPARED},
    }
    return {name: json.loads(answer(json.dumps(request))) for name, request in requests.items()}


def _download_pyodide() -> bytes:
    with TemporaryDirectory() as temporary:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"],
                cwd=temporary,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise RunError(
                f"npm could not fetch pyodide {PYODIDE}: {error}. Building the studio needs npm "
                "and a network; using it needs neither."
            ) from error
        (file,) = Path(temporary).glob("*.tgz")
        archive = file.read_bytes()
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if digest != PYODIDE_DIGEST:
        raise RunError(f"pyodide {PYODIDE} from npm has the digest {digest}, not {PYODIDE_DIGEST}")
    return archive


def _unpack_pyodide(archive: bytes, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for name in (*PYODIDE_FILES, "pyodide-lock.json"):
            stream = files.extractfile(f"package/{name}")
            assert stream is not None
            content = stream.read()
            if name == "pyodide-lock.json":  # the list of packages that could be downloaded
                content = json.dumps({**json.loads(content), "packages": {}}).encode()
            (folder / name).write_bytes(content)


def main() -> None:
    """Build the studio, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=BUILT, help="the folder to write")
    folder = parser.parse_args().out
    build(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    sys.stdout.write(f"wrote the studio to {folder}: {size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
