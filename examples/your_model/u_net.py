"""Train an ordinary U-Net, whose decoder reads the stored activations of its encoder.

cd examples
python -m your_model.u_net
penstock check your_model.u_net:make --schedules 1f1b,zb-v
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock


class Block(nn.Module):
    """Two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))))


class UNet(nn.Module):
    """A U-Net without any code for pipelines."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32), bottom: int = 64) -> None:
        super().__init__()
        wider = (*widths[1:], bottom)
        self.down = nn.ModuleList(map(Block, (1, *widths[:-1]), widths))
        self.bottom = Block(widths[-1], bottom)
        self.up = nn.ModuleList(
            Block(below + width, width)
            for below, width in zip(reversed(wider), reversed(widths), strict=True)
        )
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([functional.interpolate(x, size=skip.shape[2:]), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits


def pictures(rows: int, pixels: int = 16) -> tuple[Tensor, Tensor]:
    """Return noise images with a bright square each, and the masks of the squares."""
    mask = torch.zeros(rows, 1, pixels, pixels)
    for row in mask:
        top, left = torch.randint(pixels // 2, (2,)).tolist()
        row[:, top : top + pixels // 2, left : left + pixels // 2] = 1.0
    return mask + 0.5 * torch.randn_like(mask), mask


def make() -> tuple[UNet, Tensor, Tensor, nn.Module]:
    """Return model, batch, target and loss for `penstock check`."""
    torch.manual_seed(0)
    images, masks = pictures(rows=6)
    return UNet(), images, masks, nn.BCEWithLogitsLoss()


def main(steps: int = 30) -> None:
    """Train with zb-v: its first and last stage share a rank, so long skips stay local."""
    torch.set_num_threads(1)
    model, images, _, loss_fn = make()
    pipe = penstock.Pipe(
        model, chunks=4, stages=4, devices=["cpu"] * 2, example=images, schedule="zb-v"
    )
    print(pipe.summary())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        images, masks = pictures(rows=8)
        result = pipe.step(images, target=masks, loss_fn=loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {result.loss:.3f}")


if __name__ == "__main__":
    main()
