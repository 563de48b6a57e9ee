"""Batches within the budget: every window once an epoch over all ranks, the same after a resume."""

import numpy as np
import pytest

from vision_sft.packing import PackedBatches, PackedOrder, Position

COSTS = [int(cost) for cost in np.random.default_rng(0).integers(10, 70, 200)]


def order(rank: int = 0, ranks: int = 1, lookahead: int = 8, budget: int = 100) -> PackedOrder:
    return PackedOrder(COSTS, budget, lookahead, seed=5, rank=rank, world_size=ranks)


def epoch_of(one: PackedOrder) -> list[list[int]]:
    """Batches that begin in the first epoch, and those that wait at its end."""
    position, batches = Position(), []
    while position.epoch == 0:
        batch, position = one.batch(position)
        batches.append(batch)
    return [*batches, position.waiting]


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_together_see_every_window_once_an_epoch(ranks):
    seen = []
    for rank in range(ranks):
        for batch in epoch_of(order(rank, ranks))[:-1]:
            assert batch
            assert sum(COSTS[window] for window in batch) <= 100
            seen += batch
        seen += epoch_of(order(rank, ranks))[-1]
    assert sorted(seen) == list(range(200))


def test_looking_ahead_fills_the_budget():
    def filled(lookahead: int) -> float:
        batches = epoch_of(order(lookahead=lookahead))[:-2]
        return float(np.mean([sum(COSTS[window] for window in batch) for batch in batches]))

    assert filled(8) > filled(0) + 5
    assert filled(8) > 90


def test_no_window_waits_for_ever():
    """The longest ones come too: whoever waits is asked first."""
    one, position, seen = order(), Position(), set()
    for _ in range(200):
        batch, position = one.batch(position)
        seen |= set(batch)
        assert len(position.waiting) <= 8
    assert seen == set(range(200))


def test_a_resumed_run_sees_the_batches_that_would_have_come():
    straight = PackedBatches(order(), list)
    expected = [next(straight) for _ in range(60)]
    first = PackedBatches(order(), list)
    for batch in expected[:23]:
        assert next(first) == batch
    resumed = PackedBatches(order(), list)
    resumed.load_state_dict(first.state_dict())
    assert [next(resumed) for _ in range(37)] == expected[23:]


def test_batches_that_cannot_be_had_are_passed_over():
    made = PackedBatches(order(), lambda windows: windows if 7 not in windows else None)
    assert all(7 not in next(made) for _ in range(100))


def test_a_failure_reaches_whoever_takes_the_batch():
    def fail(windows):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        next(PackedBatches(order(), fail))


def test_fewer_windows_than_ranks_still_give_every_rank_some():
    one = PackedOrder([5], 10, 4, seed=0, rank=3, world_size=4)
    assert one.batch(Position())[0] == [0]
