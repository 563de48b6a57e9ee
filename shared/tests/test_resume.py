"""A run that was interrupted ends as if it had not been, bit for bit."""

import contextlib
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RanksFailed, printed, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from toy import TokenBatches, loss_of, make_toy, noisy_loss_of

from flywheel_shared.average import Average
from flywheel_shared.checkpoint import CheckpointManager
from flywheel_shared.checkpoint_folder import read_commit
from flywheel_shared.fsdp import shard_model
from flywheel_shared.launch import World
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.optimizer import make_adamw
from flywheel_shared.trainer import TrainerSettings, train

pytestmark = pytest.mark.distributed

STEPS, EVERY, STOP_AT, KILL_AT = 10, 4, 6, 7
GLOBAL_BATCH = 8


def settings(**changes: Any) -> TrainerSettings:
    given = {
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "grad_accumulation": 2,
        "ema_decay": 0.9,
        "checkpoint_every": EVERY,
        "keep_last": 5,
        "log_every": 1,
        "clip_norm": 0.3,
    }
    return TrainerSettings(**{**given, **changes})


def run(
    world: World, folder: str, loss: Callable[..., dict[str, Tensor]] = noisy_loss_of, **changes: Any
) -> int:
    mesh = ParallelDims().build(world)
    toy = make_toy()
    model = shard_model(toy, mesh, list(toy.blocks), precision="fp32")
    asked = settings(**changes)
    size = GLOBAL_BATCH // mesh.data_degree // asked.grad_accumulation
    batches = TokenBatches(size, mesh.data_rank, mesh.data_degree)
    return train(asked, world, mesh, model, loss, batches, Path(folder))


class Interrupted:
    """The loss, until in the middle of step `step` rank 1 gets a signal, once `after` is there."""

    def __init__(self, world: World, step: int, number: int, after: Path | None = None) -> None:
        self.calls, self.world, self.step, self.number, self.after = 0, world, step, number, after

    def __call__(self, model: Any, batch: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.world.rank == 1 and self.calls == 2 * self.step:
            while self.after is not None and not self.after.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), self.number)
        return noisy_loss_of(model, batch)


def straight_then_stopped(world: World, straight: str, stopped: str) -> list[int]:
    return [
        run(world, straight),
        run(world, stopped, Interrupted(world, STOP_AT, signal.SIGTERM)),
        run(world, stopped),
    ]


def killed(world: World, folder: str) -> int:
    saved = Path(folder) / f"iter_{EVERY:09d}"
    return run(world, folder, Interrupted(world, KILL_AT, signal.SIGKILL, after=saved))


