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
_SAMPLES = [f"some numbers of tensor {at}" for at in range(8)]  # of the first that were given


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
    told, samples = {"the call": call, **facts}, sample or {}
    some = [numbered(samples[name]) if name in samples else 0 for name in _SAMPLES]
    mine = [numbered(told), numbered(own), seed, *some]
    found = peers.exchange(torch.tensor(mine, dtype=torch.int64), f"agreement on {call}")
    rows: list[list[int]] = [row.tolist() for row in found]
    seen = [{row[3 + at] for row in rows} - {0} for at in range(len(_SAMPLES))]
    if any(row[0] != rows[0][0] for row in rows) or any(len(hashes) > 1 for hashes in seen):
        texts = peers.texts(json.dumps({**told, **samples}), f"the facts of {call}")
        raise disagreement(call, [json.loads(text) for text in texts], peers.word)
    key = hashlib.sha256(repr([numbered(facts), [row[1] for row in rows]]).encode()).hexdigest()
    return Agreed(rows[0][2], key)


def numbered(value: Facts | str) -> int:
    """A hash of 63 bits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def disagreement(call: str, told: Sequence[Facts], word: str = "rank") -> RemoteError:
    """An error that lists every fact in which ranks differ, or whatever the word for them is.

    >>> print(disagreement("step 3", [{"chunks": "4"}, {"chunks": "4"}, {"chunks": "8"}]))
    the ranks disagree about step 3, and nothing was sent:
      chunks: 4 on rank 0, 1; 8 on rank 2
    """
    problems = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            if name in facts or name not in _SAMPLES:
                ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            said = (f"{v} on {word} {', '.join(map(str, where))}" for v, where in ranks.items())
            problems.append(f"{name}: {'; '.join(said)}")
    plural = {"rank": "ranks", "copy": "copies"}[word]
    head = f"the {plural} disagree about {call}, and nothing was sent:"
    return RemoteError("\n".join([head, *(f"  {p}" for p in problems)]), "disagreed")


def sampled(tensors: Sequence[Tensor]) -> Facts:
    """A few numbers of tensors that are on the host: batches that differ are told apart by them.

    What is on a device would have to be waited for; ranks that have it elsewhere are not compared.
    """
    return {
        name: str(_some(tensor.detach()))
        for name, tensor in zip(_SAMPLES, tensors, strict=False)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided
    }


def _some(tensor: Tensor) -> list[float]:
    """Eight at equal distances, or all; the same ones, however they stand in memory."""
    step = max(1, tensor.numel() // 8)
    if tensor.is_contiguous():
        return tensor.view(-1)[: 8 * step : step].tolist()
    places = torch.arange(0, min(8 * step, tensor.numel()), step)
    return tensor[torch.unravel_index(places, tensor.shape)].tolist()
