"""Several processes that fit or distil together: who is first, what is summed, what all must agree on.

Knows torch.distributed, through accelerate's state. One process alone is the same with nobody to wait for, so that no caller asks
how many there are. Only the first writes files and prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kvlingo.errors import BadInput, KVLingoError, MissingExtra

PATIENCE = timedelta(hours=12)  # while the first one judges, the others wait
REFUSED, STOPPED = 2, 130


@dataclass(frozen=True)
class Processes:
    """This process among all that do one job together.

    Fields:
        rank: its number; the first has 0.
        group: what connects them for values in a CPU's memory; None for the connection of all values.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def takes(self, number: int) -> bool:
        """Say whether the piece of work with a number is this process's own."""
        return number % self.count == self.rank

    def heard(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Return `say` for the first process, and what says nothing for the others."""
        return say if self.is_first else lambda _: None

    # --- tensors, in place ---

    def add_up(self, x: Tensor) -> None:
        """Put the sum over all processes into everyone's tensor; in the same order at every run."""
        if self.count > 1:
            dist.all_reduce(x, group=self._way(x))

    def add_up_at_first(self, x: Tensor) -> None:
        """Put the sum over all processes into the first one's tensor, and zeros into the others'."""
        if self.count > 1:
            dist.reduce(x, 0, group=self._way(x))
            if not self.is_first:
                x.zero_()

    def take_from_first(self, x: Tensor, of: int = 0) -> None:
        """Put one process's values, the first one's unless told, into everyone's tensor."""
        if self.count > 1:
            dist.broadcast(x, of, group=self._way(x))

    def _way(self, x: Tensor) -> Any:
        return self.group if x.device.type == "cpu" else None

    # --- plain values ---

    def told(self, value: Any, of: int = 0) -> Any:
        """Return one process's plain value, the first one's unless told, whatever the others give."""
        if self.count == 1:
            return value
        data = json.dumps(value).encode() if self.rank == of else b""
        size = torch.tensor([len(data)])
        self.take_from_first(size, of)
        body = (
            torch.tensor(list(data), dtype=torch.uint8)
            if self.rank == of
            else torch.empty(int(size), dtype=torch.uint8)
        )
        self.take_from_first(body, of)
        return json.loads(bytes(body.tolist()))

    def all_told(self, value: Any) -> list[Any]:
        """Return every process's plain value, the first one's first."""
        return [self.told(value, rank) for rank in range(self.count)]

    # --- agreement ---

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Refuse in all processes what one of them refuses in the block: none is left waiting for it.

        No process may wait for another inside.
        """
        mine: KVLingoError | None = None
        try:
            yield
        except KVLingoError as error:
            mine = error
        refusals = self.all_told(None if mine is None else str(mine))
        if mine is not None:
            raise mine
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                raise BadInput(f"process {rank} of {self.count}: {refusal}")

    def require_alike(self, facts: Mapping[str, Any]) -> None:
        """Raise `BadInput` in all processes unless plain values are the same in each; say which are not."""
        every = self.all_told(dict(facts))
        differing = [name for name in facts if any(each[name] != every[0][name] for each in every)]
        if differing:
            raise BadInput(
                f"the {self.count} processes differ in {', '.join(differing)}; start all with the same arguments and files"
            )

    def refuse_more_than(self, most: int, what: str) -> None:
        """Raise `BadInput` where there are more processes than pieces of work."""
        if self.count > most:
            raise BadInput(f"{self.count} processes are too many for {most} {what}: start at most {most}")


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """Yield the processes that `torchrun` or `accelerate launch` started with this one, connected; alone without them.

    What all refuse alike the first one tells; the others end quietly with the same exit code.

    Raises:
        MissingExtra: accelerate is not installed.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) < 2 or "LOCAL_RANK" not in os.environ:
        yield ALONE
        return
    state = _state()
    processes = Processes(state.process_index, state.num_processes, _connection_of_cpus())
    try:
        yield processes
    except KVLingoError:
        if processes.is_first:
            raise
        raise SystemExit(REFUSED) from None
    except KeyboardInterrupt:
        if processes.is_first:
            raise
        raise SystemExit(STOPPED) from None
    finally:
        state.destroy_process_group()


def _state() -> Any:
    """Connect the processes and give each its device; which backend does it is accelerate's choice."""
    try:
        from accelerate import PartialState
    except ImportError:
        raise MissingExtra(
            "fitting on several processes needs the accelerate package: pip install 'kvlingo[train]'"
        ) from None
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else accelerate counts cores anew
    try:
        return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"the processes can't connect to each other ({reason}); start them with torchrun") from error


def _connection_of_cpus() -> Any:
    """Return what sums values in a CPU's memory, where the GPUs' own connection can't."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
