"""What goes wrong in training or saving, and that the run survives it or ends with a reason, on all ranks."""

import json
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import printed, run_ranks
from torch import Tensor
from toy import TokenBatches, loss_of, make_toy

from flywheel_shared import checkpoint
from flywheel_shared.checkpoint_folder import read_commit
from flywheel_shared.fsdp import shard_model
from flywheel_shared.launch import World
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.trainer import TrainerSettings, TrainingFailed, train

pytestmark = pytest.mark.distributed
Loss = Callable[[Any, Tensor], dict[str, Tensor]]


class Run:
    """A toy on the ranks of `world`, trained into `folder`; `weights` are this rank's shards afterwards."""

    def __init__(self, world: World, folder: Path, **changes: Any) -> None:
        self.world, self.folder = world, folder
        given = {"max_steps": 6, "learning_rate": 1e-2, "log_every": 1, "checkpoint_every": 100, **changes}
        self.settings = TrainerSettings(**given)
        self.mesh = ParallelDims().build(world)
        self.toy = make_toy()
        self.model = shard_model(self.toy, self.mesh, list(self.toy.blocks), precision="fp32")

    def train(self, loss: Loss) -> int:
        batches = TokenBatches(2, self.mesh.data_rank, self.mesh.data_degree)
        return train(self.settings, self.world, self.mesh, self.model, loss, batches, self.folder)

    def weights(self) -> list[Tensor]:
        return [p.detach().to_local().clone() for p in self.toy.parameters()]


class PoisonedOn:
    """A loss that is not finite on `rank` in `steps` (1, 2, ...), and the weights seen at every step."""

    def __init__(self, run: Run, rank: int, steps: set[int], poison: float) -> None:
        self.run, self.rank, self.steps, self.poison = run, rank, steps, poison
        self.seen: list[list[Tensor]] = []

    def __call__(self, model: Any, batch: Tensor) -> dict[str, Tensor]:
        self.seen.append(self.run.weights())
        terms = loss_of(model, batch)
        if self.run.world.rank == self.rank and len(self.seen) in self.steps:
            terms["loss"] = terms["loss"] * self.poison
        return terms


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def skips(world: World, folder: str) -> dict[str, Any]:
    """One rank meets a NaN in step 3 and an infinity in step 4; then one never sees anything else."""
    run = Run(world, Path(folder) / "skips")
    loss = PoisonedOn(run, 1, {3}, float("nan"))
    run.train(loss)
    unchanged = [same(before, after) for before, after in zip(loss.seen, loss.seen[1:], strict=False)]

    hopeless = Run(world, Path(folder) / "hopeless", max_steps=50, max_skipped=4)
    try:
        hopeless.train(PoisonedOn(hopeless, 0, set(range(3, 50)), float("inf")))
        said = ""
    except TrainingFailed as error:
        said = str(error)
    return {"unchanged": unchanged, "said": said}


def test_non_finite_step_is_skipped_by_all_ranks_alike(tmp_path):
    """A NaN on rank 1 alone: no rank steps, the next step goes on, and the run counts it."""
    found = run_ranks(2, skips, str(tmp_path), scratch=tmp_path / "ranks")
    for one in found:
        assert one["unchanged"] == [False, False, True, False, False]
        assert one["said"].startswith("step 6: loss or gradients were not finite for 4 steps in a row")
        assert "train/loss inf" in one["said"]
    rows = [json.loads(line) for line in (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/skipped"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert "train/loss" not in rows[2]
    assert "step 3 skipped: train/loss nan" in printed(tmp_path / "ranks", 0)
    state = json.loads((tmp_path / "skips" / "iter_000000006" / "trainer" / "trainer.json").read_text())
    assert (state["loop"]["updates"], state["loop"]["skipped"]) == (5, 1)


class At:
    """The loss, calling `actions[step]` at the start of a step."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions, self.step = actions, 0

    def __call__(self, model: Any, batch: Tensor) -> dict[str, Tensor]:
        self.step += 1
        self.actions.get(self.step, lambda: None)()
        return loss_of(model, batch)


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join()


def failing_saves(world: World, folder: str) -> int:
    """Rank 1 cannot write while step 4 is saved (step 2 and 6 are well); then space is short at step 8."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = Run(world, Path(folder), max_steps=10, checkpoint_every=2, keep_last=9)
    usage = shutil.disk_usage
    actions: dict[int, Callable[[], object]] = {
        4: wait_for_threads,
        5: wait_for_threads,
        8: lambda: setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000)),
        9: lambda: (wait_for_threads(), setattr(shutil, "disk_usage", usage)),
    }
    if world.rank == 1:
        actions[4] = lambda: (wait_for_threads(), limit_file_size(100))
        actions[5] = lambda: (wait_for_threads(), limit_file_size(resource.RLIM_INFINITY))
    return run.train(At(actions))


def test_failing_save_leaves_training_running_and_the_checkpoints_before_it_whole(tmp_path):
    """A write error on one rank, and a full disk seen beforehand; both are said with their reason."""
    assert run_ranks(2, failing_saves, str(tmp_path / "run"), scratch=tmp_path / "ranks") == [10, 10]
    said = printed(tmp_path / "ranks", 0)
    assert "checkpoint of step 4 FAILED" in said
    assert "File too large" in said
    assert "checkpoint of step 8 FAILED" in said
    assert "GiB free" in said
    names = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert names == ["iter_000000002", "iter_000000006", "iter_000000010"]
    for name in names:
        read_commit(tmp_path / "run" / name)


def saves_at_every_step(world: World, folder: str) -> dict[str, Any]:
    """Slow saves: commits take 0.15 s longer. Counts saves that overlap, and steps taken during one."""
    under_way, most, steps_during = 0, 0, 0
    original = checkpoint.CheckpointManager._write

    def write(self: Any, *arguments: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.15)
        original(self, *arguments)
        under_way -= 1

    def loss(model: Any, batch: Tensor) -> dict[str, Tensor]:
        nonlocal steps_during
        steps_during += under_way
        return loss_of(model, batch)

    checkpoint.CheckpointManager._write = write
    run = Run(world, Path(folder), max_steps=24, checkpoint_every=2, grad_accumulation=2, ema_decay=0.9)
    done = run.train(loss)
    return {"done": done, "most": most, "during": steps_during}


def test_saves_in_the_background_never_overlap_and_never_block_each_other(tmp_path):
    """12 saves in 24 steps of 2 ranks: no deadlock, one at a time, and steps go on meanwhile."""
    found = run_ranks(2, saves_at_every_step, str(tmp_path / "run"), scratch=tmp_path / "ranks")
    for one in found:
        assert one["done"] == 24
        assert one["most"] == 1
        assert one["during"] >= 12
    names = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert names == ["iter_000000022", "iter_000000024"]
