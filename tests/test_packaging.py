"""The wheel and the sdist: what they contain, and what an environment gets that installs them.

An environment has no packages but those that it is given, with what they require. They are links to
the packages of this interpreter, so pip needs no network; what is not there, pip cannot find.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from email.message import Message
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from penstock import __version__

hatchling = pytest.importorskip("hatchling.build")  # in the extra `dev`

ROOT = Path(__file__).parent.parent
INSTALLED = f"Successfully installed torch-penstock-{__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a wheel and an sdist of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel, sdist = (
            build(str(folder)) for build in (hatchling.build_wheel, hatchling.build_sdist)
        )
    return folder / wheel, folder / sdist


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (name,) = (name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    return BytesParser().parsebytes(contents(wheel)[name])


# ---- what is built ------------------------------------------------------------------------


def test_wheel_contains_the_package_with_its_types_and_no_tests(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    folders = {name.partition("/")[0] for name in contents(wheel)}
    assert folders == {"penstock", f"torch_penstock-{__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources | {"penstock/py.typed"} <= set(contents(wheel))


def test_wheel_metadata_leaves_the_choice_of_torch_to_the_user(built: tuple[Path, Path]) -> None:
    facts = metadata(built[0])
    assert facts["Name"] == "torch-penstock"
    assert facts["Requires-Python"] == ">=3.11"
    extras = {
        "cli",
        "draw",
        "cuda",
        "docs",
        "safetensors",
        "bench",
        "zoo",
        "frameworks",
        "plan",
        "dev",
    }
    assert set(facts.get_all("Provides-Extra", [])) == extras
    needed = [Requirement(text) for text in facts.get_all("Requires-Dist", [])]
    assert [str(need) for need in needed if need.marker is None] == ["torch>=2.10"]
    for need in needed:  # an upper bound would make pip replace a library that is there
        assert [limit.operator for limit in need.specifier] == [">="], need


def test_sdist_builds_the_same_wheel(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert (folder / "tests").is_dir()
    monkeypatch.chdir(folder)
    assert contents(tmp_path / hatchling.build_wheel(str(tmp_path))) == contents(wheel)


# ---- what an environment gets -------------------------------------------------------------


class Environment:
    """An environment without packages, except links to the named ones and to what they require."""

    def __init__(self, folder: Path, *packages: str) -> None:
        venv.create(folder)
        self.folder, libraries = folder, folder / "libraries"
        libraries.mkdir()
        (packages_folder,) = folder.glob("lib/python*/site-packages")
        # In a folder of its own, because pip must never uninstall through a link.
        (packages_folder / "libraries.pth").write_text(str(libraries))
        pending, linked = [Requirement(package) for package in packages], set[str]()
        while pending:
            requirement = pending.pop()
            if str(requirement) in linked:
                continue
            linked.add(str(requirement))
            package = distribution(requirement.name)
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (libraries / top).exists():
                    (libraries / top).symlink_to(Path(str(package.locate_file(top))).resolve())
            for need in map(Requirement, package.requires or ()):
                extras = ("", *requirement.extras)
                if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                    pending.append(need)

    def run(self, program: str, *words: str, code: int = 0) -> str:
        """Return what a program of the environment prints, to stderr if it fails."""
        bare = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
        done = subprocess.run(
            [self.folder / "bin" / program, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**bare, "PIP_CONFIG_FILE": os.devnull},
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    def install(self, package: str) -> str:
        """Install a package with the pip of this interpreter: the last line that pip prints."""
        words = ["--no-index", "--no-build-isolation", "--no-compile", package]
        pip = ["-m", "pip", "--python", str(self.folder)]
        return self.run(sys.executable, *pip, "install", *words).splitlines()[-1]


TRAIN_WITHOUT_EXTRAS = """
import torch
import penstock

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = penstock.Pipe(model, chunks=2, stages=2, devices=["cpu", "cpu"])
result = pipe.step(torch.ones(4, 4), target=torch.ones(4, 2), loss_fn=torch.nn.MSELoss())
pipe.save("saved")
pipe.export("model.safetensors")
print(penstock.__file__, torch.isfinite(result.loss))
for ask in (
    lambda: penstock.draw.picture(result.timeline, "picture.svg"),
    lambda: penstock.draw.text(result.timeline, color=True),
    lambda: pipe.load("model.safetensors"),
):
    try:
        ask()
    except penstock.errors.MissingExtra as error:
        print(error)
"""


def test_wheel_installed_next_to_torch_trains_and_names_missing_extras(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    environment = Environment(tmp_path, "torch")
    assert environment.install(str(built[0])) == INSTALLED
    place, *hints = environment.run("python", "-c", TRAIN_WITHOUT_EXTRAS).splitlines()
    assert place.startswith(str(tmp_path))
    assert place.endswith("tensor(True)")
    assert hints == [
        "a picture needs matplotlib: pip install 'torch-penstock[draw]'",
        "text in colour needs rich: pip install 'torch-penstock[cli]'",
        "reading a safetensors file needs safetensors: pip install 'torch-penstock[safetensors]'",
    ]
    hint = environment.run("penstock", "show", "1f1b", code=2)
    assert hint == (
        "penstock: the command line needs typer and rich: pip install 'torch-penstock[cli]'\n"
    )


def test_sdist_installed_with_extras_draws_on_the_command_line(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """The hint of an error, `pip install 'torch-penstock[draw]'`, extends what is installed."""
    environment = Environment(
        tmp_path, "torch", "hatchling", "typer", "rich", "matplotlib", "safetensors"
    )
    last = environment.install(f"torch-penstock[cli] @ {built[1].as_uri()}")
    assert last == INSTALLED
    assert "already satisfied" in environment.install("torch-penstock[draw,safetensors]")
    words = ["show", "1f1b", "--ranks", "2", "--chunks", "2", "--svg", "picture.svg"]
    printed = environment.run("penstock", *words)
    assert printed.endswith("wrote picture.svg\n")
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")
