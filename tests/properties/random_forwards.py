"""Random models as source code: what people write in a forward, in random order.

A model is a list of blocks and a forward that calls them. The forwards of the blocks and of the
model are drawn statement by statement from the tables below: operations in place, views, random
draws, Python values, state, containers, hooks. All tensors have rows of four numbers, so any order
of statements is a program. Some of these programs are not valid PyTorch (a tensor that the backward
needs is changed in place); whoever runs them finds out and draws again.

The code is text, so that a failure prints a model that can be read, cut down and run by itself.
"""

from __future__ import annotations

import random
import re
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import PipeSequential

WIDTH = 4

# ---- the statements -----------------------------------------------------------------------
#
# {a} and {b} are tensors that exist, {o} is a new one; {k} is a Python number, {q} a new one.
# A feature is what the table of a run counts. Statements of the first table may be anywhere.

ANYWHERE: dict[str, tuple[str, ...]] = {
    "operations": (
        "{o} = {a} + {b}",
        "{o} = torch.tanh({a})",
        "{o} = {a} * self.scale",
        "{o} = {a} * self.ramp + self.factor",
        "{o} = torch.cat([{a}[:, :2], {b}[:, 2:]], 1)",
        "{o} = torch.where({a} > 0, {a}, {b})",
        "{o} = torch.stack([{a}, {b}]).mean(0)",
        "{o} = {a}.clone()",
        "{o} = {a}.clone()",
        "{o} = Doubled.apply({a})",
        "{o} = checkpoint(torch.sin, {a}, use_reentrant=False)",
        "{o} = {a}\nfor column in {b}.unbind(1):\n    {o} = {o} + 0.1 * column[:, None]",
    ),
    "views": (
        "{o} = {a}[:, :]",
        "{o} = {a}.view({a}.shape)",
        "{o} = {a}.t().t()",
        "{o} = {a}.unsqueeze(1).squeeze(1)",
        "{o} = {a}.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)",
        "{o} = {a}.view_as({b})",
        "left, right = {a}.chunk(2, 1)\n{o} = torch.cat([right, left], 1)",
    ),
    "detached": (
        "{o} = {a}.detach()",
        "{o} = {a}.detach().clone()",
        "with torch.no_grad():\n    {o} = {a} * 2",
    ),
    "in place": (
        "{a}.mul_(0.7)",
        "{a} += {b}",
        "{a} *= {k}",
        "{a}[:, 1:3].mul_(0.5)",
        "{a}[:, 0] = {b}[:, 1]",
        "{a}[:, 2:] += {b}[:, :2].clone()",
        "{a}.copy_({b})",
        "{a}.masked_fill_({b} > 0.5, 0.1)",
        "torch.relu_({a})",
        "functional.leaky_relu({a}, 0.3, inplace=True)",
        "{a}.add_({b}.detach(), alpha=0.1)",
        "{a}.unsqueeze(0).add_(0.1)",
        "with torch.no_grad():\n    {a}.mul_(0.5)",
        "{a}.detach()[:, :2].mul_(0.5)",
        "{o} = {a}.clone()\n{o}[:, 1:].mul_({b}[:, :1])",
        "{o} = torch.zeros_like({a})\n{o}[:, :2] += {b}[:, 2:]",
    ),
    "draws": (
        "{o} = functional.dropout({a}, 0.4, self.training)",
        "{o} = {a} + 0.1 * torch.randn_like({a})",
        "{o} = {a} * torch.bernoulli(torch.full_like({a}, 0.6))",
        "{o} = {a}[:, torch.randperm(4)]",
    ),
    "draws in place": (
        "{o} = {a} * {a}.new_empty(({a}.shape[0], 1)).bernoulli_(0.7)",
        "{o} = {a} + torch.zeros(4, dtype={a}.dtype).uniform_(-0.1, 0.1)",
        "{o} = {a} + nn.init.normal_({a}.new_zeros(4), std=0.1)",
        "functional.dropout({a}, 0.3, self.training, inplace=True)",
        "{a}.detach()[:, 1:3].normal_(2.0, 0.5)",
        "{o} = torch.zeros_like({a})\n{o}.normal_()\n{o} += {b}",
    ),
    "Python values": (
        "{q} = {a}.shape[0]",
        "{q} = {a}.numel() / 8",
        "{q} = 0.5 * {k}",
        "{q} = 1.5 if {a}.requires_grad else 0.5",
        "{q} = 1.5 if self.training else 0.5",
        "{o} = {a} * {k}",
        "{o} = {a} / (1 + {k})",
        "{o} = {a} * 1.5 if {k} > 1 else {a} + {b}",
        "if {a}.requires_grad:\n    {o} = {a} * 0.9\nelse:\n    {o} = {a} + 0.1",
    ),
    "containers": (
        "kept.append({a})",
        "{o} = {a} + 0.3 * sum(kept)",
        "named['h'] = {a}",
        "{o} = {a} + named.get('h', 0.1)",
    ),
    "tensor hooks": (
        "if {a}.requires_grad:\n    {a}.register_hook(halve)",
        "{o} = {a} * 1.1\nif {o}.requires_grad:\n    {o}.register_hook(halve)",
    ),
    "buffers": (
        "self.count.add_(1)",
        "self.count += 1",
        "self.mean.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)",
        "self.mean = 0.9 * self.mean + 0.1 * {a}.detach().mean(0)",
        "{o} = {a} - self.mean",
        "{o} = {a} * (1 + 0.1 * self.count)",
        "{o} = {a} * self.mean.sigmoid()",
    ),
    "attributes": (
        "self.left = {a}",
        "{o} = {a} + 0.5 * self.left",
        "{o} = {a} * self.cfg.times",
        "{o} = {a} * self.cfg.table['gain']",
    ),
}
# What only a block does: it computes with layers, and the model need not follow.
IN_BLOCKS: dict[str, tuple[str, ...]] = {
    "layers": (
        "{o} = self.lin({a})",
        "{o} = self.lin({a})",
        "{o} = torch.tanh(self.lin({a}))",
        "{o} = {a} + self.inner({a})",
        "{o} = functional.linear({a}, self.lin.weight)",
        "{o} = self.norm({a})",
        "{o} = checkpoint(self.lin, {a}, use_reentrant=False)",
    ),
    "data-dependent values": (
        "{q} = float({a}.detach().abs().max() > 0.8)",
        "{q} = int(({a}.detach() > 0).sum())",
        "{o} = {a} * 0.5 if {a}.detach().mean() > 0 else {a}",
    ),
    "host draws": ("{o} = {a} * (1 + random.random())",),
    "Python state": (
        "self.calls += 1",
        "self.calls += 1\n{o} = {a} * (1 + 0.1 * self.calls)",
    ),
    "back references": ("{o} = {a} * self.owner[0].factor", "{o} = {a} * self.owner[0].scale"),
}
# What only the model does: it has more inputs than one tensor.
IN_MODEL: dict[str, tuple[str, ...]] = {
    "more inputs": (
        "{o} = {a} * gate",
        "{q} = 1.5 if flag else 0.5",
        "{o} = {a} * 2 if flag else {a} + {b}",
        "{o} = {a} * 2 if bool((gate > 0.1).all()) else {a} + {b}",
        "{o} = {a} + x",
        "x = x.clone()",
    ),
    "in place on inputs": ("x.mul_(0.9)", "gate.add_(0.1)", "x[:, 1:].add_(0.1)"),
    "shared state": (
        "self.cfg.times = {k}",
        "self.cfg.table['gain'] = {k}",
        "self.cfg.times = 1.0 + 0.1 * len(x)",
    ),
}
CALLS = ("{u}({a})", "{u}({a})", "{u}({a})", "{u}({a}, {b})", "{u}({a}, other={b}, times={k})")
# What a block returns, and how the model takes it.
RETURNS: dict[str, tuple[str, str]] = {
    "tensor": ("return {a}", "{o} = {call}"),
    "input": ("return x", "{o} = {call}"),
    "view": ("return {a}[:, :]", "{o} = {call}"),
    "number": ("return {a}, {k}", "{o}, {q} = {call}"),
    "dict": (
        "return {{'h': {a}, 'n': {k}, 'none': None}}",
        "made = {call}\n{o} = made['h'] * made['n']",
    ),
    "list": ("return [{a}, {b}]", "{o} = sum({call})"),
    "named tuple": ("return Pair({a}, {b})", "made = {call}\n{o} = made.left + made.right"),
    "tree": (
        "return {a}, [{b}, {{'n': {k}}}]",
        "{o}, made = {call}\n{o} = {o} + 0.5 * made[0] * made[1]['n']",
    ),
    "None by rows": (
        "return None if len(x) % 2 else {a}",
        "made = {call}\n{o} = {a} if made is None else made",
    ),
    "None by argument": (
        "return None if times > 1 else {a}",
        "made = {call}\n{o} = {a} if made is None else made",
    ),
}
HOOKS: dict[str, str] = {
    "forward hook": "{m}.register_forward_hook(scale_output)",
    "forward hook with kwargs": "{m}.register_forward_hook(scale_with_kwargs, with_kwargs=True)",
    "pre-hook": "{m}.register_forward_pre_hook(scale_input)",
    "pre-hook with kwargs": "{m}.register_forward_pre_hook(scale_arguments, with_kwargs=True)",
    "backward hook": "{m}.register_full_backward_hook(scale_gradients)",
    "backward pre-hook": "{m}.register_full_backward_pre_hook(scale_gradients)",
    "hook on a parameter": "next({m}.parameters()).register_hook(halve)",
}
SHARING: dict[str, str] = {
    "tied weight": "m[{i}].lin.weight = m[{j}].lin.weight",
    "shared layer": "m[{i}].inner = m[{j}].inner",
    "shared buffer": "m[{i}].ramp = m[{j}].ramp",
    "shared statistics": "m[{i}].mean = m[{j}].mean",
    "shared scale": "m[{i}].scale = root.scale",
    "frozen": "m[{i}].requires_grad_(False)",
}
# What may change between two steps.
CHANGES: dict[str, str] = {
    "attribute changed": "root.factor = 0.6",
    "attribute of a block changed": "m[{i}].factor = 0.6",
    "shared object changed": "m[{i}].cfg.times = 0.4",
    "frozen later": "m[{i}].requires_grad_(False)",
    "hook later": "m[{i}].register_forward_hook(scale_output)",
    "mode changed": "root.train(not root.training)",
    "mode of a block changed": "m[{i}].eval()",
}

