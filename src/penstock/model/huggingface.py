"""Special treatment of models from Hugging Face transformers.

Three things differ from other models:

- They fill a cache of keys and values inside their layers unless `use_cache` is False.
- They install hooks lazily, in the first forward that returns hidden states or attentions.
- Some have a plan for pipeline parallelism, `_pp_plan`, which names good units.

Models are recognized by their attributes, and transformers is never imported here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import CutError


def build_default_kwargs(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments to add to those of the caller: `use_cache=False`, or nothing.

    With a cache, layers write keys and values into an object that the model passes around. Each
    stage would fill its own copy, so the cache would be incomplete.

    Raises:
        CutError: If the caller asks for a cache.
    """
    if not any(getattr(config, "use_cache", None) is True for config in _iter_configs(model)):
        return {}
    for name in ("use_cache", "past_key_values"):
        if kwargs.get(name) not in (None, False):
            raise CutError(
                f"{name} was given to {type(model).__name__}, but a cache of keys and values is "
                f"filled inside the units of all stages and cannot be traced. Leave {name} out. A "
                "call of a pipe computes whole sequences; to generate text with a cache, use "
                "pipe.generate."
            )
    if "use_cache" in kwargs:
        return {}
    _check_not_packed(model, kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    has_option = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"use_cache": False} if has_option else {}


def _check_not_packed(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise if positions restart within a row, which a model with a cache does not notice.

    Without a mask and without a cache, transformers takes such a row for several packed sequences.
    The unsplit model has a cache here, and lets each of them see the earlier ones.
    """
    position_ids = kwargs.get("position_ids")
    if not isinstance(position_ids, Tensor) or kwargs.get("attention_mask") is not None:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise CutError(
            f"the position_ids given to {type(model).__name__} restart within a row, and its "
            "config.use_cache is True. With a cache, transformers does not separate such packed "
            "sequences; a pipe has no cache, and would. Set model.config.use_cache = False, which "
            "separates them in both, or pass an attention_mask."
        )


def _iter_configs(model: nn.Module) -> Iterator[Any]:
    """Yield the config of the model, and those of its text part and its decoder, or None."""
    config = getattr(model, "config", None)
    yield config
    for name in ("text_config", "decoder"):
        yield getattr(config, name, None)


_HOOKS_INSTALLED_FLAG = "_output_capturing_hooks_installed"  # set by transformers on a module


def install_output_hooks(model: nn.Module) -> None:
    """Install the hooks that collect hidden states and attentions, before the model is cut.

    transformers installs them in the first forward that asks for them, on the modules that it finds
    then. In a pipe these would be the proxies of a single stage, and the other stages would collect
    nothing. A hook that is installed early does nothing until the outputs are asked for.

    The functions are private to transformers. Where they are missing, nothing is installed.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    recordable_types = getattr(capturing, "_CAN_RECORD_REGISTRY", {})
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    for module in model.modules():
        if install is None or str(type(module)) not in recordable_types:
            continue
        # A module inside may have the hooks already, and a second set would collect twice.
        if not any(getattr(inner, _HOOKS_INSTALLED_FLAG, False) for inner in module.modules()):
            install(module)


def find_planned_units(model: nn.Module) -> list[str]:
    """Return the modules that the model's `_pp_plan` names and that can be units.

    The plan is a hint. Of 161 causal models of transformers 5.22, 97 have a plan: 93 of these name
    modules that are units anyway, three also name a dropout or a norm without parameters, and one
    names modules that do not exist. So a plan with unknown names is ignored, and of the rest only
    modules count that have parameters and contain no list that could be cut.
    """
    plan = getattr(model, "_pp_plan", None)
    modules = dict(model.named_modules())
    if not isinstance(plan, Mapping) or any(name not in modules for name in plan):
        return []
    return [name for name in plan if _is_unit_candidate(modules[name])]


def _is_unit_candidate(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    has_list = any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in module.modules())
    return not has_list and next(module.parameters(), None) is not None
