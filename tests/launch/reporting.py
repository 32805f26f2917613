"""What a rank does in the tests of `penstock.init`: join, add up, and say what it found.

    reporting.py [dp=2] [fails=1] [twice] [before]

dp=2      two pipes
fails=1   that rank ends at its first start, and the launcher starts all of them again
twice     init is called again
before    the user has made the group
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import penstock


def main() -> None:
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if "before" in given:
        dist.init_process_group("gloo")
    mesh = penstock.init(dp=int(given.get("dp", 1)))
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    found = {
        "rank": dist.get_rank(),
        "dims": mesh.mesh_dim_names,
        "mesh": mesh.mesh.tolist(),
        "device": mesh.device_type,
        "total": total.item(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "backend": dist.get_backend(),
    }
    if given.get("fails") == str(dist.get_rank()) and restarts == 0:
        os._exit(3)
    if "twice" in given:
        penstock.init()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
