from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock import ArgumentError, NoChunk
from penstock.batch import check_inputs, gather, scatter, shares

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: Tensor
    b: Any


def same(found: Any, expected: Any) -> bool:
    """Equal, tensors by their numbers."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    return bool(found == expected)


# ---- cutting ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", range(1, 8))
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
def test_a_batch_is_cut_as_torch_chunk_cuts(rows: int, chunks: int) -> None:
    x = torch.arange(rows)
    found = [piece for (piece,) in scatter((x,), chunks)]
    assert list(map(Tensor.tolist, found)) == list(map(Tensor.tolist, x.chunk(chunks)))
    parts = scatter((x, "whole", x + 1), chunks)
    assert [len(a) for a, _, _ in parts] == [len(piece) for piece in found]


def test_what_is_no_tensor_and_what_is_not_to_be_cut_goes_everywhere() -> None:
    x, mask = torch.arange(4), torch.ones(3)
    (a, b), (c, d) = ((values[1:], values[0]) for values in scatter((x, NoChunk(mask), 7, None), 2))
    assert same((b, d), (x[:2], x[2:]))
    assert a[0] is mask
    assert c[0] is mask
    assert a[1:] == c[1:] == (7, None)


def test_nested_values_are_cut_where_they_have_tensors() -> None:
    given = {"x": torch.arange(2), "more": [Pair(torch.ones(4, 1), "b"), NoChunk(torch.zeros(1))]}
    first, second = scatter((given,), 2)
    assert same(first[0]["x"], torch.tensor([0]))
    assert same(second[0]["more"][0], Pair(torch.ones(2, 1), "b"))
    assert same(second[0]["more"][1], torch.zeros(1))


def test_pieces_are_views() -> None:
    x = torch.zeros(4)
    (piece,) = scatter((x,), 2)[1]
    piece.add_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_nothing_to_cut_is_one_micro_batch() -> None:
    whole = torch.zeros(3)
    assert scatter((NoChunk(whole), 1), 4) == [(whole, 1)]


@pytest.mark.parametrize(
    ("shapes", "chunks"), [([(4, 2), (3,)], 4), ([(3,), (4,)], 3), ([(1, 5), (5,)], 2)]
)
def test_inputs_that_give_different_micro_batches(
    shapes: list[tuple[int, ...]], chunks: int
) -> None:
    with pytest.raises(RuntimeError, match="micro-batches") as caught:
        scatter(tuple(map(torch.zeros, shapes)), chunks)
    for shape in shapes:
        assert str(shape) in str(caught.value)
    assert "NoChunk" in str(caught.value)


def test_a_tensor_without_dimensions() -> None:
    with pytest.raises(ArgumentError, match=r"without dimensions cannot be cut.*NoChunk"):
        scatter((torch.zeros(2), torch.tensor(1.0)), 2)
    with pytest.raises(ArgumentError, match=r"without dimensions cannot be cut.*NoChunk"):
        scatter((torch.tensor(1.0),), 2)
    assert same(scatter((torch.zeros(1), NoChunk(torch.tensor(1.0))), 1)[0][1], torch.tensor(1.0))


@pytest.mark.parametrize("value", [1, [torch.zeros(1)], None, "mask"])
def test_no_chunk_is_for_tensors(value: Any) -> None:
    with pytest.raises(TypeError, match=f"NoChunk is for tensors, not {type(value).__name__}"):
        NoChunk(value)


def test_no_chunk_has_its_tensor() -> None:
    tensor = torch.zeros(2)
    assert NoChunk(tensor).tensor is tensor


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"), [(4, 2, [0.5, 0.5]), (5, 3, [0.4, 0.4, 0.2]), (1, 4, [1.0])]
)
def test_shares_are_parts_of_the_rows(rows: int, chunks: int, expected: list[float]) -> None:
    x = torch.zeros(rows, 3)
    assert shares((x,), chunks) == expected
    assert shares((NoChunk(torch.zeros(7)), "a", {"x": x}), chunks) == expected


# ---- what a pipe takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "kinds"),
    [((), "nothing"), ((1, "a"), "int, str"), (([1, 2], None), "list, NoneType")],
)
def test_inputs_without_a_tensor(inputs: tuple[Any, ...], kinds: str) -> None:
    message = f"a pipe needs a tensor among its inputs, and got {kinds}"
    with pytest.raises(TypeError, match=message):
        check_inputs(inputs, CPU)


def test_inputs_on_another_device() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_inputs((torch.zeros(1), [torch.zeros(1, device="meta")]), CPU)
    assert str(caught.value) == (
        "an input is on meta, but the first stage is on cpu: move it there, x.to('cpu')"
    )
    with pytest.raises(ArgumentError, match="an input is on meta"):
        check_inputs((NoChunk(torch.zeros(1, device="meta")),), CPU)


def test_inputs_with_a_tensor_somewhere() -> None:
    check_inputs(({"a": [torch.zeros(1)]}, 3), CPU)
    check_inputs((NoChunk(torch.zeros(1)),), CPU)


# ---- putting together ---------------------------------------------------------------------


def test_tensors_are_joined_by_rows() -> None:
    assert same(gather([torch.zeros(2, 1), torch.ones(1, 1)]), torch.tensor([[0.0], [0], [1]]))
    assert same(gather([torch.zeros(2)]), torch.zeros(2))


def test_other_values_become_lists() -> None:
    found = gather([(torch.zeros(1), 3, None), (torch.ones(1), 4, None)])
    assert same(found, (torch.tensor([0.0, 1]), [3, 4], [None, None]))
    assert gather(["a", "b"]) == ["a", "b"]


def test_tensors_without_rows_become_lists() -> None:
    found = gather([torch.tensor(1.0), torch.tensor(2.0)])
    assert same(found, [torch.tensor(1.0), torch.tensor(2.0)])


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
def test_values_keep_their_shape(shape: Any) -> None:
    a, b = torch.arange(6).view(3, 2), torch.arange(3)
    assert same(gather([shape(a[:2], b[:2]), shape(a[2:], b[2:])]), shape(a, b))


def test_outputs_of_different_shapes_stay_apart() -> None:
    given = [(torch.zeros(1), torch.zeros(1)), (torch.zeros(1),)]
    assert gather(given) == given


def test_outputs_with_a_tensor_now_and_then() -> None:
    tensor = torch.zeros(1)
    assert gather([{"a": tensor}, {"a": None}]) == {"a": [tensor, None]}
