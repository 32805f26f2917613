"""`penstock.init` under real launchers: on one host, after restarts, and on two hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RunError
from penstock.launch.init import init, open_store
from penstock.launch.torchrun_env import RankEnv
from tests.distributed.ranks import ranks
from tests.launch.hosts import (
    TORCHRUN,
    Ended,
    Host,
    end,
    environment,
    free_port,
    rank_environment,
    run,
    start,
    start_on,
    two_hosts,
)

SCRIPT = str(Path(__file__).parent / "init_script.py")


def reports(*ended: Ended) -> dict[int, dict[str, Any]]:
    """Return the report of each rank."""
    for one in ended:
        assert one.code == 0, one.err
    found = [json.loads(line) for one in ended for line in one.out.splitlines()]
    return {report["rank"]: report for report in found}


def test_init_under_torchrun_prints_nothing() -> None:
    # Without a port, two of these commands at once would use the same one.
    words = [*TORCHRUN, "--master-port", free_port(), "--nproc-per-node", "2", SCRIPT]
    ended = run(words, environment(OMP_NUM_THREADS="1"))
    assert ended.err == ""
    found = reports(ended)
    assert sorted(found) == [0, 1]
    for report in found.values():
        assert report["dims"] == ["pp"]
        assert report["mesh"] == [0, 1]
        assert (report["device"], report["backend"]) == ("cpu", "gloo")
        assert report["total"] == 1.0
        assert report["interface"] == "lo"


def mesh_of_replicas() -> tuple[Any, list[list[int]]]:
    mesh = init(dp=2)
    return mesh.mesh_dim_names, mesh.mesh.tolist()


def test_init_gives_consecutive_ranks_to_a_replica() -> None:
    assert ranks(4).run(mesh_of_replicas) == [(("dp", "pp"), [[0, 1], [2, 3]])] * 4


def test_init_without_torchrun_keeps_the_store_until_the_last_rank_exits() -> None:
    """As with mpirun or srun, only environment variables are set, and rank 0 serves the store."""
    port = free_port()
    words = [TORCHRUN[0], SCRIPT]
    ended = end([start(words, rank_environment(rank, 2, port)) for rank in range(2)])
    assert [one.err for one in ended] == ["", ""]
    assert sorted(reports(*ended)) == [0, 1]


ALONE = """
import torch.distributed as dist, penstock
dist.init_process_group("gloo")
assert penstock.init().mesh.tolist() == [0]   # the group is the user's
assert penstock.init().mesh.tolist() == [0]
dist.destroy_process_group()
assert penstock.init().mesh.tolist() == [0]   # now it is its own
penstock.init()
"""


def test_init_twice_is_refused_unless_the_user_made_the_group() -> None:
    ended = run([sys.executable, "-c", ALONE], rank_environment(0, 1, free_port()))
    assert ended.code == 1
    *_, last = ended.err.strip().splitlines()
    assert last.endswith(
        "RunError: penstock.init() was already called in this process. Keep the mesh that it "
        "returned."
    )


# ---- two hosts ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def test_init_on_two_hosts_with_a_restart(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The name of each host resolves to loopback, and the restart counts of the hosts differ."""
    words = [SCRIPT, str(tmp_path / "once")]
    ended = end(start_on(hosts, words, environment()))
    found = reports(*ended)
    assert [report["restarts"] for _, report in sorted(found.items())] == [0, 1]
    for report in found.values():
        assert report["interface"] == "eth0"
        assert report["total"] == 1.0


def test_unreachable_store_is_named_in_the_error() -> None:
    port = int(free_port())
    seat = RankEnv(1, 2, 1, 2, "localhost", port, launcher_has_store=True)
    with pytest.raises(RunError, match=rf"rank 1 on .* at localhost:{port} within 0.5 s\. Check"):
        open_store(seat, 0.5)


def test_rank_0_opens_a_store_without_waiting_for_others() -> None:
    port = int(free_port())
    seat = RankEnv(0, 3, 0, 3, "localhost", port, launcher_has_store=False)
    open_store(seat, 5.0).set("a", "b")
