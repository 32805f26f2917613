"""How a call begins: the ranks agree on what is about to be done, and every rank has its data.

With data="first", what stages of a Sequential take is carried to their ranks. Of a whole forward
every rank must know how it is divided, which may depend on all inputs: it gets the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import Chunk, NoChunk
from penstock.errors import RunError
from penstock.partition.forward.whole import Whole
from penstock.partition.split import Split
from penstock.run.asking import Settings
from penstock.run.feed import Batch, Fed, feed
from penstock.run.passage import tensors_by_cell
from penstock.run.processes.agreement import Facts, agree, sampled
from penstock.run.processes.opening import (
    Announcement,
    facts_of_data,
    layout_of,
    own_state,
    tensors_in,
)
from penstock.run.processes.peers import Peers
from penstock.run.processes.sharing import Sharing
from penstock.run.processes.team import Team
from penstock.run.processes.wire import Learned
from penstock.stage.randomness import next_seed


@dataclass(frozen=True)
class Opened:
    """A call that all ranks have agreed on."""

    fed: Fed
    facts: Facts  # that do not depend on the data
    announced: Announcement
    learned: Learned
    seed: int
    key: str
    first: bool  # call of its kind


class Beginning:
    """Of the calls of one rank."""

    def __init__(self, team: Team, split: Split, sharing: Sharing) -> None:
        self._team, self._split, self._sharing = team, split, sharing
        self._whole = isinstance(split.partition.how, Whole)
        self._first = split.placement[0]

    @property
    def carries(self) -> bool:
        """Are inputs carried from the first stage's rank to those whose stages take them?"""
        return self._sharing.data == "first" and not self._whole

    def opened(self, name: str, settings: Settings, batch: Batch, facts: Facts, own: str) -> Opened:
        """Agree; then every rank knows the sizes of it all."""
        modules = [m for stage in self._split.stages_here for m in stage.modules()]
        own += own_state(modules)
        if self.carries:
            return self._carried(name, settings, batch, facts, own)
        general, seed = facts, next_seed()
        if self._sharing.data == "first":
            seed = agree(self._team.peers, name, facts, own=own, seed=seed).seed
            batch = spread(self._team.peers, self._first, batch, f"the data of {name}")
        fed = feed(self._split.partition, settings.chunks, batch, self._feeding)
        if self._whole and self._sharing.data == "first":
            self._check_gradients(fed)
        facts = {**facts, **facts_of_data(batch)}
        if fed.divided:
            facts["how the forward is divided"] = fed.divided
        sample = sampled(tensors_in(batch))
        agreed = agree(self._team.peers, name, facts, sample, own + layout_of(batch), seed)
        learned, first = self._learned(agreed.key)
        announced = Announcement.of(fed, bool(batch.target) or fed.counting is not None)
        return Opened(fed, general, announced, learned, agreed.seed, agreed.key, first)

    def _carried(
        self, name: str, settings: Settings, batch: Batch, facts: Facts, own: str
    ) -> Opened:
        """The first stage's rank alone cuts the batch, and tells what others need to know."""
        fed, text = None, None
        own += layout_of(batch)
        if self._first == self._team.rank:
            fed = feed(self._split.partition, settings.chunks, batch, self._feeding)
            own += str(facts_of_data(batch))
            text = Announcement.of(fed, bool(batch.target)).dumps()
        agreed = agree(self._team.peers, name, facts, None, own, next_seed())
        learned, first = self._learned(agreed.key)
        if not learned.announcement:
            told = self._team.peers.told(self._first, text, f"the data of {name}")
            learned.announcement = told
        announced = Announcement.loads(learned.announcement)
        graph = self._split.partition.graph
        fed = fed or Fed({}, announced.rows, announced.chunks, graph)
        return Opened(fed, facts, announced, learned, agreed.seed, agreed.key, first)

    def _learned(self, key: str) -> tuple[Learned, bool]:
        """What is known of calls of this kind; whether this is the first."""
        remembered = self._team.learned(key)
        sent = self._sharing.shapes == "sent"
        return Learned() if sent else remembered, not remembered.known

    def _feeding(self, stage: int) -> torch.device | None:
        """Where this rank feeds a stage; what it carries to others goes from the host."""
        if self._split.is_here(stage):
            return self._team.place.device
        return torch.device("cpu") if self.carries else None

    def _check_gradients(self, fed: Fed) -> None:
        """Whoever was not given the data cannot give its gradient back."""
        here = self._split.placement
        for (stage, _), tensors in tensors_by_cell(fed.given).items():
            if here[stage] != self._first and any(t.requires_grad for t in tensors):
                raise RunError(
                    f"with data='first', an input that wants a gradient is used on stage {stage}, "
                    f"in the process of rank {here[stage]}, from where no gradient comes back: "
                    "detach it, or give the data on all ranks (data='all')"
                )


def spread(peers: Peers, by: int, batch: Batch, what: str) -> Batch:
    """One rank's batch, on all."""
    told: Any = None
    if peers.rank == by:
        marks: list[Any] = []
        learns: list[bool] = []

        def bare(leaf: Any) -> Any:
            marks.append(_mark(leaf))
            found = leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf
            learns.append(isinstance(found, Tensor) and found.requires_grad)
            return found

        values = pytree.tree_map(bare, (batch.inputs, dict(batch.side), batch.target))
        told = [values, marks, learns]
    values, marks, learns = peers.value(by, told, what)
    if peers.rank == by:
        return batch
    leaves, spec = pytree.tree_flatten(values)
    marked = [_marked(*each) for each in zip(leaves, marks, learns, strict=True)]
    inputs, side, target = pytree.tree_unflatten(marked, spec)
    assert isinstance(side, Mapping)
    return Batch(inputs, side, target, batch.scores_itself)


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, NoChunk):
        return "whole"
    return leaf.dim if isinstance(leaf, Chunk) else None


def _marked(leaf: Any, mark: Any, learns: bool) -> Any:
    if learns:
        leaf = leaf.detach().requires_grad_()
    if mark is None:
        return leaf
    return NoChunk(leaf) if mark == "whole" else Chunk(leaf, mark)
