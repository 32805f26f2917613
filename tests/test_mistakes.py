"""Typical mistakes: each error names the mistake and the cure.

The code of a row is run as it is shown on docs/mistakes.md, which this module writes:

    python -m tests.test_mistakes
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock import Pipe

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"
MARKER = "<!-- python -m tests.test_mistakes -->"
LONGEST = 330  # characters of a message on the page


class Mistake(NamedTuple):
    """Code with a mistake, its error, and what the error or its note has to say."""

    code: str
    error: type[Exception]
    mistake: str
    cure: str
    environment: dict[str, str] = {}  # noqa: RUF012 (it is never changed)
    shown: str = ""  # what the page shows in place of code that needs GPUs


TYPE, VALUE, RUN, ATTRIBUTE = TypeError, ValueError, RuntimeError, AttributeError
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}

TABLE: dict[str, list[Mistake]] = {
    "The call": [
        Mistake("pipe.step(x, y)", TYPE, "2 inputs were passed by position", "step(x, target=y)"),
        Mistake("pipe(x, y)", TYPE, "the forward takes 1", "A pipe takes what the model takes"),
        Mistake("pipe.step(x, y, target=y)", TYPE, "2 inputs were passed", "Leave out the others"),
        Mistake("pipe.step((x, y))", TYPE, "one tuple of 2 values", "x, y = batch"),
        Mistake("pipe([x, y])", TYPE, "one list of 2 values", "pipe(*batch)"),
        Mistake("llm.step({'ids': x, 'labels': y})", TYPE, "one dict with the keys", "(**batch)"),
        Mistake(
            "pipe.step(list(x), target=y)", VALUE, "one list of 8 tensors", "torch.stack(rows)"
        ),
        Mistake("pipe.step(x, labels=y)", TYPE, "no layer takes 'labels'", "called target="),
        Mistake("llm.step(ids=x, label=y)", TYPE, "no input 'label'", "Did you mean labels?"),
        Mistake("gpt2.step(ids, ids)", ATTRIBUTE, "'past_key_values'", "step(x, labels=y)"),
        Mistake("gpt2(ids, ids)", ATTRIBUTE, "'past_key_values'", "pipe(x, labels=y)"),
        Mistake("bert.step(ids, ids)", RUN, "'attention_mask' of the forward", "labels=y"),
        Mistake("bert.step(ids)", RUN, "given none", "pipe.step(x, labels=y)"),
        Mistake("bert.step(ids, target=ids)", RUN, "given 'target'", "pipe.step(x, labels=y)"),
        Mistake("t5.step(ids, ids)", VALUE, "'attention_mask' of the forward", "labels=y"),
        Mistake("pipe.step(x)", TYPE, "the step has none", "pipe.step(x, target=y)"),
        Mistake("pipe.step(loader)", TYPE, "a DataLoader", "for x, y in loader"),
        Mistake("pipe.step(x.numpy(), target=y)", TYPE, "An array is not split", "torch.as_tensor"),
        Mistake(
            "pipe.step(x, target=y.tolist())", VALUE, "a list of 8 plain values", "Pass a tensor"
        ),
        Mistake(
            "pipe.step(torch.distributions.Normal(x, 1.0), target=y)",
            TYPE,
            "A Normal has tensors in its attributes",
            "a dict or a dataclass",
        ),
        Mistake("pipe.step(x.to_sparse(), target=y)", VALUE, "a sparse_coo tensor", "x.to_dense()"),
        Mistake(
            "pipe.step('some text', target=y)", TYPE, "but got str", "Pass the batch as tensors"
        ),
        Mistake("pipe.step(torch.tensor(1.0), target=y)", RUN, "No input has a dim", "x[None]"),
        Mistake(
            "Pipe(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), 8)(x)",
            VALUE,
            "Micro-batch 0 has one of the 8 rows",
            "fewer than chunks=8",
        ),
        Mistake(
            "pipe.step(x.double(), target=y)", RUN, "inputs are torch.float64", "Cast the batch"
        ),
        Mistake("pipe.step(x.to('meta'), target=y)", VALUE, "an input is on meta", "x.to('cpu')"),
        Mistake("model.to('meta'); pipe.step(x, target=y)", RUN, "was moved after", "Move nothing"),
        Mistake(
            "pipe.step(x, target=y, optimizer=other)", VALUE, "none of the par", "after the pipe"
        ),
        Mistake("pipe.step(x, target=y, scaler=128.0)", TYPE, "not float", "use scale="),
    ],
    "The loss": [
        Mistake("lossless.step(x, target=y)", RUN, "without a loss_fn", "Pass loss_fn= to Pipe"),
        Mistake("Pipe(model, loss_fn=nn.MSELoss)", TYPE, "not <class", "a loss object such as"),
        Mistake("Pipe(model, loss_fn='mse')", TYPE, "not 'mse'", "Pass a function"),
        Mistake(
            "pipe.step(x, target=y, loss_fn=lambda output: output.sum())",
            TYPE,
            "does not take two arguments",
            "leave target= out",
        ),
        Mistake(
            "pipe.step(x, target=y, loss_fn=target_first)", RUN, "(target, output)", "output first"
        ),
        Mistake(
            "pipe.step(x, target=y.float())", RUN, "a tensor of torch.float32", "target.long()"
        ),
        Mistake("pipe.step(x, target=y.int())", RUN, "a tensor of torch.int32", "target.long()"),
        Mistake("pipe.step(x, target=y[:, None])", RUN, "shape (4, 1)", "target.squeeze(-1)"),
        Mistake("pipe.step(x, target=y + 5)", IndexError, "The labels go up to 7", "3 classes"),
        Mistake(
            "pipe.step(x, target=y[:4])", VALUE, "8 rows, and the target 4", "a target for each row"
        ),
        Mistake(
            "pipe.step(x, target=y, loss_fn=nn.CrossEntropyLoss(reduction='none'))",
            RUN,
            "loss_fn returned shape (4,)",
            "Reduce it to a scalar",
        ),
        Mistake(
            "loss = pipe(x).square().sum(); loss.backward(); loss.backward()",
            RUN,
            "a second time",
            "retain_graph=True",
        ),
    ],
    "The result of a step": [
        Mistake(
            "penstock.draw.text(pipe.step(x, target=y))",
            ATTRIBUTE,
            "no attribute 'ranks'",
            "draw.text(result.timeline)",
        ),
        Mistake("pipe.step(x, target=y).backward()", ATTRIBUTE, "has run the", "optimizer.step()"),
        Mistake("pipe.step(x, target=y).item()", ATTRIBUTE, "no attribute", "result.loss.item()"),
        Mistake("loss, output = pipe.step(x, target=y)", TYPE, "not a tuple", "result.outputs"),
        Mistake("float(pipe.step(x, target=y))", TYPE, "is not a number", "result.loss.item()"),
        Mistake("0.0 + pipe.step(x, target=y)", TYPE, "is not a number", "result.loss.item()"),
        Mistake("f'{pipe.step(x, target=y):.3f}'", TYPE, "is not a number", "result.loss.item()"),
        Mistake("pipe.step(x, target=y).logits", ATTRIBUTE, "'logits'", "outputs=True"),
    ],
    "Making a pipe": [
        Mistake("Pipe([nn.Linear(4, 4), nn.ReLU()])", TYPE, "not list", "nn.Sequential(*layers)"),
        Mistake("Pipe(nn.Linear(4, 4) for _ in range(3))", TYPE, "not generator", "Sequential(*"),
        Mistake("Pipe(nn.ModuleList([nn.Linear(4, 4)]))", TYPE, "has no forward", "Sequential(*"),
        Mistake("Pipe(Net, stages=2, example=x)", TYPE, "not type", "Net(...)"),
        Mistake("Pipe(lambda: model)", TYPE, "not function", "Call the function"),
        Mistake("Pipe('gpt2')", TYPE, "not str", "Load the model first"),
        Mistake("Pipe(pipe, stages=2)", TYPE, "a pipe already", "from the model itself"),
        Mistake("Pipe(torch.compile(Net()), stages=2, example=x)", TYPE, "compiled", "itself"),
        Mistake("Pipe(dispatched, stages=2, example=x)", RUN, "device_map=", "without device_map"),
        Mistake("Pipe(model, chunks=2.0)", VALUE, "not 2.0", "a positive integer"),
        Mistake("Pipe(model, chunks=-2)", VALUE, "not -2", "a positive integer"),
        Mistake("Pipe(model, stages=9)", VALUE, "3 units cannot", "1 to 3 stages"),
        Mistake("Pipe(model, stages=2.0)", VALUE, "not 2.0", "a number of stages"),
        Mistake("Pipe(model, stages=2, checkpoint=True)", VALUE, "not True", "always, except_last"),
        Mistake("Pipe(model, stages=2, balance=[2, 1])", VALUE, "balance is what", "stages=[2, 1]"),
        Mistake("Pipe(model, stages=2, runtime='cuda')", VALUE, "'cuda'", "'threads'"),
        Mistake("Pipe(model=model, stages=2)", TYPE, "'model'", "Pipe(model, ...)"),
        Mistake("Pipe(model, stage=2)", TYPE, "'stage'", "Did you mean stages?"),
        Mistake("Pipe(model, num_stages=2)", TYPE, "'num_stages'", "stages="),
        Mistake("Pipe(model, stages=2, criterion=functional.mse_loss)", TYPE, "'crit", "loss_fn="),
    ],
    "Devices": [
        Mistake("Pipe(model, devices=2)", VALUE, "not their number, 2", "Write stages=2"),
        Mistake("Pipe(model, devices='cpu')", VALUE, "not 'cpu'", "['cpu', 'cpu']"),
        Mistake("Pipe(model, devices=['gpu:0', 'gpu:1'])", VALUE, "'gpu:0' is not a", "'cuda:0'"),
        Mistake(
            "Pipe(model, devices=['cuda:7', 'cpu'])", VALUE, "'cuda:7'", "devices that PyTorch"
        ),
        Mistake("Pipe(model, device='cuda')", TYPE, "'device'", "devices="),
        Mistake("pipe.to('meta')", TYPE, "cannot be moved", "Make another Pipe"),
    ],
    "The example": [
        Mistake(
            "Pipe(Net(), stages=2)", VALUE, "has to be traced once", "Pass a batch as example="
        ),
        Mistake("Pipe(Net(), stages=2, example=(x, y))", TYPE, "2 values", "Leave the target out"),
        Mistake("Pipe(Net(), stages=2, example=[x, y])", TYPE, "a list", "Pass a tuple"),
        Mistake("Pipe(Net(), stages=2, example={'ids': x})", TYPE, "has 'ids'", "inputs are: x"),
        Mistake(
            "Pipe(Net(), stages=2, example=x.shape)", TYPE, "of type Size", "torch.randn(8, 32)"
        ),
        Mistake("Pipe(Net(), stages=2, example=loader)", TYPE, "DataLoader", "next(iter(loader))"),
        Mistake("Pipe(Net(), stages=2, example=x.numpy())", TYPE, "ndarray", "torch.as_tensor"),
    ],
    "Schedules": [
        Mistake(
            "Pipe(model, stages=2, schedule='1f1bb')", VALUE, "no schedule '1f1bb'", "mean 1f1b"
        ),
        Mistake("Pipe(model, stages=2, schedule='zero-bubble')", VALUE, "no schedule", "zb-h1?"),
        Mistake("Pipe(model, stages=2, schedule=1)", VALUE, "not 1", "schedule='1f1b'"),
        Mistake("Pipe(model, stages=2, schedule=gpipe)", VALUE, "ScheduleGPipe", "'gpipe'"),
        Mistake("Pipe(model, stages=3, devices=['cpu'] * 2)", VALUE, "do not divide", "a multiple"),
    ],
    "Words of other libraries": [
        Mistake("pipe.module.state_dict()", ATTRIBUTE, "'module'", "pipe.state_dict()"),
        Mistake("pipe.generate(x)", TYPE, "a Sequential has none", "a generate of its own"),
        Mistake(
            "pipe.train_batch(iter(loader))", ATTRIBUTE, "'train_batch'", "pipe.step(x, target"
        ),
        Mistake("pipe.backward(pipe(x).sum())", ATTRIBUTE, "'backward'", "loss.backward()"),
        Mistake("pipe.save_checkpoint('run')", ATTRIBUTE, "'save_checkpoint'", "pipe.save(folder"),
        Mistake("pipe.fit(loader)", ATTRIBUTE, "'fit'", "pipe.step(x, target=y)"),
        Mistake("gpt2.resize_token_embeddings(8)", ATTRIBUTE, "'resize_tok", "write model.resize"),
        Mistake(
            "from penstock import PipelineStage", ImportError, "no PipelineStage", "Pipe(model"
        ),
        Mistake("from penstock import ScheduleGPipe", ImportError, "no ScheduleGPipe", "schedule="),
        Mistake("from penstock import PipelineModule", ImportError, "no PipelineM", "Pipe(model"),
        Mistake("Pipe(stage)", TYPE, "not PipelineStage", "Pass the whole model"),
        Mistake("pipe.step(x, target=y, losses=[])", TYPE, "'losses'", "result.loss"),
        Mistake("pipe.step(x, target=y, n_microbatches=4)", TYPE, "'n_micro", "Pipe(chunks=...)"),
    ],
    "Setting attributes": [
        Mistake("pipe.train = True", TYPE, "is a method", "pipe.train(...)"),
        Mistake("pipe.stages = 4", VALUE, "would change nothing", "Make another Pipe"),
        Mistake("pipe.schedule = '1f1b'", VALUE, "would change nothing", "Make another Pipe"),
        Mistake("pipe.chunks = 0", VALUE, "not 0", "a positive integer"),
    ],
    "Several processes and wrappers": [
        Mistake("penstock.init()", RUN, "not started by torchrun", "Start it with"),
        Mistake(
            "Pipe(model, mesh='pp')", VALUE, "needs torch.distributed", "penstock.init() first"
        ),
        Mistake(
            "Pipe(model, stages=2)",
            UserWarning,
            "2 processes",
            "mesh=penstock.init()",
            TORCHRUN,
            "Pipe(model, stages=2)  # torchrun",
        ),
        Mistake(
            "pipe._replicate_for_data_parallel()",
            RUN,
            "nn.DataParallel",
            "Leave the wrapper out",
            shown="nn.DataParallel(pipe)(x)",
        ),
        Mistake(
            "DistributedDataParallel(pipe); pipe.step(x, target=y)",
            RUN,
            "wrapped in DistributedDataParallel",
            "Call the wrapper",
        ),
    ],
    "Saving and loading": [
        Mistake("pipe.load('no-such-folder')", VALUE, "does not exist", "Pass a folder written by"),
        Mistake(
            "torch.save(model.state_dict(), 'model.pt'); pipe.load('model.pt')",
            RUN,
            "a file of torch.save",
            "pipe.load_state_dict(torch.load",
        ),
        Mistake("pipe.load_state_dict(prefixed)", RUN, "begin with 'module.'", "Remove it"),
        Mistake("pipe.save('run', optimiser=other)", TYPE, "'optimiser'", "mean optimizer?"),
        Mistake("pipe.save_pretrained('run')", TYPE, "transformers", "pipe.save"),
    ],
}


class Net(nn.Module):
    """A model with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class LanguageModel(Net):
    """A model that computes its own loss."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(ids)
        return output if labels is None else (functional.cross_entropy(output, labels), output)


def target_first(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def build_dispatched_model() -> nn.Module:
    """Return a model as accelerate leaves it after `device_map=`, without a second device."""
    model = Net()
    for layer in model.modules():
        layer._hf_hook = SimpleNamespace(execution_device="cpu")  # type: ignore[assignment]
    return model


def build_pretrained(name: str) -> Pipe:
    """Return a pipe of a tiny model of transformers, or skip the test."""
    pytest.importorskip("transformers")
    from tests.hugging_face import tiny

    options = {} if name == "bert" else {"use_cache": False}
    example = {"input_ids": IDS, "labels": IDS}
    return Pipe(getattr(tiny, name)(**options), **SIZES, example=example)


IDS = torch.arange(32).reshape(4, 8)
X, Y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
SIZES: dict[str, Any] = {"chunks": 2, "stages": 2, "devices": ["cpu", "cpu"]}
# Names that the code of a row may use, and that take a while to make.
ON_DEMAND: dict[str, Callable[[], Any]] = {
    "bert": lambda: build_pretrained("bert"),
    "dispatched": build_dispatched_model,
    "gpipe": lambda: ScheduleGPipe.__new__(ScheduleGPipe),  # making one needs process groups
    "gpt2": lambda: build_pretrained("gpt2"),
    "llm": lambda: Pipe(LanguageModel(), **SIZES, example={"ids": X, "labels": Y}),
    "lossless": lambda: Pipe(Net(), **SIZES, example=X),
    "other": lambda: torch.optim.SGD(Net().parameters(), lr=0.1),
    "stage": lambda: PipelineStage.__new__(PipelineStage),
    "t5": lambda: build_pretrained("t5"),
}


def build_namespace(code: str) -> dict[str, Any]:
    """Return the names that the code of a row uses."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "Net": Net,
        "Pipe": Pipe,
        "functional": functional,
        "ids": IDS,
        "loader": DataLoader(TensorDataset(X, Y), batch_size=4),
        "model": model,
        "nn": nn,
        "penstock": penstock,
        "pipe": Pipe(model, **SIZES, loss_fn=nn.CrossEntropyLoss()),
        "prefixed": {f"module.{key}": value for key, value in model.state_dict().items()},
        "target_first": target_first,
        "torch": torch,
        "x": X,
        "y": Y,
        **{name: build() for name, build in ON_DEMAND.items() if name in code},
    }


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    old = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old)