# ---- what the statements use --------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Doubled(torch.autograd.Function):
    """Double a tensor, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _scaled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value * 1.2
    if type(value) is tuple and value:
        return (_scaled(value[0]), *value[1:])
    return value


def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    return _scaled(output)


def scale_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return _scaled(output)


def scale_input(module: nn.Module, args: Any) -> Any:
    return _scaled(args)


def scale_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _scaled(args), kwargs


def scale_gradients(module: nn.Module, gradients: Any, *_: Any) -> Any:
    return tuple(None if g is None else g * 0.8 for g in gradients)


class Parts(nn.Module):
    """The state that a random forward may use."""

    ramp: Tensor
    count: Tensor
    mean: Tensor

    def __init__(self, cfg: SimpleNamespace) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.factor, self.calls, self.cfg = 1.25, 0, cfg


class BlockParts(Parts):
    """The same with layers."""

    def __init__(self, cfg: SimpleNamespace) -> None:
        super().__init__(cfg)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.BatchNorm1d(WIDTH)


HELPERS = (
    *(Pair, Doubled, Parts, BlockParts, checkpoint, halve, scale_output, scale_with_kwargs),
    *(scale_input, scale_arguments, scale_gradients),
)
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "functional": functional, "random": random}
NAMES |= {helper.__name__: helper for helper in HELPERS}

# ---- models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A statement. Without it, `stand_in` takes the place of the variable that it assigns."""

    feature: str
    text: str
    target: str = ""
    stand_in: str = ""


