from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from penstock import ArgumentError, BatchShapeError, Chunk, NoChunk, RunError
from penstock.microbatch import MicrobatchRows, check_inputs, gather, scatter

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: Tensor
    b: Any


def same(found: Any, expected: Any) -> bool:
    """Return whether two nested values are equal, comparing tensors by value."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    return bool(found == expected)


# ---- scatter ------------------------------------------------------------------------------


def cut(values: tuple[Any, ...], chunks: int) -> list[tuple[Any, ...]]:
    return scatter(values, chunks)[0]


@pytest.mark.parametrize("chunks", range(1, 8))
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17])
def test_scatter_cuts_like_torch_chunk(rows: int, chunks: int) -> None:
    x = torch.arange(rows)
    found = [piece for (piece,) in cut((x,), chunks)]
    assert list(map(Tensor.tolist, found)) == list(map(Tensor.tolist, x.chunk(chunks)))
    parts, how = scatter((x, "whole", x + 1), chunks)
    assert [len(a) for a, _, _ in parts] == [len(piece) for piece in found]
    assert how == MicrobatchRows(tuple(map(len, found)), 0) == scatter((x,), chunks)[1]


class Scaled(Tensor):
    """A tensor whose views have its attribute."""

    scale = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for piece in result if isinstance(result, tuple) else [result]:
            if isinstance(piece, Scaled) and isinstance(args[0], Scaled):
                piece.scale = args[0].scale
        return result


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("wrap", [lambda x: x, NoChunk, lambda x: Chunk(x, 0), lambda x: {"x": x}])
def test_tensor_with_an_attribute_is_refused(chunks: int, wrap: Callable[[Tensor], Any]) -> None:
    x = torch.arange(4)
    x._mark = True  # type: ignore[attr-defined]
    cut((wrap(x), torch.ones(4)), chunks)
    x.scale = 3.0  # type: ignore[attr-defined]
    message = r"an input of shape \(4,\) has the attribute 'scale'.* del x\.scale"
    with pytest.raises(ArgumentError, match=message):
        cut((wrap(x), torch.ones(4)), chunks)


def test_tensor_whose_class_hands_attributes_on_is_split() -> None:
    x = torch.arange(4).as_subclass(Scaled)
    x.scale = 3.0
    assert [piece.scale for (piece,) in cut((x,), 2)] == [3.0, 3.0]


def test_scatter_gives_no_chunk_and_other_values_to_every_microbatch() -> None:
    x, mask, scale = torch.arange(4), torch.ones(3), torch.tensor(2.0)
    given = x, NoChunk(mask), 7, None, scale
    (a, b), (c, d) = ((values[1:], values[0]) for values in cut(given, 2))
    assert same((b, d), (x[:2], x[2:]))
    assert a[0] is mask
    assert c[0] is mask
    assert a[1:3] == c[1:3] == (7, None)
    assert a[3] is scale
    assert c[3] is scale


def test_scatter_of_nested_values() -> None:
    given = {"x": torch.arange(2), "more": [Pair(torch.ones(2, 1), "b"), NoChunk(torch.zeros(1))]}
    first, second = cut((given,), 2)
    assert same(first[0]["x"], torch.tensor([0]))
    assert same(second[0]["more"][0], Pair(torch.ones(1, 1), "b"))
    assert same(second[0]["more"][1], torch.zeros(1))


def test_scatter_gives_views() -> None:
    x = torch.zeros(4)
    (piece,) = cut((x,), 2)[1]
    piece.add_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_scatter_keeps_repeated_tensors_identical() -> None:
    x = torch.zeros(4)
    for a, b, c in cut((x, [x], Chunk(x, 0)), 2):
        assert a is b[0]
        assert a is c


@pytest.mark.parametrize("whole", [NoChunk(torch.zeros(3)), torch.tensor(1.0)])
def test_scatter_without_rows_gives_one_microbatch(whole: Any) -> None:
    pieces, rows = scatter((whole, 1), 4)
    assert same(pieces, [(getattr(whole, "tensor", whole), 1)])
    assert rows == MicrobatchRows()
    assert rows.fractions() == [1.0]


@pytest.mark.parametrize("dim", [1, -2])
def test_scatter_chunk_on_another_dim(dim: int) -> None:
    x, mask = torch.arange(5), torch.arange(30).view(2, 5, 3)
    found = cut((x, Chunk(mask, dim)), 3)
    assert same([m for _, m in found], list(mask.split([2, 2, 1], 1)))


def test_scatter_takes_the_rows_from_the_first_tensor() -> None:
    x, lengths = torch.arange(8).view(2, 4), torch.arange(4)
    pieces, rows = scatter((NoChunk(torch.zeros(9)), Chunk(x, dim=1), lengths), 2)
    assert rows == MicrobatchRows((2, 2), 1)
    assert same(pieces[1][1:], (x[:, 2:], lengths[2:]))


@pytest.mark.parametrize(
    ("rows", "size", "chunks", "expected"),
    [(4, 8, 2, [4, 4]), (5, 10, 3, [4, 4, 2]), (4, 8, 3, [4, 4]), (8, 4, 4, [1, 1, 1, 1])],
)
def test_scatter_chunk_with_a_multiple_of_the_rows(
    rows: int, size: int, chunks: int, expected: list[int]
) -> None:
    pieces = cut((torch.zeros(rows), Chunk(torch.zeros(size), 0)), chunks)
    assert [len(piece) for _, piece in pieces] == expected


@pytest.mark.parametrize(
    ("shapes", "chunks"), [([(4, 2), (3,)], 4), ([(3,), (6,)], 3), ([(1, 5), (5,)], 2)]
)
def test_scatter_refuses_tensors_with_other_rows(
    shapes: list[tuple[int, ...]], chunks: int
) -> None:
    """This holds even if the number of micro-batches would be the same, and for one row."""
    with pytest.raises(RuntimeError, match="micro-batches") as caught:
        scatter(tuple(map(torch.zeros, shapes)), chunks)
    for shape in shapes:
        assert str(shape) in str(caught.value)
    assert "NoChunk(x)" in str(caught.value)
    assert "Chunk(x, dim=" in str(caught.value)
    assert isinstance(caught.value, ArgumentError)


def test_batch_shape_error_names_every_tensor_and_suggests_no_chunk_and_chunk() -> None:
    values = (
        torch.zeros(8, 3),
        [None, torch.zeros(3, 16)],
        torch.zeros(5, 8),
        {"lengths": torch.zeros(5)},
        Chunk(torch.zeros(2, 3), dim=1),
    )
    with pytest.raises(BatchShapeError) as caught:
        scatter(values, 4, ["input 0", "input 1", "mask", "target", "table"])
    assert str(caught.value).splitlines() == [
        "the inputs would give different numbers of micro-batches, or micro-batches of different "
        "sizes: the batch has 8 rows (dim 0 of input 0, which has shape (8, 3)), and is split into "
        "2, 2, 2, 2",
        "  input 1[1], of shape (3, 16), has size 3 on dim 0. Use NoChunk(x) to pass it whole to "
        "every micro-batch, or Chunk(x, dim=1) to split it there.",
        "  mask, of shape (5, 8), has size 5 on dim 0. Use NoChunk(mask) to pass it whole to "
        "every micro-batch, or Chunk(mask, dim=1) to split it there.",
        "  target['lengths'], of shape (5,), has size 5 on dim 0, and no dim has the batch's rows. "
        "Use NoChunk(target['lengths']) to pass it whole to every micro-batch. "
        "(Chunk(target['lengths'], dim=0) would need them there.)",
        "  table, a Chunk of shape (2, 3), has size 3 on dim 1, and no dim has the batch's rows. "
        "Use NoChunk(table) to pass it whole to every micro-batch. (Chunk(table, dim=1) would need "
        "them there.)",
    ]
    assert len(caught.value.problems) == 4
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("value", [1, [torch.zeros(1)], None, "mask"])
def test_no_chunk_and_chunk_refuse_other_values(value: Any) -> None:
    with pytest.raises(TypeError, match=f"NoChunk is for tensors, not {type(value).__name__}"):
        NoChunk(value)
    with pytest.raises(TypeError, match=f"Chunk is for tensors, not {type(value).__name__}"):
        Chunk(value, 0)


def test_no_chunk_and_chunk_hold_their_tensor() -> None:
    tensor = torch.zeros(2, 3)
    assert NoChunk(tensor).tensor is tensor
    assert Chunk(tensor, dim=-1).tensor is tensor
    assert Chunk(tensor, dim=-1).dim == 1


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_chunk_refuses_a_dim_out_of_range(shape: tuple[int, ...], dim: int) -> None:
    message = f"a tensor of shape {re.escape(str(shape))} has no dim {dim} to split"
    with pytest.raises(ArgumentError, match=message):
        Chunk(torch.zeros(shape), dim)


@pytest.mark.parametrize("dim", [True, 1.0, "0", None])
def test_chunk_refuses_a_dim_that_is_not_an_integer(dim: Any) -> None:
    with pytest.raises(TypeError, match="dim must be an integer, not"):
        Chunk(torch.zeros(2, 2), dim)


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"), [(4, 2, [0.5, 0.5]), (5, 3, [0.4, 0.4, 0.2]), (1, 4, [1.0])]
)
def test_fractions_are_shares_of_the_rows(rows: int, chunks: int, expected: list[float]) -> None:
    x = torch.zeros(rows, 3)
    assert scatter((x,), chunks)[1].fractions() == expected
    assert scatter((NoChunk(torch.zeros(7)), "a", {"x": x}), chunks)[1].fractions() == expected


# ---- check_inputs -------------------------------------------------------------------------


def test_check_inputs_refuses_inputs_on_another_device() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_inputs((torch.zeros(1), [torch.zeros(1, device="meta")]), (), CPU)
    assert str(caught.value) == (
        "an input is on meta, but the first stage is on cpu. Move it there with x.to('cpu')."
    )
    with pytest.raises(ArgumentError, match="an input is on meta"):
        check_inputs((NoChunk(torch.zeros(1, device="meta")),), (), CPU)


def test_check_inputs_accepts_nested_tensors() -> None:
    check_inputs(({"a": [torch.zeros(1)]}, 3), (), CPU)
    check_inputs((NoChunk(torch.zeros(1)),), (), CPU)
    check_inputs((), [[torch.zeros(1, device="meta")]], CPU)


# ---- gather -------------------------------------------------------------------------------


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("pieces", "rows", "expected"),
    [
        ([torch.zeros(2, 1), torch.ones(1, 1)], (2, 1), torch.tensor([[0.0], [0], [1]])),
        ([torch.zeros(2)], (2,), torch.zeros(2)),
        (list(torch.arange(15).view(15, 1).split([6, 6, 3])), (2, 2, 1), torch.arange(15)[:, None]),
        ([torch.zeros(0, 2)] * 3, (0, 0, 0), torch.zeros(0, 2)),
        ([(ONE, 3, None), (ONE + 1, 4, None)], (1, 1), (torch.arange(2.0), [3, 4], [None, None])),
        (["a", "b"], (1, 1), ["a", "b"]),
        ([(ONE, ONE), (ONE,)], (1, 1), [(ONE, ONE), (ONE,)]),
        ([{"a": ONE}, {"a": None}], (1, 1), {"a": [ONE, None]}),
    ],
    ids=["rows", "one", "multiple", "empty", "others", "texts", "other structure", "none in one"],
)
def test_gather_joins_rows_and_lists_other_values(
    pieces: list[Any], rows: tuple[int, ...], expected: Any
) -> None:
    assert same(gather(pieces, MicrobatchRows(rows)), expected)


def test_gather_keeps_a_tensor_that_is_returned_twice_one_tensor() -> None:
    """A change in place of one of them did not change the other, as it does unsplit."""
    pieces = [(torch.zeros(2), torch.zeros(2)), (torch.ones(1), torch.ones(1))]
    left, right, other = gather([(a, a, b) for a, b in pieces], MicrobatchRows((2, 1)))
    assert left is right
    assert other is not left


def test_gather_lists_multiples_if_the_batch_was_cut_on_another_dim() -> None:
    """The rows of such outputs may be in another order, for example with time steps first."""
    pieces = [torch.zeros(6, 1), torch.ones(6, 1)]
    assert same(gather(pieces, MicrobatchRows((2, 2), 1)), pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.zeros(1, 3), torch.ones(1, 3)],
        [torch.zeros(5, 5), torch.ones(5, 5)],
        [torch.zeros(6), torch.ones(2)],
        [torch.zeros(4, 2), torch.ones(2, 3)],
        [torch.zeros(4, 2), torch.tensor(1.0)],
        [torch.zeros(0, 2), torch.zeros(0, 2)],
    ],
    ids=["no dims", "mean", "table", "some rows", "padded", "scalar in one", "empty"],
)
def test_gather_lists_tensors_without_rows(pieces: list[Tensor]) -> None:
    assert same(gather(pieces, MicrobatchRows((4, 2))), pieces)
    found = gather([(piece, 1) for piece in pieces], MicrobatchRows((4, 2)))
    assert same(found, (pieces, [1, 1]))


def test_gather_of_a_batch_that_was_not_cut() -> None:
    table = torch.zeros(5, 5)
    assert gather([table], MicrobatchRows()) is table
    assert same(gather([torch.tensor(1.0)], MicrobatchRows()), [torch.tensor(1.0)])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_joins_on_the_dim_of_the_batch(dim: int) -> None:
    y = torch.arange(4 * 5 * 6).view(4, 5, 6)
    counts = [1] * (y.size(dim) - 2) + [2]
    assert same(gather(list(y.split(counts, dim)), MicrobatchRows(tuple(counts), dim)), y)
    a_row = torch.arange(sum(counts))
    assert same(gather(list(a_row.split(counts)), MicrobatchRows(tuple(counts), dim)), a_row)


def test_gather_refuses_ambiguous_rows_on_two_dims() -> None:
    pieces = [torch.zeros(2, 2, 5), torch.ones(2, 2, 5)]
    message = (
        r"an output of shape \(2, 2, 5\) has the 2 rows of its micro-batch on dim 1 and on dim 0"
    )
    with pytest.raises(RunError, match=message):
        gather(pieces, MicrobatchRows((2, 2), 1))
    assert same(gather(pieces[:1], MicrobatchRows((2,), 1)), pieces[0])


@pytest.mark.parametrize(
    "shape",
    [
        lambda a, b: {"a": a, "b": b},
        lambda a, b: OrderedDict([("b", b), ("a", a)]),
        lambda a, b: [a, (b, a)],
        lambda a, b: Pair(a, b),
        lambda a, b: (a,),
        lambda a, b: [],
    ],
)
def test_gather_keeps_the_structure(shape: Any) -> None:
    a, b = torch.arange(6).view(3, 2), torch.arange(3)
    found = gather([shape(a[:2], b[:2]), shape(a[2:], b[2:])], MicrobatchRows((2, 1)))
    assert same(found, shape(a, b))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([3, 2, 2, 1], "a list of 4 plain values"),
        ({"names": ["a", "b", "c", None]}, "a list of 4 plain values"),
        (("a", "b", "c", "d"), "a tuple of 4 plain values"),
        (numpy.ones((4, 2)), r"a NumPy array of shape \(4, 2\)"),
    ],
)
def test_scatter_refuses_a_value_for_each_row_that_is_no_tensor(value: Any, text: str) -> None:
    """Each micro-batch got the whole list, and took the first entries for its own rows."""
    with pytest.raises(ArgumentError, match=text):
        scatter((torch.zeros(4, 1), value), chunks=2)
    scatter((torch.zeros(4, 1), value), chunks=1)


def test_scatter_refuses_a_tuple_with_a_number_for_each_row() -> None:
    with pytest.raises(ArgumentError, match="a tuple of 6 plain values"):
        scatter((torch.zeros(6, 1), (3, 3, 2, 2, 1, 1)), chunks=2)


@pytest.mark.parametrize(
    "value", [(3, 2, 2, 1), [3, 2], dict(enumerate("abcd")), numpy.ones(3), [[1, 2], [3, 4]]]
)
def test_scatter_passes_other_values_whole(value: Any) -> None:
    microbatches, _ = scatter((torch.zeros(4, 1), value), chunks=2)
    assert all(given is value or given == value for _, given in microbatches)


class Mask:
    """An object that no pytree looks into, like a BlockMask of flex_attention."""

    def __init__(self, rows: int) -> None:
        self.blocks = torch.zeros(rows, 1)


def test_object_with_the_rows_of_the_batch_is_refused() -> None:
    """Each micro-batch took the first rows of the mask."""
    x = torch.zeros(4, 2)
    with pytest.raises(ArgumentError, match="an input is a Mask, which cannot be split"):
        scatter((x, Mask(4)), chunks=2)
    for mask, chunks in ((Mask(1), 2), (Mask(4), 1)):
        assert len(scatter((x, mask), chunks)[0]) == chunks


@pytest.mark.parametrize(
    "take_view",
    [
        lambda h: h[:, 1],
        lambda h: h.view(-1, 2),
        lambda h: h.unflatten(1, (2, 2)),
        lambda h: h.unflatten(1, (2, 2)).transpose(1, 2),
        lambda h: h[:, None, 1:3],
        lambda h: h.detach(),
        lambda h: h.detach()[:, ::2],
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_gather_a_tensor_and_a_view_of_it(
    take_view: Callable[[Tensor], Tensor], is_first: bool
) -> None:
    """What is changed in place in one of them is changed in the other, with its gradient."""
    results = []
    for counts in ((3, 3, 1), (7,)):
        x = torch.arange(28.0).view(7, 4).requires_grad_()
        pieces = [piece * 2 for piece in x.split(counts)]
        pairs = [(take_view(h), h)[:: 1 if is_first else -1] for h in pieces]
        outputs = gather(pairs, MicrobatchRows(counts)) if len(counts) > 1 else pairs[0]
        view, base = outputs if is_first else outputs[::-1]
        (view if view.requires_grad else base).mul_(3.0)
        loss = (base * torch.arange(4.0)).sum() + (view * view.detach()).sum()
        loss.backward()
        results.append((view, base, loss, x.grad))
    for joined, whole in zip(*results, strict=True):
        assert torch.equal(joined, whole)
        assert joined.requires_grad == whole.requires_grad


@pytest.mark.parametrize(
    "take_pair",
    [
        lambda h: h.chunk(2, 1),
        lambda h: (h, h.t().contiguous().t()),
        lambda h: (h, h.flip(0)),
        lambda h: (h[:, :3], h[:, 1:]),
        lambda h: (h, h.clone()),
        lambda h: (h.to("meta"), (h + 1).to("meta")),
    ],
)
def test_gather_tensors_that_are_no_views_of_each_other(
    take_pair: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    x = torch.arange(28.0).view(7, 4)
    pairs = [take_pair(piece) for piece in x.split([4, 3])]
    one, other = gather(pairs, MicrobatchRows((4, 3)))
    for index, joined in enumerate((one, other)):
        expected = torch.cat([pair[index] for pair in pairs])
        assert joined.is_meta or torch.equal(joined, expected)
        assert joined._base is None
