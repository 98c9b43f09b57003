"""Processes that share one model by tensor parallelism, and have to make the same decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True)
class Ranks:
    """The processes of a model, which follow the measurements and random draws of the first one."""

    group: Any = None  # process group; `None` for a single process
    device: torch.device | None = None  # for messages between the processes

    @property
    def many(self) -> bool:
        """Whether there is more than one process."""
        return self.group is not None

    def agree(self, value: float) -> float:
        """Return the first process's value; all processes have to call this in the same order."""
        if self.group is None:
            return value
        message = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(message, distributed.get_global_rank(self.group, 0), self.group)
        return float(message)


ALONE = Ranks()


def ranks_of(model: Any) -> Ranks:
    """The processes that transformers has spread `model` over (`tp_plan`)."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return ALONE
    is_named = "tp" in (mesh.mesh_dim_names or ())
    return Ranks(mesh.get_group("tp" if is_named else None), model.device)
