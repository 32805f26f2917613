"""Further rows of the table, which the page does not list. Each runs in a few ways.

Every row is trained in some combinations of runtime, checkpoint mode and door, each under another
schedule. A row with `refused` is refused with that text; all others equal the unsplit model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize

from penstock import Weighted
from tests.features import values
from tests.features.common import blocks, casting_anew, in_float32, made_of, normalised, tied
from tests.features.more import checkpointed, hooked, of_counted_rows, penalised, scaled
from tests.features.table import SCHEDULES, Feature, Script, Trainee, Way, given, update
from tests.features.values import Residual, Twice
from tests.oracle import Batch, Outcome
from tests.pairs import pairs
from tests.support import CHECKPOINTS, RUNTIMES, Do, Pop, Stash


@dataclass(frozen=True, kw_only=True)
class Row(Feature):
    """A feature that the page does not list."""

    compared: str = ""
    refused: str = ""  # a pattern for the message, if the pipe refuses it
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    most: int = 3  # cells

    def cells(self, number: int) -> Iterator[Way]:
        """Return the ways to run row `number`, whose schedules shift from row to row."""
        axes = {"checkpoint": CHECKPOINTS, "door": self.doors, "runtime": RUNTIMES}
        ways = [(runtime, checkpoint, door) for checkpoint, door, runtime in pairs(axes)]
        for at in range(self.most):
            schedule = self.schedules[(5 * number + at) % len(self.schedules)]
            yield Way(schedule, *ways[(number + at) % len(ways)])


STEP = ("step",)
EACH = len(SCHEDULES)  # for a row that runs under every schedule
# For layers that compute with what the micro-batch before has left, which the audit refuses. They are
# compared with the unsplit model on one micro-batch after the other.
UNAUDITED = {"audit": "off"}
ANY_STAGES = ("gpipe", "1f1b", "zb-h1", "fit")  # schedules for any number of stages

# ---- scripts ------------------------------------------------------------------------------


def on(*batches: Callable[[], Batch], updates: bool = False) -> Script:
    """Return a script of one step per batch, which accumulates gradients unless it updates."""

    def script(trainee: Trainee) -> Iterator[Outcome]:
        torch.manual_seed(2)
        for make in batches:
            yield trainee.step(make())
            if updates:
                update(trainee.module)

    return script


def without_gradients(*batches: Callable[[], Batch], inference: bool = False) -> Script:
    """Return a script that evaluates, changes the parameters, and evaluates again."""

    def script(trainee: Trainee) -> Iterator[Outcome]:
        trainee.module.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            for make in batches:
                yield trainee.step(make())
                with torch.no_grad():
                    next(trainee.module.parameters()).mul_(2)

    return script


def rows(*counts: int) -> Script:
    """Return a script with plain batches of these sizes, on which gradients accumulate."""
    return on(*(partial(given, count) for count in counts))


# ---- losses -------------------------------------------------------------------------------


def masked(y: Tensor, target: tuple[Tensor, Tensor]) -> Weighted:
    """Return the mean over the elements that the mask selects, and their number."""
    value, mask = target
    return Weighted(((y - value) ** 2 * mask).sum() / mask.sum(), mask.sum())


def as_dict(y: Tensor, target: tuple[Tensor, Tensor]) -> dict[str, Any]:
    loss, weight = masked(y, target)
    mean = (y * target[1]).sum() / target[1].sum()
    return {"loss": loss, "weight": weight, "mean": mean}


def in_numbers(y: Tensor, target: tuple[Tensor, Tensor]) -> Weighted:
    return Weighted(masked(y, target).loss, int(target[1].sum()))


def uneven(count: int, *without: int) -> Batch:
    """Return a batch whose first rows have more selected elements, and some rows none."""
    batch = given(count)
    mask = torch.zeros(count, 6, dtype=torch.int64)
    for row in range(count):
        mask[row, : 6 - 6 * row // count] = 1
    mask[list(without)] = 0
    return Batch(batch.inputs, {}, (batch.target, mask))


UNEVEN = on(*(partial(uneven, count) for count in (7, 5, 2, 1)))
# The first micro-batch, whose weight is the unit of the others, the second, the last, or all.
WITHOUT = on(*(partial(uneven, 7, *none) for none in ([0, 1, 2], [3, 4, 5], [6], [0, 1, 2, 6])))


def frozen(*prefixes: str, model: Callable[[], nn.Sequential] = blocks) -> nn.Sequential:
    made = model()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return made


class Sparse(nn.Embedding):
    """A residual embedding of the sign of the input, with sparse gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward((x[:, 0] > 0).long())


