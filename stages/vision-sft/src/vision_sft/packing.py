"""Windows to micro-batches of at most so many tokens, shuffled over ranks, resumable to the window."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass
class Position:
    """Where a rank stands: the next place in its epoch's order, and the windows that wait for a batch."""

    epoch: int = 0
    place: int = 0
    waiting: list[int] = field(default_factory=list)


class PackedOrder:
    """Which windows make up which batch: a pure function of seed, rank, number of ranks and position.

    Every epoch the windows are permuted and dealt to the ranks in turn. A batch takes those that wait, then the
    next ones; what does not fit waits, up to `lookahead` windows, so that few tokens of the budget stay unused.
    """

    def __init__(
        self, costs: Sequence[int], budget: int, lookahead: int, seed: int, rank: int, world_size: int
    ) -> None:
        """`costs`: tokens of each window, none above `budget`."""
        self._costs, self._budget, self._lookahead = costs, budget, lookahead
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._order_of: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def batch(self, position: Position) -> tuple[list[int], Position]:
        """Windows of the batch at a position, at least one, and the position after it."""
        room = self._budget
        taken: list[int] = []
        waiting: list[int] = []
        for window in position.waiting:
            if self._costs[window] <= room:
                room -= self._costs[window]
                taken.append(window)
            else:
                waiting.append(window)
        epoch, place = position.epoch, position.place
        while len(waiting) <= self._lookahead:
            order = self._order(epoch)
            if place == len(order):
                epoch, place = epoch + 1, 0
                if taken:
                    break
                continue
            window = int(order[place])
            if self._costs[window] <= room:
                room -= self._costs[window]
                taken.append(window)
            elif len(waiting) < self._lookahead:
                waiting.append(window)
            else:
                break
            place += 1
        return taken, Position(epoch, place, waiting)

    def _order(self, epoch: int) -> np.ndarray:
        if self._order_of[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._costs))
            mine = order[self._rank :: self._world_size]
            # With fewer windows than ranks some would have none.
            self._order_of = (epoch, mine if len(mine) else order)
        return self._order_of[1]


class PackedBatches[T]:
    """Endless batches of a rank; the next ones are made on a thread while this one is trained on."""

    def __init__(self, order: PackedOrder, make: Any, prefetch: int = 2) -> None:
        """`make`: from window numbers to a batch, or None where none of them can be had."""
        self._order, self._make, self._prefetch = order, make, prefetch
        self._position = Position()
        self._ahead: deque[tuple[Future[T | None], Position]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clips")

    def __iter__(self) -> "PackedBatches[T]":
        return self

    def __next__(self) -> T:
        while True:
            last = self._ahead[-1][1] if self._ahead else self._position
            while len(self._ahead) <= self._prefetch:
                windows, last = self._order.batch(last)
                self._ahead.append((self._thread.submit(self._make, windows), last))
            made, self._position = self._ahead.popleft()
            batch = made.result()
            if batch is not None:
                return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out."""
        return asdict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, batch for batch where seed and ranks are the same."""
        for made, _ in self._ahead:
            made.cancel()
        self._ahead.clear()
        self._position = Position(state["epoch"], state["place"], list(state["waiting"]))
