"""Checkpoints of a run: sharded, asynchronous, whole or absent.

    <run>/latest_checkpoint.txt          "iter_000000100"
    <run>/iter_000000100/model/          DCP, parameter names as they are, float32
                        /ema/            DCP, the same names (where an average is kept)
                        /optim/          DCP, optimiser state by parameter name
                        /trainer/        trainer.json and rng_<rank>.pt
                        /assets/         files that exports need: config.json, stats.json, ...
                        /commit.json     every other file's size and SHA-256; written last

A save goes to ``iter_*.tmp`` and becomes whole by one rename. Its collectives run on the checkpoint group.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from flywheel_shared.errors import UserError
from flywheel_shared.average import Average
from flywheel_shared.fsdp import local
from flywheel_shared.launch import World

LATEST = "latest_checkpoint.txt"
COMMIT = "commit.json"
SPARE = 1.05  # free space demanded over the bytes of the tensors


@dataclass
class State:
    """What a checkpoint holds besides files: the objects it is taken from and restored into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None


class CheckpointManager:
    """Saves and finds the checkpoints of one run folder; every rank holds one and calls it alike."""

    def __init__(
        self,
        folder: Path,
        world: World,
        keep_last: int = 2,
        assets: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Open a run folder.

        Args:
            folder: the run's folder; made where missing. What an earlier save left half-written is removed.
            world: this rank.
            keep_last: whole checkpoints to keep.
            assets: folder whose files go into every checkpoint.
            say: prints a line for people (rank 0).
        """
        self.folder = folder
        self.world = world
        self.keep_last = max(1, keep_last)
        self.assets = assets
        self.say = say
        self.last_save_s = 0.0
        self.last_stall_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("iter_*.tmp"):
                shutil.rmtree(stale)
        self._barrier()

    # Saving

    def save(self, step: int, state: State, trainer: Mapping[str, Any], blocking: bool = False) -> None:
        """Save after ``step``. Tensors are copied before this returns; writing goes on in the background.

        A save still under way is waited for first. A save that fails is reported by ``say`` and training goes on:
        the checkpoint before it stays as it is.

        Args:
            step: optimiser steps done.
            state: what is saved.
            trainer: JSON-able position of everything else.
            blocking: return when the checkpoint is whole.
        """
        self.wait()
        started = time.monotonic()
        tensors = _tensors(state)
        shards = {part: _copied(tree) for part, tree in tensors.items()}
        rng = _rng_state()
        self.last_stall_s = time.monotonic() - started

        def write() -> None:
            try:
                self._write(step, shards, dict(trainer), rng)
                self.last_save_s = time.monotonic() - started
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=write, name=f"checkpoint-{step}")
        self._thread.start()
        if blocking:
            self.wait()

    def wait(self) -> bool:
        """Wait for a save under way on all ranks; False (and a line) where it failed."""
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return True
        self.say(f"checkpoint NOT saved ({type(failure).__name__}: {failure}); training goes on without it")
        return False

    def _write(self, step: int, shards: dict[str, Any], trainer: dict[str, Any], rng: dict[str, Tensor]) -> None:
        """Write, agree that all ranks have written, sum, rename. Runs in the background on every rank."""
        name = f"iter_{step:09d}"
        target, scratch = self.folder / name, self.folder / f"{name}.tmp"
        group = self.world.checkpoint_group
        problem = self._agree(lambda: self._prepare(scratch, shards))
        if problem is None:
            # DCP raises alike on all ranks where one of them fails.
            for part, tree in shards.items():
                dcp.save(tree, checkpoint_id=str(scratch / part), process_group=group)
            problem = self._agree(lambda: _save_rng(scratch / "trainer", self.world.rank, rng))
        if problem is None:
            problem = self._agree(lambda: self._commit(scratch, target, step, trainer), first_only=True)
        if problem is not None:
            if self.world.rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise OSError(problem)

    def _prepare(self, scratch: Path, shards: dict[str, Any]) -> None:
        """Rank 0 makes the folder; every rank counts its bytes, and rank 0 compares their sum with free space."""
        mine = torch.tensor([_bytes(shards)], dtype=torch.int64)
        dist.all_reduce(mine, group=self.world.checkpoint_group)
        if self.world.rank != 0:
            return
        needed, free = int(mine.item() * SPARE), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"{self.folder}: {needed / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free")
        shutil.rmtree(scratch, ignore_errors=True)
        for part in (*shards, "trainer"):
            (scratch / part).mkdir(parents=True)
        if self.assets is not None:
            shutil.copytree(self.assets, scratch / "assets")

    def _commit(self, scratch: Path, target: Path, step: int, trainer: dict[str, Any]) -> None:
        """Rank 0: sum every file, write the marker, rename, point ``latest`` at it, drop what is too old."""
        document = trainer | {"step": step, "world_size": self.world.world_size}
        (scratch / "trainer" / "trainer.json").write_text(json.dumps(document))
        files = sorted(p for p in scratch.rglob("*") if p.is_file())
        listed = {
            str(p.relative_to(scratch)): {"bytes": p.stat().st_size, "sha256": _sum(p, sync=True)} for p in files
        }
        marker = scratch / COMMIT
        marker.write_text(json.dumps({"format": 1, "step": step, "files": listed}))
        for path in (marker, *{p.parent for p in files}, scratch):
            _fsync(path)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        _fsync(self.folder)
        write_atomically(self.folder / LATEST, f"{target.name}\n")
        for old in whole_checkpoints(self.folder)[: -self.keep_last]:
            shutil.rmtree(old)

    def _agree(self, action: Callable[[], None], first_only: bool = False) -> str | None:
        """Run an action (on rank 0 alone if asked), then learn on all ranks whether any failed, and why."""
        problem: str | None = None
        if not first_only or (self.world.rank == 0):
            try:
                action()
            except Exception as error:
                problem = f"rank {self.world.rank}: {error}"
        found: list[str | None] = [None] * self.world.world_size
        dist.all_gather_object(found, problem, group=self.world.checkpoint_group)
        return next((p for p in found if p is not None), None)

    def _barrier(self) -> None:
        dist.barrier(group=self.world.checkpoint_group)

    # Loading

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None; a warning says why a newer one was passed over. Rank 0 decides."""
        found: list[str | None] = [None]
        if self.world.rank == 0:
            for path in reversed(sorted(self.folder.glob("iter_*"))):
                problem = damage(path)
                if problem is None:
                    found = [path.name]
                    break
                self.say(f"warning: {path.name} is not whole ({problem}); trying the one before it")
        dist.broadcast_object_list(found, src=0, group=self.world.checkpoint_group)
        return None if found[0] is None else self.folder / found[0]

    def load(self, path: Path, state: State) -> dict[str, Any]:
        """Restore tensors (any mesh to any mesh) and, at the same world size, this rank's RNG.

        Returns:
            What ``trainer`` was at ``save``, with ``step`` and ``world_size``.

        Raises:
            UserError: if the checkpoint holds no average and one is kept, or belongs to another model.
        """
        if state.average is not None and not (path / "ema").is_dir():
            raise UserError(f"{path}: holds no average (ema/): set trainer.ema_decay = 0 or start a new run")
        for part, tree in _tensors(state).items():
            try:
                dcp.load(tree, checkpoint_id=str(path / part), process_group=self.world.checkpoint_group)
            except dcp.api.CheckpointException as error:
                first = next(iter(error.failures.values()))
                reason = first[0] if isinstance(first, tuple) else first
                raise UserError(f"{path / part}: does not fit this model: {reason}") from error
            if part == "optim":
                set_optimizer_state_dict(state.model, state.optimizer, optim_state_dict=tree)
        trainer = json.loads((path / "trainer" / "trainer.json").read_text())
        if trainer["world_size"] == self.world.world_size:
            _restore_rng(path / "trainer", self.world.rank)
        return trainer


def whole_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first (sizes are not compared)."""
    return sorted(p for p in folder.glob("iter_*") if p.suffix != ".tmp" and (p / COMMIT).is_file())


def damage(path: Path, sums: bool = True) -> str | None:
    """Why a checkpoint is not whole, or None: its marker, then size and (``sums``) SHA-256 of every file."""
    if path.suffix == ".tmp":
        return "its save did not finish"
    try:
        files = json.loads((path / COMMIT).read_text())["files"]
    except FileNotFoundError:
        return f"no {COMMIT}"
    except (ValueError, KeyError) as error:
        return f"{COMMIT} is unreadable: {error}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name}: missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name}: {expected['bytes']} bytes expected, {size} found"
        if sums and (found := _sum(file)) != expected["sha256"]:
            return f"{name}: SHA-256 {expected['sha256'][:12]}... expected, {found[:12]}... found"
    return None


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _tensors(state: State) -> dict[str, Any]:
    """The trees that are saved, each to a folder of its own."""
    trees: dict[str, Any] = {
        "model": dict(state.model.named_parameters()) | dict(_saved_buffers(state.model)),
        "optim": get_optimizer_state_dict(state.model, state.optimizer),
    }
    if state.average is not None:
        trees["ema"] = dict(state.average.values)
    return trees


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def _copied(tree: Any) -> Any:
    """The same tree with tensors copied to host memory, so that training may go on changing its own."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree


def _bytes(tree: Any) -> int:
    """Bytes of the tensors on this rank."""
    if isinstance(tree, Tensor):
        return local(tree).nbytes
    if isinstance(tree, Mapping):
        return sum(_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_bytes(value) for value in tree)
    return 0


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _save_rng(folder: Path, rank: int, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / f"rng_{rank}.pt")


def _restore_rng(folder: Path, rank: int) -> None:
    state = torch.load(folder / f"rng_{rank}.pt", weights_only=True)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sum(path: Path, sync: bool = False) -> str:
    """SHA-256 of a file, read once; ``sync`` also makes it durable."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