def sparse() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Sparse(2, 6, sparse=True), *list(blocks())[1:])


def one_weight() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(6)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return made_of(*layers)


class Scales(nn.Module):
    """A layer whose use of a weight cannot be deferred to W."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0]


def used_in_w_and_in_i() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return made_of(first, Scales(first.weight), last, nn.Linear(6, 6))


def nested_loss(out: dict[str, Any], target: list[Any]) -> Weighted:
    (y, double), (value, others) = out["both"], target
    count = len(others["rows"])
    return Weighted(((y - value).square().sum() + double.mean(1).sum()) / count, count)


def nested_target() -> Batch:
    batch = given(7)
    return Batch(batch.inputs, {}, [batch.target, {"rows": torch.arange(7)}])


def with_target(target: Callable[[Tensor], Any], count: int = 7) -> Callable[[], Batch]:
    batch = given(count)
    return lambda: Batch(given(count).inputs, {}, target(batch.target.clone()))


LOSS_ROWS = [
    *(
        Row(f"loss weights, {name}", model=blocks, script=UNEVEN, loss_fn=loss_fn, chunks=3, doors=STEP)
        for name, loss_fn in (("tensor", masked), ("dict", as_dict), ("number", in_numbers))
    ),
    Row("loss weight zero", model=blocks, script=WITHOUT, loss_fn=as_dict, chunks=3, doors=STEP),
    Row("loss weights all zero", model=blocks, script=on(partial(uneven, 7, *range(7))), loss_fn=masked, chunks=3, doors=STEP),
    Row("loss weights, frozen layer", model=partial(frozen, "0."), script=UNEVEN, loss_fn=masked, doors=STEP),
    Row("loss weights, sparse gradients", model=sparse, script=UNEVEN, loss_fn=masked, doors=STEP),
    Row("loss weights, no gradients", model=blocks, script=without_gradients(partial(uneven, 7), partial(uneven, 1)), loss_fn=as_dict, doors=STEP),
    Row("loss weights, one weight in all layers", model=one_weight, script=on(partial(uneven, 5), partial(uneven, 9)), loss_fn=masked, chunks=6, stages=6, doors=STEP, most=EACH),
    Row("loss weights, tied weight used in W and I", model=used_in_w_and_in_i, script=rows(7, 7), loss_fn=of_counted_rows, chunks=2, doors=STEP, most=EACH),
    Row("loss weights, added losses", model=penalised, loss_fn=of_counted_rows, whole=False, doors=STEP),
    Row("added losses, reduction sum", model=penalised, loss_fn=partial(F.mse_loss, reduction="sum"), doors=STEP),
    Row("added losses, ignored targets", model=penalised, script=on(with_target(lambda t: torch.tensor([-100, 1, -100, 0, 1, 2, -100]))), loss_fn=F.cross_entropy, chunks=3, doors=STEP),
    Row("loss weights, nested outputs and targets", model=lambda: made_of(*list(blocks())[:3], Do(lambda y: {"both": (y, 2 * y)})), script=on(nested_target), loss_fn=nested_loss, doors=STEP),
    Row("model that returns a dict with its loss", model=lambda: made_of(*list(blocks())[:3], Do(lambda y: {"loss": y.square().mean(), "logits": y})), script=on(with_target(lambda t: None)), loss_fn=None, doors=STEP),
    Row("reduction sum of a partial", model=blocks, loss_fn=partial(F.mse_loss, reduction="sum"), doors=STEP),
    Row("GradScaler under autocast", model=lambda: blocks(torch.float32), script=in_float32, whole=False, tolerance=0.0, chunks=2, step=scaled, under=lambda: torch.autocast("cpu", torch.bfloat16), reference=casting_anew, doors=STEP),
    Row("target that requires gradients", model=blocks, script=on(with_target(Tensor.requires_grad_))),
    Row("target without tensors", model=blocks, script=on(with_target(lambda t: 2)), loss_fn=lambda y, power: (y**power).mean()),
    Row("batch without rows", model=blocks, script=rows(0), most=2),
]  # fmt: skip

# ---- losses of PyTorch that ignore targets ------------------------------------------------

WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
STOCK: dict[str, tuple[Any, int]] = {  # with the target that each ignores
    "function": (F.cross_entropy, -100),
    "module": (nn.CrossEntropyLoss(), -100),
    "weighted": (nn.CrossEntropyLoss(WEIGHT), -100),
    "smooth": (nn.CrossEntropyLoss(label_smoothing=0.2), -100),
    "weighted and smooth": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), -100),
    "another ignored": (nn.CrossEntropyLoss(ignore_index=1), 1),
    "a partial": (partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1, ignore_index=3), 3),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), -100),
    "a partial sum": (partial(F.cross_entropy, reduction="sum"), -100),
    "an old sum": (partial(F.cross_entropy, size_average=False), -100),
    "nll": (F.nll_loss, -100),
    "nll module": (nn.NLLLoss(WEIGHT), -100),
    "a partial nll": (partial(F.nll_loss, ignore_index=2), 2),
}


def classes(count: int, *size: int, ignored: int = -100, kind: str = "some") -> Batch:
    """Return logits for five classes, and targets of which most, or all, are ignored."""
    torch.manual_seed(0)
    x = torch.randn(count, 5, *size, dtype=torch.float64)
    if kind == "probabilities":
        return Batch((x,), {}, torch.rand_like(x).softmax(1))
    target = torch.randint(0, 5, (count, *size))
    target[torch.rand(target.shape) < 0.4] = ignored
    target[: count // 3] = 2 if kind == "of weight zero" else ignored
    target[-1] = 4
    return Batch((x,), {}, torch.full_like(target, ignored) if kind == "all" else target)


def pointwise() -> nn.Sequential:
    """Return linear layers along dim 1, for inputs of any number of dims."""

    def along(layer: nn.Linear) -> nn.Module:
        return nn.Sequential(
            Do(lambda x: x.movedim(1, -1)), layer, Do(lambda x: x.movedim(-1, 1).contiguous())
        )

    torch.manual_seed(0)
    return made_of(*(along(nn.Linear(5, 5)) for _ in range(4)))


def of_classes(name: str) -> Script:
    ignored = STOCK[name][1]
    scripts = [partial(classes, 7, 4), partial(classes, 4), partial(classes, 1, 2, 3)]
    made = [partial(one, ignored=ignored) for one in scripts]
    if name in ("function", "weighted", "smooth", "weighted and smooth"):
        made += [partial(classes, 7, 4, kind=kind) for kind in ("probabilities", "of weight zero")]
        made += [partial(classes, 7, 4, kind="all")]  # at last: gradients are NaN from here on
    return on(*made)


STOCK_ROWS = [
    Row(f"cross entropy, {name}", model=pointwise, script=of_classes(name), loss_fn=STOCK[name][0], chunks=3, doors=STEP, most=3)
    for name in STOCK
]  # fmt: skip

# ---- tied weights -------------------------------------------------------------------------

WORDS, WIDTH = 11, 8


class Head(nn.Module):
    """A head that holds the embedding itself, and has its own bias."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight, self.bias)


