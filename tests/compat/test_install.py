"""`penstock.compat.install` and `python -m penstock.compat` in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch.hosts import Ended, environment, run

from penstock.compat import fairscale, submodules_of, torch_sync, torchgpipe

SCRIPTS = Path(__file__).parent / "scripts"
MIRRORS = {
    "torch.distributed.pipeline.sync": torch_sync,
    "torchgpipe": torchgpipe,
    "fairscale": fairscale,
}


def python(*words: str, path: Path | None = None) -> Ended:
    """Run a Python program. It uses one thread, as tests run in parallel."""
    more = {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    ended = run([sys.executable, *words], environment(**more))
    assert ended.code == 0, ended.err
    return ended


def test_compat_runs_a_script_unchanged() -> None:
    script = str(SCRIPTS / "spawned.py")
    ended = python("-m", "penstock.compat", script, "--flag", "two words")
    assert ended.out.startswith("spawned")


def test_run_script_with_scripts_of_three_libraries_in_one_process() -> None:
    """They share one process because starting one takes seconds."""
    runs: dict[tuple[str, ...], str] = {
        ("torchgpipe_unet.py", "3"): "segmented by 3 partitions",
        ("fairscale_train.py", "--chunks", "3"): "trained with 3 chunks, except_last",
        ("torch_tutorial.py",): "trained: ",
    }
    lines = [f"run({str(SCRIPTS / script)!r}, {given})" for script, *given in runs]
    output = python("-c", "\n".join(["from penstock.compat import run_script as run", *lines])).out
    assert all(
        line.startswith(said) for line, said in zip(output.splitlines(), runs.values(), strict=True)
    ), output


def test_install_registers_every_module_under_its_legacy_name() -> None:
    """Otherwise the import system would load a second copy of the module under the old name."""
    names = [
        (old + module.__name__.removeprefix(mirror.__name__), module.__name__)
        for old, mirror in MIRRORS.items()
        for module in submodules_of(mirror)
    ]
    assert ("torch.distributed.pipeline.sync.pipe", "penstock.compat.torch_sync.pipe") in names
    assert ("fairscale.nn.pipe.balance", "penstock.compat.fairscale.nn.pipe.balance") in names
    python(
        "-c",
        "import importlib, penstock.compat\n"
        "penstock.compat.install()\n"
        "penstock.compat.install()\n"
        f"for old, new in {names}:\n"
        "    assert importlib.import_module(old) is importlib.import_module(new), old\n"
        # two names that were modules in the original library
        "import torch.distributed.pipeline, torchgpipe\n"
        "assert torch.distributed.pipeline.sync.Pipe\n"
        "from torchgpipe.skip.skippable import Skippable, skippable\n"
        "from torchgpipe.skip.namespace import Namespace\n"
        "assert torchgpipe.skip.skippable is skippable\n",
    )


def test_install_keeps_an_installed_library_unless_forced(tmp_path: Path) -> None:
    package = tmp_path / "torchgpipe"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    (package / "worker.py").write_text("")
    python(
        "-c",
        "import sys, penstock.compat\n"
        "penstock.compat.install()\n"
        "import fairscale, torchgpipe.worker\n"
        "assert torchgpipe.real\n"
        "assert fairscale.__name__ == 'penstock.compat.fairscale'\n"
        "penstock.compat.install(force=True)\n"
        "from torchgpipe import GPipe\n"
        "assert GPipe.__module__ == 'penstock.compat.torchgpipe.gpipe'\n"
        "assert 'torchgpipe.worker' not in sys.modules\n",
        path=tmp_path,
    )


def test_compat_command_says_which_library_runs_and_looks_beside_the_script(tmp_path: Path) -> None:
    package = tmp_path / "torchgpipe"
    package.mkdir()
    (package / "__init__.py").write_text("GPipe = 'real'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, torchgpipe\nprint(torchgpipe.GPipe, sys.argv[1:])\n")
    for force, said, output in (
        ([], "torchgpipe: the installed library runs (", "real ['--force', 'x']"),
        (["--force"], "torchgpipe, fairscale: Penstock runs", "<class 'penstock.compat."),
    ):
        ended = python("-m", "penstock.compat", *force, str(script), "--force", "x")
        assert said in ended.err
        assert ended.out.startswith(output)


def test_importing_compat_does_not_import_torch() -> None:
    code = "import sys, penstock.compat; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compat_command_line_help() -> None:
    assert "script" in python("-m", "penstock.compat", "--help").out
