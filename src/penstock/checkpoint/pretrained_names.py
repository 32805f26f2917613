"""What the tensors in a folder of `from_pretrained` are called in a model, and how they become its.

transformers renames some, and makes some out of several: it is asked how. Nothing is imported: a
model of transformers, or of peft, has brought its library along.
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
    """The file with the weights, or with where they are; None if it is no such folder."""
    found = (folder / name for name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE))
    return next((path for path in found if path.exists()), None)


def is_pretrained(model: nn.Module | None) -> bool:
    """Is it a model of transformers, or of peft?"""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(model, "config")


def is_peft_model(model: nn.Module) -> bool:
    """Is it one of peft?"""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


@dataclass
class WeightRecipe:
    """How a tensor of the model is made of stored ones; `converts` is transformers' way."""

    target: str
    first_target: str  # of the tensors that are made together
    sources: list[str] = field(default_factory=list)
    converter: Any = None
    source_patterns: list[str] = field(default_factory=list)  # of each source

    def build(self, read_tensor: Callable[[str], torch.Tensor], model: nn.Module) -> torch.Tensor:
        """From what is read."""
        if self.converter is None:
            return read_tensor(self.sources[0])
        converter = deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.source_patterns, strict=True):
            converter.add_tensor(self.first_target, source, pattern, read_tensor(source))
        made = converter.convert(self.first_target, model=model, config=model.config)
        found = made[self.target]
        whole: torch.Tensor = found[0] if isinstance(found, list) else found
        return whole


@dataclass(frozen=True)
class PretrainedNameMap:
    """What is stored, under the model's names.

    covers   the names for which there should be something
    besides  what the model has nothing for
    """

    stored: tuple[str, ...]
    recipes: Mapping[str, WeightRecipe]
    expected: frozenset[str]
    unexpected: tuple[str, ...]


def map_stored_names(
    model: nn.Module, stored: Collection[str], names: Collection[str]
) -> PretrainedNameMap:
    """`names` are those of all tensors that the model saves, on whatever rank."""
    if not is_peft_model(model):
        return _build_name_map(model, stored, {name: name for name in names})
    ours = _adapter_names(model, names)
    if any(key in ours for key in stored):
        return _build_name_map(None, stored, ours)
    base: Any = model
    plain = {_strip_peft_names(name): name for name in names if name not in ours.values()}
    return _build_name_map(base.get_base_model(), stored, plain)


def _strip_peft_names(name: str) -> str:
    """As the model is called in without peft around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapter_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The adapters' own names in a file, with the model's."""
    blanks = {name: torch.empty(0, device="meta") for name in names}
    found = extract_adapter_state(model, blanks)
    by_tensor = {tensor: name for name, tensor in blanks.items()}
    return {key: by_tensor[tensor] for key, tensor in found.items() if tensor in by_tensor}


def extract_adapter_state(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What peft saves of a state."""
    take = sys.modules["peft"].get_peft_model_state_dict
    found: dict[str, torch.Tensor] = take(
        model, state_dict=dict(state), save_embedding_layers=False
    )
    return found


def _build_name_map(
    model: Any, stored: Collection[str], names: Mapping[str, str]
) -> PretrainedNameMap:
    rename = _build_rename_function(model, names)
    recipes: dict[str, WeightRecipe] = {}
    besides = []
    for key in sorted(stored, key=_natural_sort_key):
        targets, converter, pattern = rename(key)
        if not any(target in names for target in targets):
            besides.append(key)
        for target in targets:
            if target not in names:
                continue
            recipe = recipes.setdefault(
                names[target], WeightRecipe(target, targets[0], converter=converter)
            )
            recipe.sources.append(key)
            recipe.source_patterns.append(pattern)
    return PretrainedNameMap(tuple(stored), recipes, frozenset(names.values()), tuple(besides))


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Experts are put together in the order of their numbers."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]


RenameFunction = Callable[
    [str], tuple[list[str], Any, str]
]  # to targets, a converter and its pattern


def _build_rename_function(model: Any, names: Mapping[str, str]) -> RenameFunction:
    loading = sys.modules.get("transformers.core_model_loading")
    if model is None or loading is None:
        prefix = getattr(model, "base_model_prefix", "")
        return lambda key: ([_match_prefix(key, prefix, names)], None, "")
    mapping = sys.modules["transformers.conversion_mapping"].get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    of_pattern = {k: converter for converter in converters for k in converter.source_patterns}
    known = dict.fromkeys(names, True)

    def rename(key: str) -> tuple[list[str], Any, str]:
        prefix = model.base_model_prefix
        new, pattern = loading.rename_source_key(key, renamings, converters, prefix, known)
        if new not in known and key in known:
            new, pattern = loading.rename_source_key(key, [], [], prefix, known)
        if pattern is None:
            return [new], None, ""
        converter = of_pattern[pattern]
        first, *others = converter.target_patterns
        return [new, *(new.replace(first, other) for other in others)], converter, pattern

    return rename


def _match_prefix(key: str, prefix: str, names: Collection[str]) -> str:
    """A model with a head has the base model's names below a prefix; a file may have it or not."""
    if key in names or not prefix:
        return key
    other = key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else f"{prefix}.{key}"
    return other if other in names else key


@dataclass(frozen=True)
class KeyMismatch:
    """Where a folder and a model differ: in the base model, or only in what is around it."""

    in_base_model: tuple[str, ...]
    outside_base_model: tuple[str, ...]

    @staticmethod
    def classify(
        model: nn.Module, names: Iterable[str], all_names: Iterable[str], kind: str
    ) -> KeyMismatch:
        """Of these names, among all that are there; `kind`: they are missing, or unexpected."""
        patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())]
        if kind == "unexpected":  # buffers that older versions have saved
            patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        has_head = prefix != "." and any(name.startswith(prefix) for name in all_names)
        found = [n for n in names if not any(re.search(p, n) for p in patterns)]
        inside = [n for n in found if not has_head or n.startswith(prefix)]
        return KeyMismatch(tuple(inside), tuple(n for n in found if n not in inside))
