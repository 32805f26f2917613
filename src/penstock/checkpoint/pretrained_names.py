"""Translate the tensor names in a transformers or peft folder to the names of the model.

When transformers loads a model, it renames some tensors and builds others from several stored ones.
This module asks transformers for those rules and applies them to the tensors of one process.

    stored in the file                       in the model
    ...experts.0.gate_proj.weight, ...       ...experts.gate_up_proj     built by a converter
    transformer.h.0.ln_1.weight              h.0.ln_1.weight             prefix of the base model
    base_model.model.x.lora_A.weight         base_model.model.x.lora_A.default.weight      (peft)

Nothing is imported here: a model of transformers or peft means that its library is already in
`sys.modules`, and without such a model the libraries need not be installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"


def find_weights_file(folder: Path) -> Path | None:
    """Return the weights file of a folder, or its index. None if the folder has neither."""
    candidates = (folder / name for name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE))
    return next((path for path in candidates if path.exists()), None)


def is_pretrained(model: nn.Module | None) -> bool:
    """Return True for a model of transformers or peft."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(model, "config")


def is_peft_model(model: nn.Module) -> bool:
    """Return True for a model that peft has wrapped."""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


@dataclass
class WeightRecipe:
    """The rule that builds one tensor of the model from stored tensors.

    target           the name of the tensor in the model
    first_target     the first of the tensors that the same converter builds together; the converter
                     uses this name as its key
    sources          the names of the stored tensors
    converter        the `WeightConverter` of transformers, or None to take the only source as it is
    source_patterns  the pattern of the converter that each source matched
    """

    target: str
    first_target: str
    sources: list[str] = field(default_factory=list)
    converter: Any = None
    source_patterns: list[str] = field(default_factory=list)

    def build(self, read_tensor: Callable[[str], torch.Tensor], model: nn.Module) -> torch.Tensor:
        """Return the converted tensor. `read_tensor` reads a stored one."""
        if self.converter is None:
            return read_tensor(self.sources[0])
        # A converter collects tensors in itself, so each build needs its own copy.
        converter = deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.source_patterns, strict=True):
            converter.add_tensor(self.first_target, source, pattern, read_tensor(source))
        converted = converter.convert(self.first_target, model=model, config=model.config)
        value = converted[self.target]
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor


@dataclass(frozen=True)
class PretrainedNameMap:
    """The stored tensors, by the names of the model.

    stored      all names in the files
    recipes     how to build each tensor of the model, by its name
    expected    the names of the model that the files should have
    unexpected  the names in the files that belong to no tensor of the model
    """

    stored: tuple[str, ...]
    recipes: Mapping[str, WeightRecipe]
    expected: frozenset[str]
    unexpected: tuple[str, ...]


def map_stored_names(
    model: nn.Module, stored: Collection[str], names: Collection[str]
) -> PretrainedNameMap:
    """Return the map from stored names to the model's. `names` are those of all ranks together.

    The folder of a peft model holds either adapters or the base model without peft. The stored
    names decide which of the two it is.
    """
    if not is_peft_model(model):
        return _build_name_map(model, stored, {name: name for name in names})
    adapter_names = _adapter_names(model, names)
    if any(key in adapter_names for key in stored):
        return _build_name_map(None, stored, adapter_names)
    base: Any = model
    base_names = {
        _strip_peft_names(name): name for name in names if name not in adapter_names.values()
    }
    return _build_name_map(base.get_base_model(), stored, base_names)


def build_model_state(
    model: nn.Module, state: Mapping[str, Any], names: Collection[str]
) -> Mapping[str, Any]:
    """Return a state dict under the names of the model, from one under those of a file.

    The Trainer of transformers passes the tensors of a file to `load_state_dict`, which would skip
    those with other names. An entry that belongs to no tensor of the model stays as it is.
    """
    stored = [name for name in state if name not in names]
    if not stored:
        return state
    name_map = map_stored_names(model, stored, names)
    converted = {
        target: recipe.build(state.__getitem__, model)
        for target, recipe in name_map.recipes.items()
    }
    unchanged = {
        name: state[name] for name in state if name in names or name in name_map.unexpected
    }
    return {**converted, **unchanged}


