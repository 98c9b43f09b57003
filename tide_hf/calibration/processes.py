"""The processes that share one calibration: rank, share of the work, barriers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed
from transformers import PreTrainedModel

from ..base_model.structure import input_device
from ..common.errors import UnsupportedModelError, describe
from ..speculation.ranks import ranks_of

Unit = TypeVar("Unit")
PATIENCE = timedelta(hours=24)  # a process may wait at a barrier while another generates text


@dataclass(frozen=True)
class Processes:
    """This process among those that `torchrun` or `accelerate launch` started; by default the only one.

    Attributes:
        rank: Rank of this process.
        count: World size.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls, model: PreTrainedModel) -> Processes:
        """Find the other processes, and initialise the process group if there is none yet.

        Args:
            model: This process's model.

        Raises:
            UnsupportedModelError: The model is tensor-parallel, so processes cannot work on different texts.
        """
        if ranks_of(model).many:
            raise UnsupportedModelError(
                describe(
                    "processes that share one model cannot share work",
                    got="a model that was loaded with tp_plan",
                    expected="a whole model in each process",
                    do="Load it without tp_plan, with device_map='auto' where it needs several devices. What is made "
                    "there serves the model with tp_plan as well.",
                )
            )
        device = input_device(model)
        if not distributed.is_available():
            return cls()
        if not distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.rank == 0

    def share(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """This process's share of the units: every `count`-th."""
        return units[self.rank :: self.count]

    @contextmanager
    def threads_for(self, num_units: int) -> Iterator[None]:
        """With fewer units than processes, give the threads of idle processes to the busy ones.

        Args:
            num_units: Number of units.
        """
        before = torch.get_num_threads()
        here = min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))
        torch.set_num_threads(before * max(1, here // max(1, num_units)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def wait(self) -> None:
        """Barrier."""
        if self.count > 1:
            distributed.barrier()

    def from_main(self, value: Any) -> Any:
        """Broadcast the main process's value."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]
