"""Weights and optimizer states of a whole model, when each process has a part of it.

Frameworks write one checkpoint file in one process, with parameters by name and optimizer states by
number. These functions gather that from the ranks of a pipe, and select from it what a rank needs:

    rank 0          rank 1                      in the file
    0 embed         0 layers.1                  embed, layers.0, layers.1, head
    1 layers.0      1 head                      states 0 to 3, as of the unsplit model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ArgumentError, RunError
from penstock.integrations.piped_module import PREFIX, PipedModule
from penstock.pipe import Pipe


def gather_on_first_rank(pipe: Pipe, entries: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the entries of all ranks of a pipe, on the first process. Others get an empty dict.

    If replicas or ranks have the same entry, that of the lowest rank is taken. Each rank sends one
    entry at a time, so that only the first process holds all of them.
    """
    channel = pipe._engine.get_checkpoint_peers().channel
    gathered: dict[str, Any] = {}
    with pipe._engine.guarded_slow_call(f"gathering {what}"):
        names = channel.all_gather_value(sorted(entries), f"the names of its {what}")
        owners: dict[str, int] = {}
        for rank, rank_names in enumerate(names):
            for name in rank_names:
                owners.setdefault(name, rank)
        sent = [[n for n in names[rank] if owners[n] == rank] for rank in range(len(names))]
        for index in range(max(map(len, sent))):
            own_names = sent[channel.rank][index : index + 1]
            received = channel.all_gather_value([entries[name] for name in own_names], what)
            if channel.rank == 0:
                for rank, values in enumerate(received):
                    gathered.update(zip(sent[rank][index : index + 1], values, strict=True))
    return gathered


def gather_state_dict(piped: PipedModule) -> dict[str, Any]:
    """Return the state dict of the unsplit module: on the first process, if there are several."""
    own_state: dict[str, Any] = piped.module.state_dict()
    if not piped.is_partial:
        return own_state
    assert piped.pipe is not None
    local = {
        name.removeprefix(PREFIX): value
        for name, value in piped.pipe.state_dict().items()
        if isinstance(value, Tensor)
    }
    gathered = gather_on_first_rank(piped.pipe, local, "parameters")
    if not gathered:
        return {}
    state = {name: gathered.get(name, value) for name, value in own_state.items()}
    missing = [name for name, v in state.items() if isinstance(v, Tensor) and v.is_meta]
    if missing:
        raise RunError(f"no rank has the parameter {missing[0]}, so it cannot be saved.")
    return state


def load_state_dict(piped: PipedModule, state: Mapping[str, Any], strict: bool) -> None:
    """Load the state dict of the unsplit module. Each process takes what it has."""
    piped.module.load_state_dict(state, strict=strict)
    if piped.is_partial:
        assert piped.pipe is not None
        named = {f"{PREFIX}{name}": value for name, value in state.items()}
        own_names = piped.pipe.state_dict().keys()
        piped.pipe.load_state_dict({k: v for k, v in named.items() if k in own_names}, strict=False)


class PartialOptimizers:
    """The optimizers of a program, of which each rank keeps the parameters that it has.

    An optimizer is made for the whole module, before the module is split.
    """

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        # The numbers of the parameters that are left, in the optimizer of the unsplit module.
        self._numbers: dict[int, list[list[int]]] = {}
        self._sizes: dict[int, list[int]] = {}

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember optimizers for `select`."""
        watched_ids = set(map(id, self._optimizers))
        self._optimizers += (o for o in optimizers if id(o) not in watched_ids)

    def clear(self) -> None:
        """Forget all optimizers."""
        self._optimizers, self._numbers, self._sizes = [], {}, {}

    def select(self, piped: PipedModule) -> None:
        """Remove the parameters of other ranks, and move states to where their parameters are."""
        remote = {id(parameter) for parameter in piped.list_remote_parameters()}
        for optimizer in self._optimizers:
            if remote:
                self._select(optimizer, remote)
            if optimizer.state:  # of a checkpoint that was read before the stages were placed
                optimizer.load_state_dict(optimizer.state_dict())

    def _select(self, optimizer: Optimizer, remote: set[int]) -> None:
        numbers = self._numbers.get(id(optimizer))
        if numbers is None:
            numbers, start = [], 0
            for group in optimizer.param_groups:
                numbers.append(list(range(start, start + len(group["params"]))))
                start += len(group["params"])
            self._sizes[id(optimizer)] = [len(group) for group in numbers]
        for index, group in enumerate(optimizer.param_groups):
            pairs = [
                (parameter, number)
                for parameter, number in zip(group["params"], numbers[index], strict=True)
                if id(parameter) not in remote
            ]
            for parameter in group["params"]:
                if id(parameter) in remote:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter, _ in pairs]
            numbers[index] = [number for _, number in pairs]
        self._numbers[id(optimizer)] = numbers

    def gather(self, optimizer: Optimizer, piped: PipedModule | None) -> dict[str, Any]:
        """Return the state dict of the optimizer of the unsplit module, on the first process."""
        state: dict[str, Any] = optimizer.state_dict()
        if id(optimizer) not in self._numbers or piped is None or piped.pipe is None:
            return state
        numbers = [n for group in self._numbers[id(optimizer)] for n in group]
        local = {str(numbers[index]): value for index, value in state["state"].items()}
        gathered = gather_on_first_rank(piped.pipe, local, "optimizer states")
        start, groups = 0, []
        for group, size in zip(state["param_groups"], self._sizes[id(optimizer)], strict=True):
            groups.append({**group, "params": list(range(start, start + size))})
            start += size
        states = {int(number): value for number, value in gathered.items()}
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def load(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the state dict of the optimizer of the unsplit module."""
        selected = self._numbers.get(id(optimizer))
        if selected is None:
            optimizer.load_state_dict(dict(state))
            return
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != self._sizes[id(optimizer)]:
            raise ArgumentError(
                f"the checkpoint has optimizer states for groups of {sizes} parameters, but the "
                f"optimizer has groups of {self._sizes[id(optimizer)]}. Load a checkpoint of the "
                "same model and optimizer."
            )
        numbers = [n for group in selected for n in group]
        start, groups = 0, []
        for group, chosen in zip(state["param_groups"], selected, strict=True):
            groups.append({**group, "params": list(range(start, start + len(chosen)))})
            start += len(chosen)
        states = {i: state["state"][n] for i, n in enumerate(numbers) if n in state["state"]}
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