def _strip_peft_names(name: str) -> str:
    """Return the name that a tensor of the base model has without peft around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapter_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names of the adapters in a file, mapped to their names in the model.

    peft selects and renames tensors of a state dict in one call. Passing it a placeholder tensor
    for each name shows what became of the name.
    """
    placeholders = {name: torch.empty(0, device="meta") for name in names}
    extracted = extract_adapter_state(model, placeholders)
    by_tensor = {tensor: name for name, tensor in placeholders.items()}
    return {key: by_tensor[tensor] for key, tensor in extracted.items() if tensor in by_tensor}


def extract_adapter_state(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that peft saves, under the names that it saves them."""
    get_adapter_state = sys.modules["peft"].get_peft_model_state_dict
    extracted: dict[str, torch.Tensor] = get_adapter_state(
        model, state_dict=dict(state), save_embedding_layers=False
    )
    return extracted


def _build_name_map(
    model: Any, stored: Collection[str], names: Mapping[str, str]
) -> PretrainedNameMap:
    """Match the stored names. `names` maps the names to look for to the names of the model."""
    rename = _build_rename_function(model, names)
    recipes: dict[str, WeightRecipe] = {}
    unexpected = []
    for key in sorted(stored, key=_natural_sort_key):
        targets, converter, pattern = rename(key)
        if not any(target in names for target in targets):
            unexpected.append(key)
        for target in targets:
            if target not in names:
                continue
            recipe = recipes.setdefault(
                names[target], WeightRecipe(target, targets[0], converter=converter)
            )
            recipe.sources.append(key)
            recipe.source_patterns.append(pattern)
    return PretrainedNameMap(tuple(stored), recipes, frozenset(names.values()), tuple(unexpected))


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `experts.2` before `experts.10`.

    A converter stacks experts in the order in which it gets them.
    """
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]


# From a stored name to the target names, the converter (or None) and the pattern that it matched.
RenameFunction = Callable[[str], tuple[list[str], Any, str]]


def _build_rename_function(model: Any, names: Mapping[str, str]) -> RenameFunction:
    """Return the function that translates one stored name.

    transformers 5 has a table of renamings and converters for each model. Without that table, the
    names differ at most by the prefix of the base model.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if model is None or loading is None:
        prefix = getattr(model, "base_model_prefix", "")
        return lambda key: ([_match_prefix(key, prefix, names)], None, "")
    mapping = sys.modules["transformers.conversion_mapping"].get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, loading.WeightConverter)]
    by_pattern = {k: converter for converter in converters for k in converter.source_patterns}
    known_names = dict.fromkeys(names, True)

    def rename(key: str) -> tuple[list[str], Any, str]:
        prefix = model.base_model_prefix
        new, pattern = loading.rename_source_key(key, renamings, converters, prefix, known_names)
        # A file may already use the model's own names. Then no rule may change them.
        if new not in known_names and key in known_names:
            new, pattern = loading.rename_source_key(key, [], [], prefix, known_names)
        if pattern is None:
            return [new], None, ""
        # One converter may build several tensors, such as the three parts of a fused projection.
        converter = by_pattern[pattern]
        first_pattern, *others = converter.target_patterns
        return [new, *(new.replace(first_pattern, other) for other in others)], converter, pattern

    return rename


def _match_prefix(key: str, prefix: str, names: Collection[str]) -> str:
    """Return the stored name with or without the prefix of the base model, as the model has it.

    A model with a head has the names of its base model below a prefix. The file may come from the
    base model alone, or the other way around.
    """
    if key in names or not prefix:
        return key
    other = key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else f"{prefix}.{key}"
    return other if other in names else key


def split_at_base_model(
    model: nn.Module, names: Iterable[str], all_names: Iterable[str], kind: str
) -> tuple[list[str], list[str]]:
    """Return the missing or unexpected names inside and outside of the base model.

    `kind` is "missing" or "unexpected". Names that the model itself declares as ignorable are
    dropped. `all_names` shows whether the base model has a prefix here.
    """
    patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())]
    if kind == "unexpected":
        # Older versions of transformers saved these buffers.
        patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    has_head = prefix != "." and any(name.startswith(prefix) for name in all_names)
    relevant = [n for n in names if not any(re.search(p, n) for p in patterns)]
    inside = [n for n in relevant if not has_head or n.startswith(prefix)]
    return inside, [n for n in relevant if n not in inside]