def contents(folder: Path, step: int) -> dict[str, Any]:
    """Everything of a checkpoint, read in one process: tensors by name, and each rank's random states."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    iteration = folder / f"iter_{step:09d}"
    found: dict[str, Any] = {}
    for part in ("model", "ema", "optim"):
        with warnings.catch_warnings():  # it says that it reads in one process
            warnings.simplefilter("ignore")
            state = _load_state_dict_from_keys(checkpoint_id=iteration / part)
        found |= {f"{part}.{name}": value for name, value in flat(state)}
    for path in sorted((iteration / "trainer").glob("*.pt")):
        found |= {f"{path.name}.{name}": v for name, v in flat(torch.load(path, weights_only=True))}
    return found


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flat(inner, f"{name}.{key}")]
    if isinstance(value, list | tuple):
        return [pair for i, inner in enumerate(value) for pair in flat(inner, f"{name}.{i}")]
    return [(name, value)]


def assert_equal_to_the_bit(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 100
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def losses(folder: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """straight/: uninterrupted. stopped/: SIGTERM on rank 1. killed/: rank 1 killed. Each on 2 ranks."""
    base = tmp_path_factory.mktemp("runs")
    done = run_ranks(
        2, straight_then_stopped, str(base / "straight"), str(base / "stopped"), scratch=base / "first"
    )
    assert done == [[STEPS, STOP_AT, STEPS]] * 2
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, killed, str(base / "killed"), scratch=base / "second")
    assert -signal.SIGKILL in failed.value.exit_codes
    assert run_ranks(2, run, str(base / "killed"), scratch=base / "third") == [STEPS] * 2
    return base


@pytest.mark.parametrize("interruption", ["stopped", "killed"])
def test_resume_continues_bit_for_bit(runs, interruption):
    """Losses, gradient norms, weights, their average, optimiser state, random states, data position."""
    assert losses(runs / interruption) == losses(runs / "straight")
    assert [step for step, _, _ in losses(runs / "straight")] == list(range(1, STEPS + 1))
    assert_equal_to_the_bit(contents(runs / interruption, STEPS), contents(runs / "straight", STEPS))


def test_the_loss_goes_down(runs):
    """Else a bug that trains nothing would continue bit for bit, too."""
    of = [loss for _, loss, _ in losses(runs / "straight")]
    assert of[-1] < of[0] - 0.1


def test_sigterm_on_one_rank_stops_all_after_the_step_and_saves(runs):
    assert f"saving step {STOP_AT} of {STEPS}" in printed(runs / "first", 0)
    read_commit(runs / "stopped" / f"iter_{STOP_AT:09d}")


def test_a_kill_leaves_no_half_checkpoint(runs):
    assert "resumed from" in printed(runs / "third", 0)
    assert f"iter_{EVERY:09d} at step {EVERY}" in printed(runs / "third", 0)
    assert not list((runs / "killed").glob("*.tmp"))
    for step in (EVERY, 2 * EVERY, STEPS):
        read_commit(runs / "killed" / f"iter_{step:09d}")


def test_the_average_lags_behind_the_weights(runs):
    found = contents(runs / "straight", STEPS)
    name = "blocks.0.up.weight"
    assert not torch.equal(found[f"ema..{name}"], found[f"model..{name}"])
    assert torch.equal(found["ema..scale"], found["model..scale"])


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing(tmp_path):
    """Both ranks killed again and again while every step is being saved: the end is that of a quiet run."""
    often = {"max_steps": 16, "checkpoint_every": 1, "keep_last": 2}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    run_ranks(2, run_often, str(quiet), often, scratch=tmp_path / "quiet_ranks")
    random = np.random.default_rng(0)
    resumed, last = 0, [math.inf]
    for attempt, kill_after_s in enumerate([*random.uniform(0, 3, 8), *last]):
        scratch = tmp_path / f"attempt{attempt}"
        with contextlib.suppress(RanksFailed):
            run_ranks(2, run_often, str(killed), often, scratch=scratch, kill_after_s=kill_after_s)
        resumed += "resumed from" in printed(scratch, 0)
        assert "passed over" not in printed(scratch, 0)
    assert resumed >= 3
    assert losses(killed) == losses(quiet)
    assert_equal_to_the_bit(contents(killed, 16), contents(quiet, 16))


def run_often(world: World, folder: str, often: dict[str, int]) -> int:
    return run(world, folder, **often)


def loaded(world: World, folder: str, replicate: int, save_to: str | None) -> dict[str, Any]:
    """Load the newest checkpoint; full tensors, and the losses of the next two steps on a batch of 8."""
    mesh = ParallelDims(replicate=replicate).build(world)
    toy = make_toy()
    model = shard_model(toy, mesh, list(toy.blocks), precision="fp32")
    optimizer = make_adamw(
        toy.named_parameters(), learning_rate=1e-2, betas=(0.95, 0.999), eps=1e-8, weight_decay=0.0
    )
    average = Average(toy, 0.9)
    manager = CheckpointManager(Path(folder), world)
    assert manager.load(toy, optimizer, average.state_dict()) is not None
    manager.close()
    tensors = {f"model.{name}": whole(x) for name, x in toy.state_dict().items()}
    tensors |= {f"ema.{name}": whole(x) for name, x in average.state_dict().items()}
    for name, parameter in toy.named_parameters():
        tensors |= {f"optim.{name}.{k}": whole(x) for k, x in optimizer.state[parameter].items()}
    if save_to is not None:
        other = CheckpointManager(Path(save_to), world)
        assert other.save(STEPS, toy, optimizer, {}, ema=average.state_dict(), blocking=True)
        other.close()
    batches = TokenBatches(GLOBAL_BATCH // mesh.data_degree, mesh.data_rank, mesh.data_degree)
    next_losses = []
    for _ in range(2):
        loss = loss_of(model, next(batches))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss := loss.detach())
        next_losses.append(loss.item() / world.world_size)
    return {"tensors": tensors, "losses": next_losses}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def test_any_mesh_loads_what_any_other_saved(runs, tmp_path):
    """2 ranks -> 4, as 2 x 2, -> 1: tensors equal to the bit, the next losses to 1e-6 (order of sums)."""
    straight, four = str(runs / "straight"), str(tmp_path / "four")
    by_two = run_ranks(2, loaded, straight, 1, None, scratch=tmp_path / "two_ranks")[0]
    by_four = run_ranks(4, loaded, straight, 2, four, scratch=tmp_path / "four_ranks")[0]
    by_one = run_ranks(1, loaded, four, 1, None, scratch=tmp_path / "one_rank")[0]
    for other in (by_four, by_one):
        assert by_two["tensors"].keys() == other["tensors"].keys()
        for name, expected in by_two["tensors"].items():
            assert torch.equal(other["tensors"][name], expected), name
        assert other["losses"] == pytest.approx(by_two["losses"], rel=1e-6)
    assert by_two["losses"][1] != by_two["losses"][0]