@dataclass(frozen=True)
class Body:
    """The statements of a forward, the last of which returns; what it returns has a form."""

    statements: tuple[Statement, ...]
    form: str

    def without(self, index: int) -> Body:
        """Return the body without one statement."""
        dropped = self.statements[index]
        kept = list(self.statements[:index])
        for statement in self.statements[index + 1 :]:
            text = statement.text
            if dropped.target:
                text = re.sub(rf"\b{dropped.target}\b", dropped.stand_in, text)
            stand_in = dropped.stand_in if statement.stand_in == dropped.target else ""
            kept.append(
                Statement(statement.feature, text, statement.target, stand_in or statement.stand_in)
            )
        return Body(tuple(kept), self.form)

    def source(self) -> str:
        lines = [line for one in self.statements for line in one.text.split("\n")]
        return "".join(f"        {line}\n" for line in lines)


@dataclass(frozen=True)
class Forward:
    """A random model: its blocks, its own forward unless it is a Sequential, and the wiring."""

    blocks: tuple[Body, ...]
    body: Body | None
    wiring: tuple[tuple[str, str], ...] = ()  # pairs of a feature and a statement

    @property
    def sequential(self) -> bool:
        return self.body is None

    @property
    def features(self) -> set[str]:
        bodies = [*self.blocks, *([self.body] if self.body else [])]
        found = {one.feature for body in bodies for one in body.statements if one.feature}
        found |= {f"returns {body.form}" for body in self.blocks}
        return found | {feature for feature, _ in self.wiring}

    def source(self) -> str:
        """Return the code of the model."""
        head = "        kept, named = [], {}\n"
        texts = []
        for at, block in enumerate(self.blocks):
            texts.append(
                f"class Block{at}(BlockParts):\n"
                f"    def forward(self, x, other=None, times=1.0):\n{head}{block.source()}\n"
            )
        if self.body is not None:
            texts.append(
                "class Model(Parts):\n"
                f"    def forward(self, x, gate, flag=False):\n{head}{self.body.source()}\n"
            )
        return "\n".join(texts)

    def build(self) -> nn.Module:
        """Return the model; two calls build equal ones that share nothing."""
        namespace = dict(NAMES)
        exec(compile(self.source(), "<random forward>", "exec"), namespace)
        torch.default_generator.manual_seed(len(self.blocks))
        cfg = SimpleNamespace(times=0.8, table={"gain": 1.1})
        blocks = [namespace[f"Block{at}"](cfg) for at in range(len(self.blocks))]
        if self.body is None:
            root: nn.Module = PipeSequential(*blocks)
        else:
            root = namespace["Model"](cfg)
            root.blocks = nn.ModuleList(blocks)
        root.double()
        for _, statement in self.wiring:
            apply_change(root, statement)
        return root


