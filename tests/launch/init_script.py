"""The script of a rank in the tests of `penstock.init`: join, all-reduce, and print what it found.

init_script.py [FILE]
FILE  rank 1 exits unless the file exists, and the launcher restarts all ranks
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import penstock


def main() -> None:
    fails = any(not Path(file).exists() for file in sys.argv[1:])
    mesh = penstock.init()
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    found = {
        "rank": dist.get_rank(),
        "dims": mesh.mesh_dim_names,
        "mesh": mesh.mesh.tolist(),
        "device": mesh.device_type,
        "total": total.item(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "backend": dist.get_backend(),
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    if fails:  # all ranks have checked for the file before the all-reduce
        if dist.get_rank() == 1:
            Path(sys.argv[1]).touch()
            os._exit(3)
        time.sleep(60)  # until the launcher ends this process
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
