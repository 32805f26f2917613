"""Train a model of the GPipe and torchgpipe papers on random images, in a pipeline.

    python examples/train_images.py --model unet --stages 2 --chunks 4 --steps 5
    python examples/train_images.py --model amoebanet --schedule 1f1b --checkpoint never
    python examples/train_images.py --model resnet101 --stages 4 --virtual 4 --full --batch 128

The default sizes take seconds on a CPU. `--full` builds the models in the sizes of the papers.
`--virtual 4` splits one GPU into four devices.
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
    """A model in two sizes, with its target (bright pixels or a brightness class) and its loss."""

    small: Callable[[], nn.Sequential]
    full: Callable[[], nn.Sequential]
    target: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def bright(images: Tensor) -> Tensor:
    """Return a mask of the pixels that are brighter than the mean of their image."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images.mean(dim=1, keepdim=True) > mean).to(images.dtype)


def brightness_class(images: Tensor) -> Tensor:
    """Return the brightness class of each image within the batch, in classes of equal size."""
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=TASKS, default="unet")
    parser.add_argument("--full", action="store_true", help="use the sizes of the papers")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches")
    parser.add_argument("--schedule", default="gpipe", help="a schedule that `penstock show` knows")
    parser.add_argument(
        "--checkpoint", choices=["always", "except_last", "never"], default="except_last"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image", type=int, default=64, help="pixels per side")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument(
        "--device", default="cpu", help="one device for all ranks, or a list like cuda:0,cuda:1"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks, if it is smaller than that of stages"
    )
    parser.add_argument(
        "--virtual", type=int, metavar="N", help="split cuda:0 into N virtual devices"
    )
    return parser.parse_args()


def made_up(task: Task, batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return noise images of different brightness, and their targets."""
    images = torch.randn(batch, 3, size, size) + torch.randn(batch, 1, 1, 1)
    return images.to(device), task.target(images).to(device)


def main() -> None:
    """Train, and print one line per step."""
    args = arguments()
    task = TASKS[args.model]
    torch.manual_seed(0)
    device_names = args.device.split(",")
    if args.virtual:
        device_names = ["cuda:0"]
        devices = penstock.virtual_devices("cuda:0", args.virtual)
    else:
        devices = (
            device_names * (args.ranks or args.stages) if len(device_names) == 1 else device_names
        )
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
        example=batches(device_names[0])[0],
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=args.rate, momentum=0.9)
    for step in range(1, args.steps + 1):
        images, target = batches(device_names[0])
        start = perf_counter()
        optimizer.zero_grad()
        result = pipe.step(images, target=target)
        optimizer.step()
        print(f"step {step}  loss {result.loss:.4f}  {perf_counter() - start:.2f} s")
    print(pipe)
    print(f"bubble of the last step: {result.timeline.bubble:.1%}")


if __name__ == "__main__":
    main()
