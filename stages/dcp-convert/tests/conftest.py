"""Checkpoints as training leaves them, made once and copied by the tests that damage them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

TOOL = Path(sys.executable).parent / "dcp-convert"


@dataclass
class Saved:
    """A run folder with one committed checkpoint, and the full weights that went into it."""

    run: Path
    iteration: Path
    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor]


def commit(iteration: Path, step: int) -> None:
    """Write commit.json over all files of the folder, as a trainer does last."""
    files = {
        path.relative_to(iteration).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(iteration.rglob("*"))
        if path.is_file() and path.name != "commit.json"
    }
    (iteration / "commit.json").write_text(json.dumps({"format": 1, "step": step, "files": files}))


def _save(folder: Path, world_size: int) -> Saved:
    script = Path(__file__).parent / "save_checkpoint.py"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, folder, str(rank), str(world_size)], env=env)
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    full = torch.load(folder / "full.pt", weights_only=True)
    run = folder / "checkpoints" / "run"
    iteration = run / "iter_000000100"
    iteration.mkdir(parents=True)
    for part in ("model", "ema", "optim"):
        (folder / part).rename(iteration / part)
    (iteration / "trainer").mkdir()
    (iteration / "trainer" / "trainer.json").write_text('{"step": 100}')
    (iteration / "assets" / "tokenizer").mkdir(parents=True)
    (iteration / "assets" / "config.json").write_text('{"model_type": "test"}')
    (iteration / "assets" / "tokenizer" / "vocabulary.bin").write_bytes(bytes(range(256)))
    commit(iteration, 100)
    (run / "latest_checkpoint.txt").write_text("iter_000000100\n")
    return Saved(run, iteration, full["model"], full["ema"])


@pytest.fixture(scope="session")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _save(tmp_path_factory.mktemp("sharded"), 2)


@pytest.fixture(scope="session")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Saved by one process; not to be changed."""
    return _save(tmp_path_factory.mktemp("unsharded"), 1)


@pytest.fixture
def sharded(_sharded: Saved, tmp_path: Path) -> Saved:
    """Saved by FSDP2 on two ranks; a copy that a test may damage."""
    run = tmp_path / "checkpoints" / "run"
    shutil.copytree(_sharded.run, run)
    return Saved(run, run / _sharded.iteration.name, _sharded.model, _sharded.ema)


@pytest.fixture
def add_iteration() -> Callable[[Saved, int], Path]:
    """Copy the checkpoint to another step of the run, whole."""

    def add(saved: Saved, step: int) -> Path:
        iteration = saved.run / f"iter_{step:09d}"
        shutil.copytree(saved.iteration, iteration)
        commit(iteration, step)
        return iteration

    return add


@pytest.fixture
def recommit() -> Callable[[Path, int], None]:
    """Vouch for the files of a checkpoint as they are now."""
    return commit


@pytest.fixture
def tool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the console script; never raises."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [TOOL, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload,no-any-return]

    return run


@pytest.fixture
def start_tool() -> Callable[..., "subprocess.Popen[bytes]"]:
    """Start the console script and return its process."""
    return lambda *arguments: subprocess.Popen([TOOL, *map(str, arguments)], stderr=subprocess.DEVNULL)


@pytest.fixture
def same_bits() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], bool]:
    """Whether two sets of tensors agree in names, types, shapes and every bit."""

    def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (found[name], value)]
            assert torch.equal(*bits), name
        return True

    return compare
