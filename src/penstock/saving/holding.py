"""What one process has of a model, and under which names it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.partition.tied import strip_compile_prefix
from penstock.saving.savers import LocalSaveGroup, SaveGroup


@dataclass(frozen=True)
class LocalState:
    """The layers of this process, under the unsplit model's names, and with whom it saves.

    same     every further name of a tied tensor, with the one that it is saved under: of the
             whole model, and alike on every rank
    replica  which copy of the model this is part of, where there are several
    first    whether random numbers of that copy begin here
    model    the unsplit model as its user has it, if it is of a kind with folders of its own
    """

    module: nn.Module
    tied_names: Mapping[str, str]
    save_group: SaveGroup = field(default_factory=LocalSaveGroup)
    replica: int = 0
    saves_rng_state: bool = True
    pretrained_model: nn.Module | None = None

    def saved_name(self, name: str) -> str:
        """The one that it is saved under."""
        return self.tied_names.get(name, name)

    def all_names(self, name: str) -> list[str]:
        """All that the tensor has, the one that it is saved under first."""
        kept = self.saved_name(name)
        return [kept, *(other for other, one in self.tied_names.items() if one == kept)]

    def unique_state(self) -> dict[str, tuple[str, Any]]:
        """What the state_dict has, each tied tensor once: its key there, and the value.

        A rank that has only another name's copy of a tied tensor has it under that name.
        """
        values = {
            strip_compile_prefix(key): (key, value)
            for key, value in self.module.state_dict().items()
        }
        return {
            n: v
            for n, v in values.items()
            if self.saved_name(n) == n or self.saved_name(n) not in values
        }

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name that each is saved under."""
        found = self.module.named_parameters(remove_duplicate=False)
        return {parameter: self.saved_name(strip_compile_prefix(name)) for name, parameter in found}
