"""Tests of micro-batches of other sizes: they are traced without running units, and are exact."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.model.huggingface import build_default_kwargs
from penstock.model.traced import traced_partition
from penstock.model.traced.trace import Trace, TraceNode
from penstock.model.traced.trace_family import TraceFamily, differ_in_sizes_only, find_padding
from penstock.model.traced.trace_model import derive_trace, trace_model
from penstock.model.traced.traced_partition import TracedPartition
from penstock.model.traced.unit_shapes import SizesDiffer, learn_unit_shapes
from penstock.runtime.audit.auditor import Auditor
from penstock.torch_compat import SymbolicSizes
from tests.model.traced.splitting import Four, assert_same, batches, made, piped
from tests.models.comparing import Exhibited, trials
from tests.models.exhibits import ZOO

LENGTHS = (5, 7, 6, 9, 12, 5, 11)


def _fixes_sizes() -> bool:
    """Return whether a matrix product fixes symbolic sizes, as it does before PyTorch 2.13."""
    sizes = SymbolicSizes()
    _, size = sizes.create(5)
    with sizes.mode:
        product = torch.empty(size, 2, 3, 4) @ torch.empty(size, 2, 4, 3)
    return isinstance(sizes.to_expression(product.shape[0]), int)


# Every size is traced in full then.
needs_symbolic_products = pytest.mark.skipif(
    _fixes_sizes(), reason="this release of PyTorch fixes symbolic sizes in matrix products"
)


class Plain(Four):
    """Does the same for every size."""

    def forward(self, x: Tensor) -> Any:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(x))))))


class Attention(nn.Module):
    """A unit with a mask of all pairs of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, length: int) -> tuple[Tensor, int]:
        weights = (x @ x.transpose(1, 2) / length).masked_fill(mask, -1e9).softmax(-1)
        return self.linear(weights @ x), 2 * length


class Masked(nn.Module):
    """Passes a mask and a number to its units, which return a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            y, double = block(x, mask, x.shape[1])
            x = x + y * double
        return x


class Unit(nn.Module):
    """A linear layer, and something else that depends on the length."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.change(x))


def _scale_if_long(x: Tensor) -> Any:
    return 2 * x if x.shape[1] > 8 else x


def _write_if_long(x: Tensor) -> Tensor:
    return x.mul_(2) if x.shape[1] > 8 else x * 1


def _take_every_other(x: Tensor) -> Tensor:
    return x[:, ::2] + x[:, -1:].sum(1, keepdim=True)


def _sum_in_a_loop(x: Tensor) -> Any:
    return x + sum(x[:, n : n + 1] for n in range(x.shape[1]))


def _cut_in_the_square(x: Tensor) -> Any:
    return (x @ x.transpose(1, 2)).flatten(1)[:, : 4 * x.shape[1]].unflatten(1, (-1, 4))


class Changing(nn.Module):
    """Four units, one of which depends on the length."""

    change: Any = staticmethod(_scale_if_long)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(4, 4) for _ in range(3))
        self.b = Unit(type(self).change)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y)
        return self.d(self.c(z)) + y.mean(1, keepdim=True)


class Writing(Changing):
    change = staticmethod(_write_if_long)


class Halving(Changing):
    change = staticmethod(_take_every_other)


class Looping(Changing):
    change = staticmethod(_sum_in_a_loop)


class Squaring(Changing):
    change = staticmethod(_cut_in_the_square)


class BranchAround(Four):
    """Takes another path around its units for long inputs."""

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        if x.shape[1] > 8:
            x = x[:, : x.shape[1] // 2] + x[:, :1]
        return self.d(self.c(x))


@lru_cache
def _positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)[:, None] / 8


class CachedPositions(Four):
    """Calls a function that computes once for each length."""

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(x) + _positions(x.shape[1]))))