def blocks_of(root: nn.Module) -> list[nn.Module]:
    return list(root if isinstance(root, nn.Sequential) else root.blocks)  # type: ignore[arg-type]


def apply_change(root: nn.Module, statement: str) -> None:
    """Run a statement of the wiring, or a change between steps, on a model."""
    exec(statement, {**NAMES, "root": root, "m": blocks_of(root)})


# ---- drawing ------------------------------------------------------------------------------


class Writer:
    """Draws the statements of one forward."""

    def __init__(self, draw: random.Random, tensors: Sequence[str], numbers: Sequence[str]) -> None:
        self.draw, self.tensors, self.numbers = draw, list(tensors), list(numbers)
        self.statements: list[Statement] = []
        self.has_left = False  # whether self.left is set

    def recent(self) -> str:
        """Return a tensor, most often one of the last."""
        back = min(int(self.draw.expovariate(0.8)), len(self.tensors) - 1)
        return self.tensors[-1 - back]

    def number(self) -> str:
        return self.draw.choice([*self.numbers, "0.5", "2"])

    def write(self, feature: str, template: str, **more: str) -> None:
        """Add a statement for a template."""
        if "* self.left" in template and not self.has_left:
            return
        self.has_left |= "self.left =" in template
        a, target, stand_in = self.recent(), "", ""
        words = {"a": a, "b": self.recent(), "k": self.number(), **more}
        if "{o}" in template:
            target, stand_in = f"v{len(self.statements) + 1}", a
            words["o"] = target
        if "{q}" in template:
            words["q"] = f"k{len(self.statements) + 1}"
            if not target:
                target, stand_in = words["q"], "1"
        self.statements.append(Statement(feature, template.format(**words), target, stand_in))
        if "{o}" in template:
            self.tensors.append(words["o"])
        if "{q}" in template:
            self.numbers.append(words["q"])

    def write_some(self, palette: dict[str, Sequence[str]], count: int) -> None:
        for _ in range(count):
            feature = self.draw.choice(list(palette))
            self.write(feature, self.draw.choice(palette[feature]))


def _palette(draw: random.Random, own: dict[str, tuple[str, ...]]) -> dict[str, Sequence[str]]:
    """Return a few features: with few of them, each pair of statements occurs more often."""
    every = {**ANYWHERE, **own}
    names = draw.sample(list(every), draw.randint(2, 5))
    return {name: every[name] for name in ("operations", *names)}


