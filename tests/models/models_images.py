"""Architectures that read images, each as its authors would write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- ResNet -------------------------------------------------------------------------------


class Basic(nn.Module):
    """Two convolutions and a shortcut, with in-place ReLUs."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Attributes for layers, a flatten between them."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(width, width, 1)
        self.layer2 = self._layer(width, 2 * width, 2)
        self.layer3 = self._layer(2 * width, 4 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(4 * width, classes)

    def _layer(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(Basic(inputs, outputs, stride), Basic(outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# ---- U-Net, and one that denoises ---------------------------------------------------------


class TwoConvs(nn.Sequential):
    """A level of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips are kept in a list, and popped."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth)]
        self.downs = nn.ModuleList(
            TwoConvs(i, o) for i, o in zip([3, *sizes[:-1]], sizes, strict=True)
        )
        self.middle = TwoConvs(sizes[-1], sizes[-1])
        self.ups = nn.ModuleList()
        self.reduces = nn.ModuleList()
        for size in reversed(sizes):
            self.reduces.append(nn.ConvTranspose2d(size, size, 2, 2))
            self.ups.append(TwoConvs(2 * size, max(size // 2, width)))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for reduce, up in zip(self.reduces, self.ups, strict=True):
            x = reduce(x)
            skip = skips.pop()
            if x.shape[-2:] != skip.shape[-2:]:
                x = F.interpolate(x, size=skip.shape[-2:])
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)


class TimedBlock(nn.Module):
    """A residual block with a time embedding."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(2, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.short(x)


class DiffusionUNet(nn.Module):
    """Sinusoids of the time feed every block; the skips are a stack."""

    def __init__(self, width: int = 4, time: int = 8) -> None:
        super().__init__()
        self.width = width
        self.time_mlp = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList(
            [TimedBlock(width, width, time), TimedBlock(width, 2 * width, time)]
        )
        self.mid = TimedBlock(2 * width, 2 * width, time)
        self.ups = nn.ModuleList(
            [TimedBlock(4 * width, width, time), TimedBlock(2 * width, width, time)]
        )
        self.norm_out = nn.GroupNorm(2, 2 * width)
        self.conv_out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def sinusoids(self, t: Tensor, like: Tensor) -> Tensor:
        half = self.width // 2
        freqs = torch.exp(-torch.arange(half, device=t.device, dtype=like.dtype) * 2.0)
        angles = t[:, None].to(like.dtype) * freqs[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, sample: Tensor, timestep: Tensor | int) -> dict[str, Tensor]:
        if not torch.is_tensor(timestep):
            timestep = torch.full((sample.shape[0],), timestep, device=sample.device)
        time = self.time_mlp(self.sinusoids(timestep, sample))
        h = self.conv_in(sample)
        stack = [h]
        for down in self.downs:
            h = down(h, time)
            stack.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.mid(h, time)
        for up in self.ups:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = up(torch.cat((h, stack.pop()), dim=1), time)
        h = torch.cat((h, stack.pop()), dim=1)
        return {"sample": self.conv_out(F.silu(self.norm_out(h)))}


# ---- DenseNet -----------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """Takes the list of all earlier outputs."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, before: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(before, 1))))


class DenseBlock(nn.ModuleDict):
    """Layers by name; each sees the outputs of all before it."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + i * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Dense blocks with transitions between them."""

    def __init__(self, growth: int = 3, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.block1 = DenseBlock(3, width, growth)
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width + 3 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(width + 3 * growth, width, 1, bias=False),
            nn.AvgPool2d(2, 2),
        )
        self.block2 = DenseBlock(3, width, growth)
        self.norm5 = nn.BatchNorm2d(width + 3 * growth)
        self.classifier = nn.Linear(width + 3 * growth, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transition(self.block1(self.conv0(x)))
        x = F.relu(self.norm5(self.block2(x)), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1)).flatten(1)
        return self.classifier(x)


# ---- a detector ---------------------------------------------------------------------------


class Pyramid(nn.Module):
    """A feature pyramid: lateral convolutions, with upper levels added to lower ones."""

    def __init__(self, sizes: list[int], width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(size, width, 1) for size in sizes)
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in sizes)

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        names, values = list(maps), list(maps.values())
        last = self.inner[-1](values[-1])
        results = [self.outer[-1](last)]
        for level in range(len(values) - 2, -1, -1):
            lateral = self.inner[level](values[level])
            last = lateral + F.interpolate(last, size=lateral.shape[-2:], mode="nearest")
            results.insert(0, self.outer[level](last))
        return dict(zip(names, results, strict=True))


class Detector(nn.Module):
    """A backbone, a pyramid, and two heads that run on every level."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "c2": nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()),
                "c3": nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()),
                "c4": nn.Sequential(nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.ReLU()),
            }
        )
        self.fpn = Pyramid([width, 2 * width, 4 * width], width)
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.scores = nn.Conv2d(width, classes, 1)
        self.boxes = nn.Conv2d(width, 4, 1)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])

    def forward(self, images: Tensor) -> dict[str, Any]:
        x, maps = images, {}
        for name, layer in self.body.items():
            x = layer(x)
            maps[name] = x
        logits, deltas = [], []
        for scale, feature in zip(self.scales, self.fpn(maps).values(), strict=True):
            shared = self.tower(feature)
            logits.append(self.scores(shared).flatten(2).transpose(1, 2))
            deltas.append((self.boxes(shared) * scale).exp().flatten(2).transpose(1, 2))
        return {
            "logits": torch.cat(logits, dim=1),
            "boxes": torch.cat(deltas, dim=1),
            "levels": [level.shape[1] for level in logits],
        }
