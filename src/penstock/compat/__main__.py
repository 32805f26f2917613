"""`python -m penstock.compat script.py args...`: run a script, with the old imports alive."""

from __future__ import annotations

import argparse

from penstock.compat import run_script

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m penstock.compat",
        description="Run a script that imports torch.distributed.pipeline.sync, torchgpipe or "
        "fairscale.nn.Pipe, unchanged.",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an old library that is installed, too"
    )
    parser.add_argument("script", help="the script's file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script")
    arguments = parser.parse_args()
    run_script(arguments.script, arguments.arguments, force=arguments.force)