def _draw_block(draw: random.Random, sequential: bool) -> Body:
    writer = Writer(draw, ["x"], ["times"])
    if draw.random() < 0.3:
        writer.write("", "{o} = x if other is None else x + other")
    if draw.random() < 0.6:
        layers = IN_BLOCKS["layers"]
        writer.write("", draw.choice(layers[:3]))
    palette = _palette(draw, IN_BLOCKS)
    if sequential:
        palette.pop("back references", None)  # a Sequential has no attributes of its own
    writer.write_some(palette, draw.choice([0, 1, 1, 2, 3, 4]))
    forms = ["tensor"] * 6 + (["view", "input"] if sequential else list(RETURNS))
    form = draw.choice(forms)
    writer.write("", RETURNS[form][0])
    if sequential and draw.random() < 0.2:
        form = "pair"
        writer.statements[-1] = Statement("", f"return {writer.recent()}, {writer.recent()}")
    return Body(tuple(writer.statements), form)


def _draw_model(draw: random.Random, blocks: Sequence[Body]) -> Body:
    writer = Writer(draw, ["x"], [])
    palette = _palette(draw, IN_MODEL)
    if draw.random() < 0.5:
        writer.write("", "{o} = x * 1.5")
    for at in range(len(blocks)):
        writer.write_some(palette, draw.choice([0, 0, 1, 1, 2, 3]))
        _write_call(writer, at, blocks[at])
        if at and draw.random() < 0.1:
            again = draw.randrange(at)
            _write_call(writer, again, blocks[again])
    writer.write_some(palette, draw.choice([0, 0, 1, 2]))
    kept = " + ".join(dict.fromkeys([writer.tensors[-1], *(writer.recent() for _ in range(3))]))
    form = draw.choice(["tensor", "tensor", "tensor", "tuple", "dict", "own loss"])
    other = writer.recent()
    text = {
        "tensor": f"return {kept}",
        "tuple": f"return {kept}, {other}, {writer.number()}",
        "dict": f"return {{'out': {kept}, 'more': [{other}, None]}}",
        "own loss": f"return ({kept}).square().mean()",
    }[form]
    writer.statements.append(Statement("", text))
    return Body(tuple(writer.statements), form)


def _write_call(writer: Writer, at: int, block: Body) -> None:
    taken = RETURNS[block.form][1]
    call = writer.draw.choice(CALLS)
    feature = "called with more" if "{b}" in call else ""
    writer.write(feature, taken.replace("{call}", call), u=f"self.blocks[{at}]")


def _draw_wiring(draw: random.Random, blocks: Sequence[Body], sequential: bool) -> list[Any]:
    count = len(blocks)
    found = []
    for at, block in enumerate(blocks):
        if any("self.owner" in statement.text for statement in block.statements):
            found.append(("", f"m[{at}].owner = [root]"))
    names = [name for name in SHARING if not (sequential and name == "shared scale")]
    for _ in range(draw.choice([0, 0, 0, 1, 1, 2])):
        name = draw.choice(names)
        j, i = sorted(draw.sample(range(count), 2))
        found.append((name, SHARING[name].format(i=i, j=j)))
    for _ in range(draw.choice([0, 0, 0, 1, 1, 2])):
        name = draw.choice(list(HOOKS))
        where = f"m[{draw.randrange(count)}]"
        places = [where, where, f"{where}.lin", f"{where}.inner"] + ["root"] * (not sequential)
        found.append((name, HOOKS[name].format(m=draw.choice(places))))
    return found


def draw_forward(draw: random.Random, least: int) -> Forward:
    """Draw a model with at least so many blocks."""
    sequential = draw.random() < 0.25
    count = max(least, 2) + draw.choice([0, 0, 1, 2])
    blocks = tuple(_draw_block(draw, sequential) for _ in range(count))
    if sequential:  # the last block returns a tensor, and the model needs something to train
        last = Statement("", "return self.lin(x)")
        blocks = (*blocks[:-1], Body((last,), "tensor"))
    body = None if sequential else _draw_model(draw, blocks)
    return Forward(blocks, body, tuple(_draw_wiring(draw, blocks, sequential)))
