"""Read the environment variables of torchrun, and choose the device and the network interface."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch

from penstock.errors import ArgumentError, RunError
from penstock.launch import init as launch
from penstock.launch import torchrun_env as reading
from penstock.launch.torchrun_env import (
    RankEnv,
    find_network_interface,
    is_launched,
    read_rank_env,
    select_device,
)

TORCHRUN_ENV = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}
HERE = RankEnv(5, 8, 1, 4, "first", 29500, launcher_has_store=False)


def test_read_rank_env() -> None:
    assert read_rank_env(TORCHRUN_ENV) == HERE
    assert read_rank_env(
        {**TORCHRUN_ENV, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).launcher_has_store
    assert is_launched(TORCHRUN_ENV)
    assert not is_launched({})
    assert not HERE.is_single_host
    assert HERE._replace(local_world_size=8).is_single_host


def test_missing_variables_are_named_with_the_torchrun_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["somewhere/my_script.py"])
    with pytest.raises(RunError) as raised:
        read_rank_env({**TORCHRUN_ENV, "RANK": "", "MASTER_PORT": ""})
    assert str(raised.value) == (
        "this process was not started by torchrun, which sets RANK, MASTER_PORT. "
        "Start it with  torchrun --nproc-per-node 2 my_script.py"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "8"), ("LOCAL_RANK", "4"), ("MASTER_PORT", "65536")]
)
def test_numbers_that_contradict_each_other_are_refused(name: str, value: str) -> None:
    with pytest.raises(RunError, match=f"contradict each other: .*{name}={value}"):
        read_rank_env({**TORCHRUN_ENV, name: value})
    read_rank_env({**TORCHRUN_ENV, name: str(int(value) - 1)})


def test_non_numeric_variables_are_named() -> None:
    with pytest.raises(RunError, match=r"not numbers: WORLD_SIZE=two, MASTER_PORT=-1\."):
        read_rank_env({**TORCHRUN_ENV, "WORLD_SIZE": "two", "MASTER_PORT": "-1"})


@pytest.mark.parametrize(
    ("dp", "message"),
    [
        *(
            (dp, f"dp must be a whole number of replicas from 1 up, not {dp}")
            for dp in (0, True, 2.0)
        ),
        (
            3,
            "8 ranks cannot form 3 pipelines of equal length. dp can be 1, 2, 4, 8; for dp=3 "
            "start 9 ranks.",
        ),
    ],
)
def test_init_refuses_invalid_dp_before_waiting_for_ranks(
    monkeypatch: pytest.MonkeyPatch, dp: object, message: str
) -> None:
    for name, value in TORCHRUN_ENV.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError) as raised:
        launch.init(dp)  # type: ignore[arg-type]
    assert str(raised.value) == message


# ---- devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "device"), [(0, "cpu"), (4, "cuda:1"), (1, "cuda:0"), (8, "cuda:1")]
)
def test_select_device_uses_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    """If only one GPU is visible, the rank takes it, whether it is the rank's own or shared."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert select_device(HERE) == torch.device(device)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b"], "cpu:gloo,cuda:nccl"),
        (["a", "a"], "gloo"),
        (["a", ""], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_nccl_is_chosen_only_if_every_rank_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], backend: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert launch.choose_backend(gpus) == backend
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert launch.choose_backend(gpus) == "gloo"


# ---- network interfaces -------------------------------------------------------------------


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fake three interfaces; return the address the host would send from for each destination."""
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.9.0.5"}
    routes: dict[str, str] = {"first": "10.9.0.5", reading._TEST_NET_ADDRESS: "10.0.0.5"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate([*addresses, "idle0"])))
    monkeypatch.setattr(reading, "_get_interface_address", addresses.get)
    monkeypatch.setattr(reading, "_find_source_address", routes.get)
    return routes


@pytest.mark.parametrize(
    ("routes", "ranks_here", "interface"),
    [
        ({}, 8, "lo"),  # one host
        ({}, 4, "ib0"),  # the route to rank 0
        ({"first": "127.0.1.1"}, 4, "eth0"),  # the host name resolves to loopback
        (None, 4, None),  # no route: gloo chooses
    ],
)
def test_network_interface(
    network: dict[str, str], routes: dict[str, str] | None, ranks_here: int, interface: str | None
) -> None:
    network.clear() if routes is None else network.update(routes)
    assert find_network_interface(HERE._replace(local_world_size=ranks_here)) == interface


def test_interface_detection_on_the_real_loopback() -> None:
    found = find_network_interface(HERE._replace(local_world_size=8))
    assert found is not None
    assert reading._get_interface_address(found) == "127.0.0.1"
    assert reading._find_source_address("127.0.0.1") == "127.0.0.1"
    assert reading._get_interface_address("none-such") is None


def test_gloo_interface_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    launch.set_gloo_interface(HERE._replace(local_world_size=8))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0"
