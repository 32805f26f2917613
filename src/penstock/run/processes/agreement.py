"""Before anything moves, the ranks agree on what they are about to do.

Each tells a hash of its facts to all. If they differ, the facts themselves are told, and every rank
raises the same error, which says how.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import RemoteError
from penstock.run.processes.peers import Peers

Facts = Mapping[str, str]


@dataclass(frozen=True)
class Agreed:
    """What came of it."""

    seed: int  # the first rank's
    key: str  # the same as in another call where all facts were the same, on every rank


def agree(
    peers: Peers,
    call: str,
    facts: Facts,
    sample: Facts | None = None,
    own: str = "",
    seed: int = 0,
) -> Agreed:
    """Raise unless the facts of all ranks are the same, and the samples of their data.

    What is a rank's `own` may differ, and counts for the key. A sample does not.
    """
    told = {"the call": call, **facts}
    mine = [_number(told), _number(sample or {}), _number(own), seed]
    found = peers.exchange(torch.tensor(mine, dtype=torch.int64), f"agreement on {call}")
    rows: list[list[int]] = [row.tolist() for row in found]
    if any(row[:2] != rows[0][:2] for row in rows):
        texts = peers.texts(json.dumps({**told, **(sample or {})}), f"the facts of {call}")
        raise disagreement(call, [json.loads(text) for text in texts])
    key = hashlib.sha256(repr([_number(facts), [row[2] for row in rows]]).encode()).hexdigest()
    return Agreed(rows[0][3], key)


def _number(value: Facts | str) -> int:
    """A hash of 63 bits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def disagreement(call: str, told: Sequence[Facts]) -> RemoteError:
    """An error that lists every fact in which ranks differ.

    >>> print(disagreement("step 3", [{"chunks": "4"}, {"chunks": "4"}, {"chunks": "8"}]))
    the ranks disagree about step 3, and nothing was sent:
      chunks: 4 on rank 0, 1; 8 on rank 2
    """
    problems = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            said = (f"{v} on rank {', '.join(map(str, where))}" for v, where in ranks.items())
            problems.append(f"{name}: {'; '.join(said)}")
    head = f"the ranks disagree about {call}, and nothing was sent:"
    return RemoteError("\n".join([head, *(f"  {p}" for p in problems)]), "disagreed")


def sampled(tensors: Sequence[Tensor]) -> Facts:
    """A few numbers of each that is on the host: batches that differ are told apart by them."""
    found = {}
    for at, tensor in enumerate(tensors):
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_sparse:
            found[f"some numbers of tensor {at}"] = str(_some(tensor.detach()))
    return found


def _some(tensor: Tensor) -> list[float]:
    count = tensor.numel()
    places = torch.tensor(sorted({count * part // 8 for part in range(8)}))
    where = torch.unravel_index(places, tensor.shape) if tensor.dim() else ()
    return tensor[where].flatten().tolist()
