"""Small training scripts, each written in three ways, to compare the numbers that they produce.

unsplit      the model itself
pipelining   torch.distributed.pipelining as its documentation shows it, one process per stage
penstock     `penstock.Pipe` in one process

`python benchmarks/trust.py` runs all of them and prints a table of the results.
"""

from three_ways.refused import Larger, Skip, Smaller, Uneven
from three_ways.replicas import Replicas
from three_ways.row import Row
from three_ways.silent import Accumulate, Clip, Evaluate, Statistics, Table, Tie

SILENT: tuple[Row, ...] = (
    Evaluate(),
    Accumulate(),
    Tie(),
    Table(),
    Replicas(),
    Statistics(),
    Clip(),
)
REFUSED: tuple[Row, ...] = (Skip(), Uneven(), Smaller(), Larger())