class Inner(nn.Module):
    """A module that holds the head one level further down."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"head": Head(embedding), "act": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts["act"](self.parts["head"](x))
        return y


def by_weight(embedding: nn.Embedding) -> nn.Module:
    head = nn.Linear(WIDTH, WORDS)
    head.weight = embedding.weight
    return head


KINDS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "weight": by_weight,
    "module": Head,
    "inner": Inner,
}


def language(kind: str = "weight") -> nn.Sequential:
    """Return eight layers with a skip connection, of which the last is tied to the first."""
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    return made_of(
        embedding,
        Stash(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        Pop(),
        nn.LayerNorm(WIDTH),
        KINDS[kind](embedding),
    )


def words(count: int = 7) -> Batch:
    torch.manual_seed(1)
    x, target = (torch.randint(0, WORDS, (count, 3)) for _ in range(2))
    return Batch((x,), {}, target)


def of_words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def unfrozen(trainee: Trainee) -> Iterator[Outcome]:
    """Train with a frozen tied weight, unfreeze it, and freeze it again."""
    weight = trainee.module.get_parameter("0.weight")
    for learns in (False, True, False):
        weight.requires_grad_(learns)
        trainee.module.zero_grad()
        yield trainee.step(words())


class Adds(nn.Module):
    """A layer that computes only with a module of another layer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.block(x)
        return y