@contextmanager
def one_process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def raise_error(row: Mistake) -> BaseException:
    """Run the code of a row in the current folder, and return its error."""
    namespace = build_namespace(row.code)
    needs_group = "Distributed" in row.code
    with (
        environment(row.environment),
        patch.object(sys, "argv", ["train.py"]),
        one_process_group() if needs_group else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error" if issubclass(row.error, Warning) else "ignore")
        with pytest.raises(row.error) as caught:
            exec(compile(row.code, "mistake", "exec"), namespace)
    return caught.value


def format_row(row: Mistake, error: BaseException) -> str:
    """Return the line of the page. The text of PyTorch's own errors depends on its release."""
    hint = getattr(error, "penstock_hint", "")
    is_of_torch = type(error) in (RuntimeError, TypeError, IndexError, NotImplementedError)
    text = "" if is_of_torch else str(error).splitlines()[0]
    text = text.replace(f"{Path.cwd()}{os.sep}", "")
    if len(text) > LONGEST:
        text = f"{text[:LONGEST].rpartition(' ')[0]} ..."
    messages = [f"`{part}`" for part in (text, hint) if part] or ["PyTorch's own message"]
    return f"| `{row.shown or row.code}` | {type(error).__name__}: {' '.join(messages)} |"


ROWS = [pytest.param(row, id=row.shown or row.code) for rows in TABLE.values() for row in rows]


@pytest.mark.parametrize("row", ROWS)
def test_error_names_the_mistake_and_the_cure(
    row: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = raise_error(row)
    lines = [str(error).splitlines()[0], *getattr(error, "__notes__", [])]
    assert any(row.mistake in line for line in lines), lines
    assert any(row.cure in line for line in lines), lines
    assert format_row(row, error) in PAGE.read_text(), "run python -m tests.test_mistakes"


def test_page_has_a_line_for_each_of_more_than_forty_mistakes() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) > 40


def write_page() -> None:
    """Write the tables of the page, below its introduction."""
    introduction, marker, _ = PAGE.read_text().partition(MARKER)
    parts = [introduction + marker]
    for heading, rows in TABLE.items():
        lines = [format_row(row, raise_error(row)) for row in rows]
        parts.append("\n".join([f"## {heading}\n", "| you write | you get |", "|---|---|", *lines]))
    PAGE.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    with TemporaryDirectory() as folder, chdir(folder):
        write_page()
