"""What is loaded is whole, what is kept is what was asked, and nothing is taken for what it is not."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from toy import Toy, make_toy

from flywheel_shared.checkpoint import CheckpointManager, optimizer_state
from flywheel_shared.errors import UserError
from flywheel_shared.fsdp import shard_model
from flywheel_shared.launch import World, distributed
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.optimizer import make_adamw


@pytest.fixture
def world() -> Iterator[World]:
    with distributed("cpu", timeout_s=60) as world:
        yield world


class Saver:
    """A toy whose weights tell the step, its optimiser and its checkpoints."""

    def __init__(self, folder: Path, world: World, depth: int = 2, **options: object) -> None:
        self.said: list[str] = []
        self.toy = make_toy(depth)
        shard_model(self.toy, ParallelDims().build(world), list(self.toy.blocks))
        self.optimizer = adamw(self.toy)
        self.manager = CheckpointManager(folder, world, say=self.said.append, **options)

    def save(self, step: int, assets: Path | None = None) -> None:
        nn.init.constant_(self.toy.few, step)
        assert self.manager.save(
            step, self.toy, self.optimizer, {"note": f"of {step}"}, assets=assets, blocking=True
        )

    def load(self) -> tuple[int, float] | None:
        """Step, and what the weights say."""
        loaded = self.manager.load(self.toy, self.optimizer)
        return None if loaded is None else (loaded.step, self.toy.few.full_tensor()[0].item())


def adamw(toy: Toy) -> torch.optim.AdamW:
    return make_adamw(
        toy.named_parameters(), learning_rate=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def truncate(iteration: Path) -> Path:
    path = iteration / "model" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip_a_bit(iteration: Path) -> Path:
    path = iteration / "optim" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path


def remove_a_shard(iteration: Path) -> Path:
    path = iteration / "model" / "__0_0.distcp"
    path.unlink()
    return path


def remove_the_commit(iteration: Path) -> Path:
    (iteration / "commit.json").unlink()
    return iteration / "commit.json"


def spoil_the_commit(iteration: Path) -> Path:
    (iteration / "commit.json").write_text('{"format": 1, "files"')
    return iteration / "commit.json"


def point_the_commit_outside(iteration: Path) -> Path:
    commit = json.loads((iteration / "commit.json").read_text())
    commit["files"]["../iter_000000010/commit.json"] = {"bytes": 1, "sha256": "0"}
    (iteration / "commit.json").write_text(json.dumps(commit))
    return iteration / "commit.json"


DAMAGES = {
    truncate: "bytes, expected",
    flip_a_bit: "found SHA-256",
    remove_a_shard: "No such file",
    remove_the_commit: "missing",
    spoil_the_commit: "not readable",
    point_the_commit_outside: "outside of the folder",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_makes_load_fall_back_and_name_the_file(world, tmp_path, damage: Callable[[Path], Path]):
    saver = Saver(tmp_path, world)
    saver.save(10)
    saver.save(20)
    assert saver.load() == (20, 20)
    path = damage(tmp_path / "iter_000000020")
    assert saver.load() == (10, 10)
    (line,) = saver.said
    assert str(path) in line
    assert DAMAGES[damage] in line
    assert "iter_000000020 passed over" in line
    # Training goes on from 10, and comes past 20 again.
    saver.save(20)
    assert saver.load() == (20, 20)


def fall_back_on_two(world: World, folder: str) -> list[object]:
    saver = Saver(Path(folder), world)
    saver.save(1)
    saver.save(2)
    torch.distributed.barrier()
    if world.rank == 1:
        flip_a_bit(Path(folder) / "iter_000000002")
    torch.distributed.barrier()
    return [saver.load(), *saver.said]


@pytest.mark.distributed
def test_all_ranks_fall_back_together(tmp_path):
    found = run_ranks(2, fall_back_on_two, str(tmp_path / "run"), scratch=tmp_path / "ranks")
    for (step, weight), line in found:
        assert (step, weight) == (1, 1)
        assert "optim/__0_0.distcp" in line


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(world, tmp_path):
    saver = Saver(tmp_path, world)
    saver.save(10)
    truncate(tmp_path / "iter_000000010")
    with pytest.raises(UserError, match="none of its 1 checkpoints is whole"):
        saver.load()


def test_nothing_saved_is_a_fresh_start(world, tmp_path):
    assert Saver(tmp_path / "new", world).load() is None


def test_a_stale_latest_is_not_believed(world, tmp_path):
    """The newest whole checkpoint counts: a kill may come between the two renames."""
    saver = Saver(tmp_path, world)
    saver.save(10)
    saver.save(20)
    assert (tmp_path / "latest_checkpoint.txt").read_text() == "iter_000000020\n"
    (tmp_path / "latest_checkpoint.txt").write_text("iter_000000010\n")
    assert saver.load() == (20, 20)


def test_another_model_is_a_users_mistake_that_names_the_parameter(world, tmp_path):
    first = Saver(tmp_path, world)
    first.save(10)
    first.manager.close()
    with pytest.raises(UserError, match=r"another model's: it lacks blocks\.2\."):
        Saver(tmp_path, world, depth=3).load()


def test_another_shape_is_a_users_mistake_that_names_both(world, tmp_path):
    saver = Saver(tmp_path, world)
    saver.save(10)
    wider = make_toy()
    wider.few = nn.Parameter(torch.ones(5))
    shard_model(wider, ParallelDims().build(world), list(wider.blocks))
    with pytest.raises(UserError, match=r"few is \[3\], the model's is \[5\]"):
        saver.manager.load(wider)


def test_a_second_trainer_on_the_folder_is_refused(world, tmp_path):
    first = Saver(tmp_path, world)
    with pytest.raises(UserError, match="another process trains into this folder"):
        Saver(tmp_path, world)
    first.manager.close()
    Saver(tmp_path, world)


def test_leftovers_of_interrupted_saves_are_removed_at_the_start(world, tmp_path):
    first = Saver(tmp_path, world)
    first.save(10)
    first.manager.close()
    shutil.copytree(tmp_path / "iter_000000010", tmp_path / "iter_000000020.tmp")
    again = Saver(tmp_path, world)
    assert not list(tmp_path.glob("*.tmp"))
    assert again.load() == (10, 10)


def test_retention_keeps_the_last_and_the_multiples(world, tmp_path):
    saver = Saver(tmp_path, world, keep_last=2, keep_every=40)
    for step in (10, 20, 40, 50, 60, 70):
        saver.save(step)
    assert steps_of(tmp_path) == [40, 60, 70]


def test_retention_does_not_count_a_damaged_checkpoint(world, tmp_path):
    """Else the one that a fall-back needs would go."""
    saver = Saver(tmp_path, world, keep_last=2)
    saver.save(10)
    saver.save(20)
    truncate(tmp_path / "iter_000000020")
    saver.save(30)
    assert steps_of(tmp_path) == [10, 20, 30]
    saver.save(40)
    assert steps_of(tmp_path) == [30, 40]


def test_every_file_is_in_the_commit_with_its_sum_and_assets_come_along(world, tmp_path):
    assets = tmp_path / "assets"
    (assets / "inner").mkdir(parents=True)
    (assets / "config.json").write_text("{}")
    (assets / "inner" / "stats.json").write_text("[]")
    saver = Saver(tmp_path / "run", world)
    saver.save(10, assets)
    iteration = tmp_path / "run" / "iter_000000010"
    found = {str(p.relative_to(iteration)) for p in iteration.rglob("*") if p.is_file()}
    commit = json.loads((iteration / "commit.json").read_text())
    assert commit["format"] == 1
    assert commit["step"] == 10
    assert commit["files"].keys() == found - {"commit.json"}
    assert {"assets/inner/stats.json", "model/.metadata", "trainer/trainer.json"} <= found
    assert json.loads((iteration / "trainer" / "trainer.json").read_text())["note"] == "of 10"


def test_optimizer_state_has_pytorchs_own_form(world, tmp_path):
    """So that anything that reads DCP optimiser states reads ours."""
    saver = Saver(tmp_path, world)
    expected = get_optimizer_state_dict(saver.toy, saver.optimizer)
    found = optimizer_state(saver.toy, saver.optimizer)
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert found["state"][name].keys() == values.keys()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in found["param_groups"]]
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in expected["param_groups"]]
    assert [sorted(g["params"]) for g in found["param_groups"]] == [
        sorted(g["params"]) for g in expected["param_groups"]
    ]


def test_a_save_holds_the_values_of_its_moment(world, tmp_path):
    """Training changes weights while they are written."""
    saver = Saver(tmp_path, world)
    nn.init.constant_(saver.toy.few, 5)
    saver.manager.save(5, saver.toy, saver.optimizer, {})
    nn.init.constant_(saver.toy.few, 6)
    saver.manager.wait()
    assert saver.load() == (5, 5)
