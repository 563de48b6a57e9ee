"""Several corpora in one batch, each with a fixed number of windows."""

from collections.abc import Sequence
from typing import Any

from flywheel_shared.lerobot_windows import ShuffledBatches


def counts_by_share(shares: Sequence[float], batch_size: int) -> list[int]:
    """Windows of each corpus in a batch: their sum is `batch_size`, the largest remainders are rounded up.

    Raises `ValueError` where a corpus would get none: a larger batch or share is needed.
    """
    total = sum(shares)
    wanted = [batch_size * share / total for share in shares]
    counts = [int(value) for value in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - wanted[i], i))
    for i in by_remainder[: batch_size - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise ValueError(f"shares {list(shares)} leave corpus {counts.index(0)} no window of {batch_size}")
    return counts


class MixedBatches:
    """Endless batches, each a list of what every corpus gives for it; resumable to the window."""

    def __init__(self, corpora: Sequence[ShuffledBatches]) -> None:
        """Each of `corpora` makes batches of its own number of windows."""
        self._corpora = list(corpora)

    def __iter__(self) -> "MixedBatches":
        return self

    def __next__(self) -> list[dict[str, Any]]:
        return [next(corpus) for corpus in self._corpora]

    def state_dict(self) -> dict[str, Any]:
        """Where each corpus stands."""
        return {"corpora": [corpus.state_dict() for corpus in self._corpora]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; corpora must be the same ones in the same order."""
        for corpus, position in zip(self._corpora, state["corpora"], strict=True):
            corpus.load_state_dict(position)