def one_block() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
    return made_of(*(Adds(block) for _ in range(8)))


def inside_an_earlier_layer() -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Linear(6, 6)
    return made_of(Adds(nn.Sequential(last)), nn.Linear(6, 6), nn.Linear(6, 6), last)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "custom": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


def parametrized_language(how: str, kind: str) -> nn.Sequential:
    model = language(kind)
    PARAMETRIZATIONS[how](model[0])
    return model.double()


def tied_originals() -> nn.Sequential:
    model = language()
    for layer in (model[0], model[7]):
        parametrize.register_parametrization(layer, "weight", Doubled())
    model[7].parametrizations.weight.original = model[0].parametrizations.weight.original  # type: ignore[union-attr]
    return model


def sparse_and_dense() -> nn.Sequential:
    model = language()
    model[0].sparse = True  # type: ignore[assignment]
    return model


def with_max_norm() -> nn.Sequential:
    model = language()
    model[0].max_norm = 0.5  # type: ignore[assignment]
    return model


class Rotates(nn.Module):
    """A layer that reads a table, and may count its calls in it."""

    table: Tensor

    def __init__(self, table: Tensor, change: str = "never") -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "in place":
            self.table.add_(1)
        if self.change == "anew":
            self.table = self.table + 1
        return x * self.table


def rotated(first: str = "never", second: str = "never") -> nn.Sequential:
    torch.manual_seed(0)
    table = torch.randn(6, dtype=torch.float64)
    linear = [nn.Linear(6, 6).double() for _ in range(2)]
    return nn.Sequential(Rotates(table, first), linear[0], linear[1], Rotates(table, second))


def changing_the_table(trainee: Trainee) -> Iterator[Outcome]:
    """Change a shared buffer between steps: all layers see it."""
    for _ in range(2):
        yield trainee.step(given(7))
        trainee.module.get_buffer("0.table").mul_(2)
    assert trainee.module.get_buffer("3.table") is trainee.module.get_buffer("0.table")


