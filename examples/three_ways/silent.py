"""Scripts that run without an error, but give wrong numbers, with torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_

from penstock import NoChunk, Pipe
from three_ways.row import (
    CHUNKS,
    Found,
    Row,
    batch,
    gradients,
    my_stage,
    network,
    train,
    two_ranks,
)


class Evaluate(Row):
    """Evaluation with a smaller last batch, as from any data loader without `drop_last`."""

    title = "evaluation, the last batch is smaller"
    compared = "predictions"

    def batches(self) -> list[Tensor]:
        return [batch(16)[0], batch(12, seed=2)[0]]

    def unsplit(self) -> Found:
        model = network().eval()
        with torch.no_grad():
            return {"predictions": torch.cat([model(x) for x in self.batches()])}

    def pipelining(self) -> Found:
        stage = my_stage(network().eval())
        schedule = ScheduleGPipe(stage, CHUNKS)
        with torch.no_grad():
            if stage.is_first:
                predictions = [schedule.eval(x) for x in self.batches()]
            else:
                predictions = [schedule.eval() for _ in self.batches()]
        return {"predictions": torch.cat(predictions)} if stage.is_last else {}

    def penstock(self) -> Found:
        pipe = Pipe(network(), CHUNKS, stages=2, devices=["cpu", "cpu"]).eval()
        with torch.no_grad():
            return {"predictions": torch.cat([pipe(x) for x in self.batches()])}


class Accumulate(Row):
    """Gradient accumulation: two steps without `zero_grad` in between."""

    title = "two steps, then the optimizer"
    compared = "gradients"

    def unsplit(self) -> Found:
        model = network()
        for seed in (1, 2):
            x, target = batch(16, seed)
            mse_loss(model(x), target).backward()
        return gradients(model)

    def pipelining(self) -> Found:
        stage = my_stage(network())
        schedule = Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss)
        for seed in (1, 2):
            train(schedule, *batch(16, seed))
        return gradients(stage.submod)

    def penstock(self) -> Found:
        pipe = two_ranks(network(), mse_loss, self.schedule)
        for seed in (1, 2):
            x, target = batch(16, seed)
            pipe.step(x, target=target)
        return gradients(pipe)


class Tie(Row):
    """Tied embedding and head of a language model, which are on the first and the last stage."""

    title = "tied embedding and head"
    compared = "gradients"

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), head).double()

    def words(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randint(11, (16,)), torch.randint(11, (16,))

    def unsplit(self) -> Found:
        model = self.model()
        x, target = self.words()
        cross_entropy(model(x), target).backward()
        return gradients(model)

    def pipelining(self) -> Found:
        stage = my_stage(self.model())
        train(Schedule1F1B(stage, CHUNKS, loss_fn=cross_entropy), *self.words())
        return gradients(stage.submod)

    def penstock(self) -> Found:
        pipe = two_ranks(self.model(), cross_entropy, self.schedule)
        x, target = self.words()
        pipe.step(x, target=target)
        return gradients(pipe)


class Embed(nn.Module):
    """A linear layer that adds the position table to each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + positions[: x.size(1)]
        return out


class Table(Row):
    """A keyword tensor without a batch dimension.

    Examples are position tables, rotary angles and biases, sized for the longest sequence.
    """

    title = "a keyword tensor that is no batch"
    compared = "loss, gradients"

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Embed(), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))).double()

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return 16 sequences of length 5, their targets, and a table of 20 positions."""
        torch.manual_seed(1)
        shapes = (16, 5, 6), (16, 5, 3), (20, 8)
        x, target, positions = (torch.randn(shape).double() for shape in shapes)
        return x, target, positions

    def unsplit(self) -> Found:
        model = self.model()
        x, target, positions = self.sequences()
        loss = mse_loss(model[1](model[0](x, positions=positions)), target)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    def pipelining(self) -> Found:
        rank = dist.get_rank()
        share = self.model()[rank]
        stage = PipelineStage(share, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss)
        x, target, positions = self.sequences()
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(x, positions=positions)
        else:
            schedule.step(target=target, losses=losses)
        named = {f"{rank}.{name}": value for name, value in gradients(share).items()}
        return {"loss": torch.stack(losses).mean().detach(), **named} if losses else named

    def penstock(self) -> Found:
        pipe = two_ranks(self.model(), mse_loss, self.schedule)
        x, target, positions = self.sequences()
        result = pipe.step(x, positions=NoChunk(positions), target=target)
        return {"loss": result.loss, **gradients(pipe)}


class Statistics(Row):
    """Running statistics of BatchNorm, which sees one micro-batch at a time in a pipeline.

    For a fair comparison, the unsplit model is trained micro-batch by micro-batch, too.
    """

    title = "BatchNorm, one step"
    compared = "running statistics"

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    def statistics(self, module: nn.Module) -> Found:
        return {name: buffer.double().clone() for name, buffer in module.named_buffers()}

    def unsplit(self) -> Found:
        model = self.model()
        x, target = batch(16)
        for piece, wanted in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            (mse_loss(model(piece), wanted) / CHUNKS).backward()
        return self.statistics(model)

    def pipelining(self) -> Found:
        stage = my_stage(self.model())
        train(Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss), *batch(16))
        return self.statistics(stage.submod)

    def penstock(self) -> Found:
        pipe = two_ranks(self.model(), mse_loss, self.schedule)
        x, target = batch(16)
        pipe.step(x, target=target)
        return self.statistics(pipe)


class Clip(Row):
    """`clip_grad_norm_` as in a plain script, on the parameters that the process holds."""

    title = "clip_grad_norm_"
    compared = "clipped gradients"
    most = 0.1

    def unsplit(self) -> Found:
        model = network()
        x, target = batch(16)
        mse_loss(model(x), target).backward()
        clip_grad_norm_(model.parameters(), self.most)
        return gradients(model)

    def pipelining(self) -> Found:
        stage = my_stage(network())
        train(Schedule1F1B(stage, CHUNKS, loss_fn=mse_loss), *batch(16))
        clip_grad_norm_(stage.submod.parameters(), self.most)
        return gradients(stage.submod)

    def penstock(self) -> Found:
        pipe = two_ranks(network(), mse_loss, self.schedule)
        x, target = batch(16)
        pipe.step(x, target=target)
        pipe.clip_grad_norm_(self.most)
        return gradients(pipe)
