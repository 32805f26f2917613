"""`penstock.check`: compare a pipe with the unsplit model, on the user's own model and batch.

In:  a model, a batch, a loss, and the schedules, checkpoint modes and runtimes to try.
Out: a `Report` with one `Run` per combination: compared, refused or failed; and hints on the cause.

Everything runs on copies, in float64 on the CPU. In reading order:

    check.py      `check` itself: the loop over all combinations
    case.py       what is checked: `CheckedModel`, a copy of model, batch and loss
    reference.py  the unsplit model: what it computes on the batch or on its micro-batches
    trial.py      one pipe: two training steps and eval mode, compared; and its peak memory
    report.py     the results, the table that is printed, `Mismatch`
    hints.py      why a pipe differs: a few more runs of the unsplit model find the layer or input

The reference is the unsplit model on the whole batch where that is possible. A model with BatchNorm
in training mode, or one that draws random numbers, computes something else on a micro-batch. Its
reference runs micro-batch by micro-batch, with the random numbers that the pipe would draw.
"""
