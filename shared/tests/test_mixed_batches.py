"""Corpora in fixed numbers, and a position that leads on."""

import pytest

from flywheel_shared.mixed_batches import MixedBatches, counts_by_share


@pytest.mark.parametrize(
    ("shares", "size", "counts"),
    [([1.0], 5, [5]), ([0.9, 0.1], 8, [7, 1]), ([0.7, 0.3], 10, [7, 3]), ([1, 1, 1], 8, [3, 3, 2])],
)
def test_counts_follow_the_shares(shares, size, counts):
    assert counts_by_share(shares, size) == counts


def test_a_corpus_without_a_window_is_refused():
    with pytest.raises(ValueError, match="corpus 1 no window of 4"):
        counts_by_share([0.95, 0.05], 4)


class Counter:
    def __init__(self, step):
        self.at, self.step = 0, step

    def __next__(self):
        self.at += self.step
        return {"at": self.at}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_resumed_mixture_goes_on_where_it_stood():
    batches = MixedBatches([Counter(1), Counter(10)])
    next(batches)
    state = batches.state_dict()
    rest = [next(batches) for _ in range(3)]
    other = MixedBatches([Counter(1), Counter(10)])
    other.load_state_dict(state)
    assert [next(other) for _ in range(3)] == rest
    with pytest.raises(ValueError, match="zip"):
        MixedBatches([Counter(1)]).load_state_dict(state)
