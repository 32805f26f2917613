"""Train a small transformer over several processes, and compare it with the unsplit model.

    torchrun --nproc-per-node 2 examples/train_processes.py --check

With data parallelism, two pipes of two ranks each:

    torchrun --nproc-per-node 4 examples/train_processes.py --dp 2 --check

With checkpoints: after a kill, training resumes from the last save, also with more or fewer ranks:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_processes.py --save out/run

With --meta, no rank ever holds the whole model. The code is the same on all ranks, and on CPUs and
GPUs.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import penstock

LETTERS, WIDTH, HEADS, CONTEXT = 32, 32, 4, 16
ROWS = 16  # rows of a batch, over all pipes


class Block(nn.Module):
    """A transformer block: causal self-attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.mix(self.norm(x)).view(rows, length, 3, HEADS, -1).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden: Tensor = x + self.join(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        out: Tensor = hidden + self.feed(hidden)
        return out


def transformer(blocks: int) -> nn.Sequential:
    """Build a transformer that maps letters to scores for each next letter."""
    middle = [Block() for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(LETTERS, WIDTH), *middle, nn.Linear(WIDTH, LETTERS))


def next_letter_loss(scores: Tensor, letters: Tensor) -> Tensor:
    """Return the cross-entropy of every letter but the first."""
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), letters[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Return rows of letters that count up by one or by two, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(LETTERS, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 3, (ROWS, 1), generator=generator)
    return (first + stride * torch.arange(CONTEXT)) % LETTERS


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches of a pipe's rows")
    parser.add_argument("--schedule", default="1f1b", help="a schedule that `penstock show` knows")
    parser.add_argument("--dp", type=int, default=1, help="pipes that share each batch")
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device")
    parser.add_argument("--save", metavar="FOLDER", help="save to this folder, and resume from it")
    parser.add_argument(
        "--every", type=int, default=10, help="steps between saves and printed lines"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the unsplit model, in float64"
    )
    return parser.parse_args()


def built(blocks: int, meta: bool) -> nn.Sequential:
    """Build the same model on every rank, with weights or on the meta device."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformer(blocks)


def say(text: str) -> None:
    """Print a line with this rank, in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(f"rank {dist.get_rank()}  {text}\n")
    sys.stdout.flush()


def train(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[penstock.Pipe, float]:
    """Run the remaining steps; return the pipe and the last loss over the whole batch."""
    replica = mesh["dp"].get_local_rank() if args.dp > 1 else 0
    pipe = penstock.Pipe(
        built(args.blocks, args.meta),
        chunks=args.chunks,
        mesh=mesh,
        schedule=args.schedule,
        loss_fn=next_letter_loss,
        audit="off",  # it compares pipes in one process; --check compares this one
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    start, loss = 0, torch.tensor(float("nan"))
    if args.save and penstock.saved(args.save):
        start, loss = pipe.load(args.save, optimizer=optimizer)
        say(f"goes on after step {start}")
    for step in range(start + 1, args.steps + 1):
        letters = batch(step).chunk(args.dp)[replica].to(mesh.device_type)
        optimizer.zero_grad()
        loss = pipe.step(letters, target=letters).loss
        optimizer.step()
        if step % args.every == 0 or step == args.steps:
            say(f"step {step}  loss {loss:.4f}")
            if args.save:
                pipe.save(args.save, optimizer=optimizer, extra=(step, float(loss)))
    return pipe, float(loss)


def compare(args: argparse.Namespace, pipe: penstock.Pipe, loss: float) -> bool:
    """Train the unsplit model, and return whether its loss and this rank's weights match."""
    model = built(args.blocks, args.meta)
    if args.meta:  # a pipe with one stage initializes the same weights
        model = nn.Sequential(*penstock.Pipe(model, stages=1, devices=["cpu"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        expected = next_letter_loss(model(batch(step)), batch(step))
        expected.backward()
        optimizer.step()
    unsplit = dict(model.named_parameters())
    gaps = [(unsplit[n] - p.cpu()).abs().max().item() for n, p in pipe.named_parameters()]
    gap = max([abs(expected.item() - loss), *gaps])
    verdict = "the same as" if gap < 1e-10 else "NOT the same as"
    say(f"{verdict} the unsplit model, to {gap:.0e}")
    return gap < 1e-10


def main() -> None:
    """Train, and compare with the unsplit model under --check."""
    args = arguments()
    mesh = penstock.init(dp=args.dp)
    if args.check:
        torch.set_default_dtype(torch.float64)
    pipe, loss = train(args, mesh)
    if args.check and not compare(args, pipe, loss):
        sys.exit(1)


if __name__ == "__main__":
    main()
