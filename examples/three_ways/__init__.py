"""Small training scripts, each written three ways, to see whether all give the same numbers.

unsplit      the model itself
pipelining   torch.distributed.pipelining, as its documentation has it: a process for each stage
penstock     `penstock.Pipe`, in one process

`python benchmarks/trust.py` runs them and prints what each gives.
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
