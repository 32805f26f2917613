"""The words of other libraries, each with what to write here.

People come from torch.distributed.pipelining, DeepSpeed, `device_map`, Lightning or their own
training loop, and type the words that they know. An error for one of these says what it is called
here. The page docs/coming-from.md has the same words in tables, and a test compares both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

# ---- names of the package: penstock.X ------------------------------------------------------------

_SCHEDULE = "A schedule is an argument of Pipe, by its name: Pipe(model, schedule='1f1b')."
_LIST_OF_LAYERS = "Write nn.Sequential(layer, layer, ...), and pass it to penstock.Pipe."

PACKAGE_NAMES: Mapping[str, str] = {
    # torch.distributed.pipelining
    "PipelineStage": "penstock.Pipe takes the whole model and makes the stages: Pipe(model, "
    "stages=4, example=batch).",
    "Schedule1F1B": _SCHEDULE,
    "ScheduleDualPipeV": _SCHEDULE,
    "ScheduleGPipe": _SCHEDULE,
    "ScheduleInterleaved1F1B": _SCHEDULE,
    "ScheduleInterleavedZeroBubble": _SCHEDULE,
    "ScheduleLoopedBFS": _SCHEDULE,
    "ScheduleZBVZeroBubble": _SCHEDULE,
    "SplitPoint": "Pipe(model, stages=4, example=batch) chooses where to split, and "
    "stages=[3, 2, 3] says it.",
    "build_stage": "penstock.Pipe makes the stages of a model itself.",
    "pipe_split": "Leave it out of the forward, and pass stages=[3, 2, 3] to penstock.Pipe.",
    "pipeline": "Write penstock.Pipe(model, stages=4, example=batch).",
    # DeepSpeed
    "LayerSpec": _LIST_OF_LAYERS + " Layers on the meta device take no memory until they are "
    "placed.",
    "PipelineModule": "Write penstock.Pipe(model, stages=4), where model is any nn.Module.",
    "TiedLayerSpec": _LIST_OF_LAYERS + " Assign the weight that two layers share: "
    "head.weight = embedding.weight.",
    "initialize": "penstock.init() joins the processes of torchrun; Pipe makes the engine.",
    # torchgpipe, fairscale
    "GPipe": "Write penstock.Pipe(model, chunks=8, schedule='gpipe'), or import it from "
    "penstock.compat.torchgpipe.",
    # accelerate
    "prepare_pippy": "Write penstock.Pipe(model, stages=4, example=batch).",
}

# ---- attributes of a pipe: pipe.X ----------------------------------------------------------------

_STEP = "pipe.step(x, target=y) runs forward, loss and backward of a batch."

PIPE_ATTRIBUTES: Mapping[str, str] = {
    # wrappers of PyTorch
    "module": "A pipe is not a wrapper: it has the model's children, names and state_dict itself. "
    "Write pipe.state_dict(), or use the model that the pipe was made of.",
    # torch.distributed.pipelining
    "build_stage": "A pipe makes its stages itself; pipe.partition shows them.",
    "get_stage_module": "A pipe makes its stages itself; pipe.partition shows them.",
    "n_microbatches": "It is called pipe.chunks.",
    "num_stages": "It is called pipe.stages.",
    "split_gm": "pipe.partition shows the stages.",
    # DeepSpeed
    "backward": _STEP + " After loss = loss_fn(pipe(x), y), call loss.backward().",
    "eval_batch": "Write pipe.step(x, target=y) under torch.no_grad(), or pipe(x).",
    "load_checkpoint": "It is called pipe.load(folder, optimizer).",
    "micro_batches": "It is called pipe.chunks.",
    "save_checkpoint": "It is called pipe.save(folder, optimizer).",
    "set_dataloader": "Your own loop reads the loader: for x, y in loader: pipe.step(x, target=y).",
    "train_batch": _STEP + " The optimizer is yours: call optimizer.step() after it.",
    # Lightning, Keras and others
    "fit": "A pipe is a model, not a trainer. " + _STEP,
    "training_step": _STEP,
    "optimizer": "The optimizer is yours: torch.optim.AdamW(pipe.parameters()).",
}

# ---- arguments of Pipe: Pipe(model, X=...) -------------------------------------------------------

_CHUNKS = "The number of micro-batches is called chunks="
_STAGES = "The number of stages is called stages="
_LOSS = "The loss is called loss_fn="
_DEVICES = "The devices of the ranks are called devices=, a list with one for each rank"
_EXAMPLE = "A batch to trace the model with is called example="

PIPE_ARGUMENTS: Mapping[str, str] = {
    "activation_checkpoint_interval": "Recomputation is called checkpoint=: 'always', "
    "'except_last' or 'never'",
    "args": _EXAMPLE,
    "batch": _EXAMPLE,
    "criterion": _LOSS,
    "device": _DEVICES,
    "device_ids": _DEVICES,
    "device_map": "A pipe places the layers itself: say how many stages there are, with stages=, "
    "or the number of units of each, with stages=[9, 7, 8]",
    "example_inputs": _EXAMPLE,
    "gradient_accumulation_steps": _CHUNKS + ". To accumulate several steps, use "
    "step(scale=1 / steps)",
    "layers": "The first argument is the model: write Pipe(nn.Sequential(*layers), stages=4)",
    "loss": _LOSS,
    "mb_args": _EXAMPLE,
    "mb_kwargs": _EXAMPLE + ", which may be a dict",
    "micro_batches": _CHUNKS,
    "microbatches": _CHUNKS,
    "model": "The model is the first argument: write Pipe(model, ...)",
    "num_chunks": _CHUNKS,
    "num_microbatches": _CHUNKS,
    "num_stages": _STAGES,
    "partition_method": "What the cut balances is called balance=: 'time', 'memory' or "
    "'parameters'",
    "pp_size": _STAGES,
    "sample": _EXAMPLE,
    "split_spec": "Where to split is called stages=: a number, or the units of each stage, "
    "[3, 2, 3]",
    "stage_index": "Each process passes the whole model and mesh=penstock.init(), and takes its "
    "own stages of it",
    "topology": "Several processes are mesh=penstock.init(dp=2) under torchrun",
}

# ---- arguments of a call: pipe.step(X=...) -------------------------------------------------------

_TARGET = "The target of the loss is called target=: pipe.step(x, target=y)"

STEP_ARGUMENTS: Mapping[str, str] = {
    "chunks": "The number of micro-batches belongs to the pipe: Pipe(chunks=...)",
    "criterion": "The loss is called loss_fn=",
    "label": _TARGET,
    "labels": _TARGET,
    "loss": "The loss is called loss_fn=",
    "losses": "The loss is returned: result = pipe.step(x, target=y), then result.loss",
    "n_microbatches": "The number of micro-batches belongs to the pipe: Pipe(chunks=...)",
    "num_microbatches": "The number of micro-batches belongs to the pipe: Pipe(chunks=...)",
    "return_outputs": "It is called outputs=True",
    "target_mbs": _TARGET,
    "targets": _TARGET,
    "y": _TARGET,
}

# ---- attributes of the result of a step: result.X ------------------------------------------------

_RESULT_OUTPUTS = "pipe.step(..., outputs=True) keeps the outputs, as result.outputs"

RESULT_ATTRIBUTES: Mapping[str, str] = {
    "backward": "pipe.step has run the backward. Call optimizer.step() next",
    "cpu": "The loss is result.loss, a tensor without a graph",
    "detach": "The loss is result.loss, a tensor without a graph",
    "item": "The loss is result.loss: write result.loss.item()",
    "logits": _RESULT_OUTPUTS,
    "numpy": "The loss is result.loss, a tensor without a graph",
    "output": _RESULT_OUTPUTS,
    "ranks": "Its timeline is result.timeline: write penstock.draw.text(result.timeline)",
}

# ---- schedules that have other names elsewhere ---------------------------------------------------

SCHEDULE_NAMES: Mapping[str, str] = {
    "afab": "gpipe",
    "dualpipe": "dualpipe-v",
    "fthenb": "gpipe",
    "pipedream": "1f1b",
    "pipedreamflush": "1f1b",
    "vpp": "interleaved",
    "zb": "zb-h1",
    "zb1p": "zb-h1",
    "zb2p": "zb-h2",
    "zbh": "zb-h1",
    "zerobubble": "zb-h1",
    "zerobubblev": "zb-v",
}


# ---- suggestions ---------------------------------------------------------------------------------


def suggest(name: str, advice: Mapping[str, str], known: Iterable[str] = ()) -> str:
    """Return what to write in place of a name, as a sentence, or an empty text.

    Args:
        name: The unknown name.
        advice: The words of other libraries, with what to write here.
        known: The names that exist. The most similar one is suggested.

    >>> suggest("num_stages", PIPE_ARGUMENTS)
    'The number of stages is called stages=.'
    >>> suggest("chunk", PIPE_ARGUMENTS, ["chunks", "stages"])
    'Did you mean chunks?'
    """
    if name in advice:
        return advice[name].rstrip(".") + "."
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else ""


# The prefixes that wrappers add to the keys of a state dict, with what to write.
_KEY_PREFIXES = {
    "module.": "DataParallel, DistributedDataParallel or DeepSpeed",
    "_orig_mod.": "torch.compile",
    "model.": "a LightningModule",
}


def explain_key_prefix(keys: Iterable[str], expected: Iterable[str]) -> str:
    """Return which wrapper has added a prefix to all keys of a state dict, or an empty text."""
    keys, expected = list(keys), list(expected)
    for prefix, wrapper in _KEY_PREFIXES.items():
        if keys and all(key.startswith(prefix) for key in keys):
            if any(key.startswith(prefix) for key in expected):
                continue
            return (
                f"All keys begin with '{prefix}', the prefix of {wrapper}. Remove it: "
                f"{{key.removeprefix('{prefix}'): value for key, value in state.items()}}."
            )
    return ""


def explain_refused_call(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with arguments that do not fit a function."""
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    advice = PIPE_ARGUMENTS if "stages" in parameters else {}
    strays = [name for name in kwargs if name not in parameters]
    texts = [f"There is no argument '{n}'. {suggest(n, advice, names)}".rstrip() for n in strays]
    if not any(suggest(name, advice, names) for name in strays):
        texts.append(f"The arguments are: {', '.join(names)}.")
    return " ".join(texts)
