"""Train a model of the papers on made-up images, in a pipeline.

    python examples/train_images.py --model unet --stages 2 --chunks 4 --steps 5
    python examples/train_images.py --model amoebanet --schedule 1f1b --checkpoint never
    python examples/train_images.py --model resnet101 --stages 4 --virtual 4 --full --batch 128

The default sizes take seconds on a CPU; `--full` makes the papers' models. `--virtual 4` cuts one
GPU into four devices, a stage each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from amoebanet import amoebanet_d
from resnet101 import resnet101
from torch import Tensor, nn
from torch.nn import functional
from unet import unet

import penstock

CLASSES = 10


class Task(NamedTuple):
    """A model in two sizes, and what it learns: which pixels are bright, or which class it is."""

    small: Callable[[], nn.Sequential]
    full: Callable[[], nn.Sequential]
    target: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def bright(images: Tensor) -> Tensor:
    """For each pixel, whether it is brighter than the mean of its image."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images.mean(dim=1, keepdim=True) > mean).to(images.dtype)


def brightness_class(images: Tensor) -> Tensor:
    """For each image, how bright it is compared with the others, in classes of equal size."""
    order = images.mean(dim=(1, 2, 3)).argsort().argsort()
    return order * CLASSES // len(images)


TASKS = {
    "unet": Task(
        partial(unet, B=2, C=8, levels=3),
        unet,
        bright,
        functional.binary_cross_entropy_with_logits,
    ),
    "resnet101": Task(
        partial(resnet101, [1, 1, 2, 1], width=8, classes=CLASSES),
        partial(resnet101, classes=CLASSES),
        brightness_class,
        functional.cross_entropy,
    ),
    "amoebanet": Task(
        partial(amoebanet_d, L=3, D=16, classes=CLASSES),
        partial(amoebanet_d, classes=CLASSES),
        brightness_class,
        functional.cross_entropy,
    ),
}


def arguments() -> argparse.Namespace:
    """What to train, and how it is cut."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=TASKS, default="unet")
    parser.add_argument("--full", action="store_true", help="the papers' size")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches")
    parser.add_argument("--schedule", default="gpipe", help="a name that `penstock show` knows")
    parser.add_argument(
        "--checkpoint", choices=["always", "except_last", "never"], default="except_last"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image", type=int, default=64, help="pixels a side")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--device", default="cpu", help="one for every rank, or cuda:0,cuda:1")
    parser.add_argument("--ranks", type=int, help="if fewer than stages, as for interleaved")
    parser.add_argument("--virtual", type=int, metavar="N", help="N devices cut out of cuda:0")
    return parser.parse_args()


def made_up(task: Task, batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Noise of different brightness, and what is to be learned about it."""
    images = torch.randn(batch, 3, size, size) + torch.randn(batch, 1, 1, 1)
    return images.to(device), task.target(images).to(device)


def main() -> None:
    """Train, a line a step."""
    args = arguments()
    task = TASKS[args.model]
    torch.manual_seed(0)
    names = args.device.split(",")
    if args.virtual:
        names = ["cuda:0"]
        devices = penstock.virtual_devices("cuda:0", args.virtual)
    else:
        devices = names * (args.ranks or args.stages) if len(names) == 1 else names
    batches = partial(made_up, task, args.batch, args.image)
    pipe = penstock.Pipe(
        task.full() if args.full else task.small(),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        stages=args.stages,
        devices=devices,
        schedule=args.schedule,
        loss_fn=task.loss,
        balance="time",
        example=batches(names[0])[0],
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=args.rate, momentum=0.9)
    for step in range(1, args.steps + 1):
        images, target = batches(names[0])
        start = perf_counter()
        optimizer.zero_grad()
        result = pipe.step(images, target=target)
        optimizer.step()
        print(f"step {step}  loss {result.loss:.4f}  {perf_counter() - start:.2f} s")
    print(pipe)
    print(f"bubble of the last step: {result.timeline.bubble:.1%}")


if __name__ == "__main__":
    main()
