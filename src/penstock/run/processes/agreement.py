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
from penstock.run.processes.peers import ControlChannel

RankFacts = Mapping[str, str]
_SAMPLE_NAMES = [f"some numbers of tensor {at}" for at in range(8)]  # of the first that were given


@dataclass(frozen=True)
class Agreement:
    """What came of it."""

    seed: int  # the first rank's
    cache_key: str  # the same as in another call where all facts were the same, on every rank


def check_ranks_agree(
    channel: ControlChannel,
    call_name: str,
    facts: RankFacts,
    tensor_samples: RankFacts | None = None,
    local_state: str = "",
    seed: int = 0,
) -> Agreement:
    """Raise unless the facts of all ranks are the same, and the samples of their data.

    What is a rank's `own` may differ, and counts for the key. A sample does not.
    """
    told, samples = {"the call": call_name, **facts}, tensor_samples or {}
    some = [hash_facts(samples[name]) if name in samples else 0 for name in _SAMPLE_NAMES]
    mine = [hash_facts(told), hash_facts(local_state), seed, *some]
    found = channel.all_gather(torch.tensor(mine, dtype=torch.int64), f"agreement on {call_name}")
    rows: list[list[int]] = [row.tolist() for row in found]
    seen = [{row[3 + at] for row in rows} - {0} for at in range(len(_SAMPLE_NAMES))]
    if any(row[0] != rows[0][0] for row in rows) or any(len(hashes) > 1 for hashes in seen):
        texts = channel.all_gather_text(
            json.dumps({**told, **samples}), f"the facts of {call_name}"
        )
        raise build_disagreement_error(
            call_name, [json.loads(text) for text in texts], channel.member_name
        )
    key = hashlib.sha256(repr([hash_facts(facts), [row[1] for row in rows]]).encode()).hexdigest()
    return Agreement(rows[0][2], key)


def hash_facts(value: RankFacts | str) -> int:
    """A hash of 63 bits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def build_disagreement_error(
    call_name: str, facts_by_rank: Sequence[RankFacts], member_name: str = "rank"
) -> RemoteError:
    """An error that lists every fact in which ranks differ, or whatever the word for them is.

    >>> print(disagreement("step 3", [{"chunks": "4"}, {"chunks": "4"}, {"chunks": "8"}]))
    the ranks disagree about step 3, and nothing was sent:
      chunks: 4 on rank 0, 1; 8 on rank 2
    """
    problems = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            if name in facts or name not in _SAMPLE_NAMES:
                ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            said = (
                f"{v} on {member_name} {', '.join(map(str, where))}" for v, where in ranks.items()
            )
            problems.append(f"{name}: {'; '.join(said)}")
    plural = {"rank": "ranks", "copy": "copies"}[member_name]
    head = f"the {plural} disagree about {call_name}, and nothing was sent:"
    return RemoteError("\n".join([head, *(f"  {p}" for p in problems)]), "disagreed")


def sample_tensors(tensors: Sequence[Tensor]) -> RankFacts:
    """A few numbers of tensors that are on the host: batches that differ are told apart by them.

    What is on a device would have to be waited for; ranks that have it elsewhere are not compared.
    """
    return {
        name: str(_sample_values(tensor.detach()))
        for name, tensor in zip(_SAMPLE_NAMES, tensors, strict=False)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout is torch.strided
    }


def _sample_values(tensor: Tensor) -> list[float]:
    """Eight at equal distances, or all; the same ones, however they stand in memory."""
    step = max(1, tensor.numel() // 8)
    if tensor.is_contiguous():
        return tensor.view(-1)[: 8 * step : step].tolist()
    places = torch.arange(0, min(8 * step, tensor.numel()), step)
    return tensor[torch.unravel_index(places, tensor.shape)].tolist()