CHANGED = "a layer changed 'table' in its forward, but layers of several stages share it"
LANGUAGE: dict[str, Any] = {"loss_fn": of_words, "chunks": 3, "stages": [2, 2, 2, 2]}
WORDS_SCRIPT = on(partial(words, 7), partial(words, 2), partial(words, 6), updates=True)
TIED_ROWS = [
    *(
        Row(f"tied by {kind}", model=partial(language, kind), script=WORDS_SCRIPT, most=EACH if kind != "inner" else 6, **LANGUAGE)
        for kind in KINDS
    ),
    *(
        Row(f"tied by {kind}, {len(cut)} ranks", model=partial(language, kind), script=on(words, words), **{**LANGUAGE, "stages": cut}, schedules=ANY_STAGES, most=3)
        for kind, cut in (("weight", [3, 5]), ("module", [3, 3, 2]))
    ),
    Row("tied and frozen, then trained", model=partial(language, "module"), script=unfrozen, **LANGUAGE),
    Row("tied, accumulated", model=language, script=on(partial(words, 7), partial(words, 5), partial(words, 1)), **LANGUAGE),
    Row("tied, sparse and dense gradients", model=sparse_and_dense, script=on(words), **LANGUAGE, doors=STEP),
    Row("tied, no gradients", model=partial(language, "inner"), script=without_gradients(words, words), **LANGUAGE),
    Row("tied, inference mode", model=partial(language, "module"), script=without_gradients(words, words, inference=True), **LANGUAGE),
    *(
        Row(f"tied and parametrized, {how}, by {kind}", model=partial(parametrized_language, how, kind), script=on(words, words), **LANGUAGE, most=3)
        for how, kind in itertools.product(PARAMETRIZATIONS, ("module", "inner"))
    ),
    Row("tied originals of two parametrizations", model=tied_originals, script=on(words), **LANGUAGE),
    Row("tied embedding with max_norm", model=with_max_norm, script=on(words), **LANGUAGE, refused="a layer changed 'weight' in its forward, but layers"),
    Row("tied within a stage", model=lambda: made_of(*list(one_weight())[:2], *list(blocks())[1:]), script=rows(7, 7), stages=[2, 1, 1, 1], chunks=3),
    Row("one block in all layers", model=one_block, script=rows(7, 7), stages=[2, 2, 2, 2], chunks=3),
    Row("layer inside an earlier layer", model=inside_an_earlier_layer, script=rows(7, 7), chunks=3),
    Row("buffer shared by ranks", model=rotated, script=changing_the_table, chunks=3),
    *(
        Row(f"buffer shared by ranks and changed {how}", model=partial(rotated, *changes), script=rows(7), chunks=3, refused=CHANGED)
        for how, changes in (("in place by the first", ["in place"]), ("anew by the last", ["never", "anew"]))
    ),
]  # fmt: skip

# ---- parameters and state -----------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