class Normed(Four):
    """Has units with buffers that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.norm(self.b(self.a(x)).transpose(1, 2)).transpose(1, 2)))


class InPlaceAround(Four):
    """Changes outputs of units in place, between units."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        y += 1
        y[:, : x.shape[1] // 2] *= 2
        return self.d(self.c(self.b(y)))


KINDS = [Plain, Masked, Changing, Writing, Halving, Looping, Squaring, BranchAround, Normed]
KINDS += [CachedPositions, InPlaceAround]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_seven_lengths_equal_the_unsplit_model(kind: type[nn.Module]) -> None:
    assert_same(kind, LENGTHS, cuts=((2, "inline"), (4, "threads")))


@pytest.fixture
def full_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each micro-batch that is traced with its units."""
    lengths: list[int] = []

    def count_traces(model: Any, units: Any, args: Any, kwargs: Any, device: Any) -> Any:
        lengths.append(args[0].shape[1])
        return trace_model(model, units, args, kwargs, device)

    monkeypatch.setattr(traced_partition, "trace_model", count_traces)
    return lengths


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Plain, [7]),
        pytest.param(Masked, [7], marks=needs_symbolic_products),
        (Halving, [7]),
        (Changing, [7, 9, 12, 11]),  # the condition "at most 8" does not hold
        (Looping, [7, 6, 9, 12, 11]),
    ],
)
def test_units_run_for_the_first_two_lengths_alone_unless_they_ask_for_it(
    kind: type[nn.Module], wanted: list[int], full_traces: list[int]
) -> None:
    given = batches(*LENGTHS)
    pipe = piped(made(kind), given[0], 2)
    for batch in given:
        pipe.step(batch)
    assert full_traces == wanted


def test_other_batch_sizes_are_learned_after_other_lengths(full_traces: list[int]) -> None:
    pipe = piped(made(Plain), batches(5)[0], 2)
    for rows, length in ((4, 5), (4, 7), (8, 6), (8, 9), (12, 3), (16, 4)):
        pipe.step(torch.ones(rows, length, 4, dtype=torch.float64))
    assert full_traces == [7, 6]


def test_micro_batches_of_one_batch_do_not_count_as_two_sizes() -> None:
    """An uneven batch would otherwise pay for symbols that it has no use for."""
    pipe = piped(made(Plain), batches(5)[0], 2)
    family = next(iter(_partition(pipe)._memory.families.values()))
    family.references.clear()
    pipe.step(torch.ones(5, 6, 4, dtype=torch.float64))  # 3 rows and 2 rows
    assert [call for call, _, _ in family.references] == [1, 1]
    assert family.attempts == 0


@pytest.mark.parametrize("change", ["attribute", "hook", "requires_grad"])
def test_a_changed_unit_is_run_again(change: str, full_traces: list[int]) -> None:
    model = made(Changing)
    pipe = piped(model, batches(5)[0], 2)
    for batch in batches(5, 7, 6):
        pipe.step(batch)
    assert full_traces == [7]
    if change == "attribute":
        model.b.change = _take_every_other  # type: ignore[union-attr]
    elif change == "hook":
        model.b.register_forward_hook(lambda module, args, output: output[:, 1:])  # type: ignore[union-attr]
    else:
        model.b.linear.weight.requires_grad_(False)  # type: ignore[union-attr]
    pipe.step(batches(8)[0])
    assert full_traces == [7, 8]


def test_a_length_of_one_is_traced_in_full(full_traces: list[int]) -> None:
    """PyTorch's symbols stand for sizes of at least two: a size of one is broadcast."""
    given = batches(5, 7, 1, 6)
    pipe = piped(made(Plain), given[0], 2)
    for batch in given:
        pipe.step(batch)
    assert full_traces == [7, 1]


@needs_symbolic_products
def test_a_length_that_differs_in_sizes_only_is_not_audited_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audited: list[Any] = []
    note_audited = Auditor.note_audited

    def count_audits(auditor: Auditor, kind: Any, sizes: Any = None) -> None:
        audited.append(kind)
        note_audited(auditor, kind, sizes)

    monkeypatch.setattr(Auditor, "note_audited", count_audits)
    for kind, wanted in ((Masked, 2), (Changing, 4)):
        audited.clear()
        given = batches(5, 7, 6, 9, 12)
        pipe = piped(made(kind), given[0], 2)
        pipe.audit = "first"
        for batch in given:
            pipe.step(batch)
        assert len(set(audited)) == wanted


# ---- advice ---------------------------------------------------------------------------------


def test_lengths_that_keep_changing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    given = batches(5, 7, 6, 30, 12, 11, 13)
    pipe = piped(made(Looping), given[0], 2)
    with caplog.at_level(logging.WARNING, "penstock"):
        for batch in given:
            pipe.step(batch)
    told = [record.getMessage() for record in caplog.records if "keep changing" in record.msg]
    assert len(told) == 1
    assert "Pad dim 1 of input 0 (now 5 to 30) to a multiple of 8" in told[0]


def test_few_sizes_need_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    """It was to pad to a multiple of 1."""
    given = batches(5, 7, 6, 8, 5, 7)
    pipe = piped(made(Looping), given[0], 2)
    with caplog.at_level(logging.WARNING, "penstock"):
        for batch in given:
            pipe.step(batch)
    assert not any("keep changing" in record.msg for record in caplog.records)


def test_a_dim_of_two_sizes_needs_no_advice() -> None:
    shapes: list[tuple[tuple[int, ...], ...]]
    shapes = [((4, 10),), ((64, 11),), ((4, 13),), ((64, 30),)]
    advice = TraceFamily(input_shapes=shapes).describe_changes(["input 0"])
    assert advice == "dim 1 of input 0 (now 10 to 30) to a multiple of 8"


@pytest.mark.parametrize(
    ("least", "largest", "wanted"), [(5, 8, 1), (5, 30, 8), (17, 93, 32), (1, 2048, 512)]
)
def test_padding_leaves_at_most_four_sizes(least: int, largest: int, wanted: int) -> None:
    assert find_padding(least, largest) == wanted
    assert len({-(-size // wanted) for size in range(least, largest + 1)}) <= 4


# ---- the zoo ----------------------------------------------------------------------------------

LEARNED = """
    nanoGPT; encoder-decoder, tied; Llama (transformers); BERT (transformers);
    ConvNeXt (transformers)
"""
UNLEARNED = "ViT; mixture of experts; LSTM stack; hooks"
if "PENSTOCK_SOAK" in os.environ:  # `make zoo`
    LEARNED += "; GPT-2 (transformers); T5 (transformers); Gemma 3 text (transformers)"
    UNLEARNED += "; U-Net; ResNet; features by hooks; in-place glue"
NAMES = [" ".join(name.split()) for name in f"{LEARNED};{UNLEARNED}".split(";")]


@needs_symbolic_products
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_without_units_is_the_trace_with_them(name: str) -> None:
    """Four sizes of inputs and four numbers of rows. What cannot be learned is traced in full."""
    architecture = ZOO[name]
    partition = _partition(Exhibited(architecture).piped(trials(0)[0]))
    least, other = architecture.sizes

    def trace(rows: int, size: int, shapes: Any = None) -> Trace:
        batch = architecture.batch(rows, size)
        args, kwargs = ((), dict(batch)) if isinstance(batch, dict) else (tuple(batch), {})
        kwargs = {**build_default_kwargs(partition.model, kwargs), **kwargs}
        model, units, device = partition.model, partition.units, partition._device
        if shapes is None:
            return trace_model(model, units, args, kwargs, device)[0]
        parents = partition.parents.values()
        return derive_trace(model, units, parents, shapes, args, kwargs, device)[0]

    references = [trace(2, least), trace(2, other), trace(3, other)]
    shapes = learn_unit_shapes(partition.model, partition.units, references, partition._device)
    if " ".join(name.split()) in UNLEARNED:
        return
    assert shapes is not None
    step = other - least
    for rows, size in ((2, 2 * other), (5, other + 2 * step)):
        derived, full = trace(rows, size, shapes), trace(rows, size)
        assert [_describe(node) for node in derived.nodes] == [_describe(n) for n in full.nodes]
        assert derived.values == full.values
        assert (derived.inputs, derived.output) == (full.inputs, full.output)
        assert derived.metadata_reads == full.metadata_reads
        assert derived.unit_written_buffers == full.unit_written_buffers
        assert derived.attribute_reads == full.attribute_reads
        assert differ_in_sizes_only([*references, full])


def _describe(node: TraceNode) -> tuple[Any, ...]:
    output = None if node.output is None else (node.output.leaves, str(node.output.tree_spec))
    return (
        *(node.kind, node.func, node.inputs, node.literals, node.input_only, dict(node.mutations)),
        *(node.has_side_effect, node.uses_rng, node.is_guard, str(node.recorded_result)),
        *(node.hooked_values, node.changed_attributes, node.location, output),
    )


def _partition(pipe: Pipe) -> TracedPartition:
    partition = pipe._placed_partition.partition
    assert isinstance(partition, TracedPartition)
    return partition


def test_a_number_that_does_not_follow_a_size_makes_another_kind() -> None:
    class Threshold(Four):
        def forward(self, x: Tensor) -> Any:
            return self.d(self.c(self.b(self.a(x)))) * (3 if x.shape[1] > 8 else 1)

    pipe = piped(made(Threshold), batches(5)[0], 2)
    partition = _partition(pipe)

    def trace(length: int) -> Trace:
        args = (batches(length)[0][:2],)
        return trace_model(partition.model, partition.units, args, {}, partition._device)[0]

    assert differ_in_sizes_only([trace(5), trace(7), trace(6)])
    assert not differ_in_sizes_only([trace(5), trace(7), trace(9)])


def test_sizes_differ_is_raised_for_another_dtype() -> None:
    partition = _partition(piped(made(Plain), batches(5)[0], 2))
    model, units, device = partition.model, partition.units, partition._device
    traces = [trace_model(model, units, (b[:2],), {}, device)[0] for b in batches(5, 7)]
    shapes = learn_unit_shapes(model, units, traces, device)
    assert shapes is not None
    single = batches(6)[0][:2].float()
    with pytest.raises(SizesDiffer):
        derive_trace(model, units, partition.parents.values(), shapes, (single,), {}, device)