def adapted(shared: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    if shared:
        layers[3].weight = layers[0].weight
    return made_of(*map(Adapted, layers))


def parametrize_later(how: str) -> Script:
    def script(trainee: Trainee) -> Iterator[Outcome]:
        torch.manual_seed(2)
        PARAMETRIZATIONS[how](trainee.module[2].down)  # type: ignore[index]
        for _ in range(2):
            yield trainee.step(given(7))
            update(trainee.module)

    return script


def normed(how: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(nn.Linear(6, 6), how(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6))


class Centred(nn.BatchNorm1d):
    """A norm that reads its running mean and then updates it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        found = (x - self.running_mean) ** 2
        if self.training:
            with torch.no_grad():
                self.running_mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return found


class Shifted(nn.Linear):
    """A norm like those of timm: PyTorch updates the statistics without a new tensor version."""

    mean: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.mean.clone()
        y = F.batch_norm(super().forward(x), self.mean, self.spread, training=self.training)
        return y + shift


class Remembering(nn.Module):
    """A layer that reads a buffer of past inputs, then writes or replaces the buffer."""

    seen: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = x + 0.5 * self.seen
        if self.training:
            with torch.no_grad():
                now = 0.5 * self.seen + x.mean()
                if self.replaces:
                    self.seen = now
                else:
                    self.seen.copy_(now)
        return y


def remembering(replaces: bool) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = (nn.Linear(6, 6) for _ in range(2))
    return made_of(first, Remembering(replaces), second, Remembering(replaces))


class Renormed(nn.Embedding):
    """A residual embedding that changes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward((x[:, 0] > 0).long())


def renormed() -> nn.Sequential:
    later = list(blocks())[1:]  # sets the seed, too
    return made_of(Renormed(2, 6, max_norm=0.5), *later)


STATE_ROWS = [
    *(
        Row(f"frozen {name}", model=partial(frozen, *prefixes), script=rows(7, 7), chunks=3)
        for name, prefixes in (
            ("first stage", ["0."]),
            ("middle", ["1.", "2."]),
            ("last stage", ["3."]),
            ("all but the last", ["0.", "1.", "2."]),
        )
    ),
    Row("hooks that change values", model=hooked),
    Row("sparse gradients", model=sparse),
    *(Row(f"low-rank adapters{', tied' * shared}", model=partial(adapted, shared), most=EACH) for shared in (False, True)),
    Row("orthogonal parametrization", model=partial(normed, parametrizations.orthogonal)),
    *(Row(f"parametrized later, {how}", model=blocks, script=parametrize_later(how), most=3) for how in PARAMETRIZATIONS),
    Row("spectral norm", model=partial(normed, parametrizations.spectral_norm), whole=False, options=UNAUDITED, most=EACH),
    Row("norm that reads its statistics", model=lambda: made_of(nn.Linear(6, 6), Centred(6), nn.Linear(6, 6), Centred(6)), whole=False, options=UNAUDITED),
    Row("norm that updates its statistics without a version", model=lambda: made_of(*(Shifted() for _ in range(4))), whole=False, chunks=2, options=UNAUDITED),
    Row("inner checkpoint", model=checkpointed),
    *(
        Row(f"buffer that a layer reads and {how}", model=partial(remembering, replaces), whole=False, options=UNAUDITED)
        for how, replaces in (("writes", False), ("replaces", True))
    ),
    Row("embedding with max_norm", model=renormed, whole=False),
    Row("deferred BatchNorm, small batch", model=lambda: made_of(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)), script=rows(12, 6), whole=False, chunks=5, options={"deferred_batch_norm": True}),
]  # fmt: skip

# ---- values between stages, and inputs ----------------------------------------------------

IN_PLACE = r"in.?place"
VALUE_ROWS = [
    *(
        Row(f"between stages: {name}", model=partial(values.crossing, name), script=on(partial(given, 7), lambda: given(7).detached()), loss_fn=values.sum_of_all, chunks=3, stages=[1] * (2 + len(passed)), options={"reduction": "sum"}, schedules=ANY_STAGES, most=4)
        for name, passed in values.BOUNDARIES.items()
    ),
    Row("between stages: parameters and buffers", model=values.passing_parameters, script=rows(7, 7), chunks=3, most=EACH),
    *(
        Row(f"input with strides: {name}", model=blocks, script=on(partial(values.strided, name, True), partial(values.strided, name, False)), most=3)
        for name in values.STRIDES
    ),
    Row("inputs in a tree of mixed values", model=values.begun, script=on(values.tree), chunks=3),
    *(
        Row(f"first input that is not split, {len(shape)} dims", model=values.scaled_first, script=on(partial(values.with_scale, *shape)), doors=STEP, most=3)
        for shape in ((), (6,), (1, 6))
    ),
    *(Row(f"skip: {name}", model=partial(values.skipping, name), script=rows(7), chunks=3) for name in values.SKIPS),
    Row("nested skips", model=values.nested_skips, script=rows(7), chunks=3),
    Row("skippable with several inputs", model=values.several_inputs, script=on(values.two_inputs), chunks=3),
    *(
        Row(f"changed in place: {name}", model=partial(values.changing, name), script=rows(4, 4), chunks=2, refused=IN_PLACE)
        for name in values.CHANGES
    ),
]  # fmt: skip

# ---- models that are not a Sequential ------------------------------------------------------

TRACED: dict[str, Any] = {"options": {"example": given().inputs, "balance": "parameters"}}
TRACED_ROWS = [
    Row("Sequential with its own forward", model=lambda: Twice(*blocks()), **TRACED),
    Row("traced: list of blocks, loss of its own", model=Residual, script=on(with_target(lambda t: None)), loss_fn=None, doors=STEP, most=EACH, **TRACED),
    Row("traced: BatchNorm", model=lambda: Twice(*normalised()), whole=False, **TRACED),
    Row("traced: tied weights", model=lambda: Twice(*tied()), **TRACED),
]  # fmt: skip

ROWS = [*LOSS_ROWS, *STOCK_ROWS, *TIED_ROWS, *STATE_ROWS, *VALUE_ROWS, *TRACED_ROWS]
