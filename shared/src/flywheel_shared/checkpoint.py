"""Checkpoints that are whole or not there: sharded DCP folders, saved while training goes on.

A save copies this rank's shards (the only time training waits), then a thread writes and checksums them,
and rank 0 commits when every rank is done. All talk between ranks is on the checkpoint group. Layout of a
checkpoint: model/ ema/ optim/ (DCP), trainer/ (trainer.json, rank_*.pt), assets/, commit.json.
"""

import io
import json
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from flywheel_shared.checkpoint_folder import (
    CheckpointFolder,
    FileSum,
    NotWhole,
    check_sums,
    read_commit,
    sum_of,
    write_durably,
)
from flywheel_shared.errors import UserError, one_line
from flywheel_shared.fsdp import local
from flywheel_shared.launch import World
from flywheel_shared.random_state import random_state, set_random_state
from flywheel_shared.staging import Staging

# PyTorch's own writer warns of itself.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")

# Names, shapes and file headers take room beside the tensors.
_FREE_MARGIN = 1.02
_FREE_MARGIN_BYTES = 1 << 20
_NAMES_SHOWN = 3


class SaveFailed(Exception):
    """A save that left no checkpoint; what was there before is untouched."""


@dataclass(frozen=True)
class Loaded:
    """What came back: `trainer_state` as given to `save`; `rank_state` only with as many ranks as then."""

    step: int
    folder: Path
    trainer_state: dict[str, Any]
    rank_state: dict[str, Any] | None


class CheckpointManager:
    """Saves and loads the checkpoints of one run. Every method is called by all ranks alike."""

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        verify_sums: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Claim `folder`, and remove what interrupted saves left in it.

        `say` gets lines for the user (by default rank 0 prints them on stderr). Raises `UserError` when
        another process trains into the folder.
        """
        self.folder = CheckpointFolder(folder)
        self.last_save_s: float | None = None  # of the last save that was committed, from call to commit
        self.last_stall_s = 0.0  # how long the last call of `save` held up training
        self.last_error: str | None = None  # why the last save failed
        self._world = world
        self._group = world.checkpoint_group
        self._keep_last, self._keep_every = keep_last, keep_every
        self._verify_sums = verify_sums
        self.say = say or self._print
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._on_rank_0(self.folder.claim)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer_state: dict[str, Any],
        *,
        rank_state: dict[str, Any] | None = None,
        ema: dict[str, Tensor] | None = None,
        assets: Path | None = None,
        blocking: bool = False,
    ) -> bool:
        """Save `iter_<step>`; returns False when a blocking save failed (the reason was said).

        `trainer_state` must be made of JSON values (rank 0's is kept); `rank_state` is each rank's own: plain
        values and tensors. `assets` is a folder whose files are copied. A save that is still being written
        is waited for. A failed save is reported by a line, keeps the checkpoints there are, and never
        raises: training goes on.
        """
        began = time.monotonic()
        self.wait()
        states: dict[str, dict[str, Any]] = {"model": model.state_dict()}
        if ema is not None:
            states["ema"] = ema
        states["optim"] = optimizer_state(model, optimizer)
        content = _Content(
            self._staging.copy(states),
            json.dumps({**trainer_state, "step": step, "world_size": self._world.world_size}, indent=1),
            _to_bytes({"rng": random_state(), "state": rank_state}),
            assets,
        )
        self.last_error = None
        self._thread = threading.Thread(
            target=self._write, args=(step, content, began), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()
        if blocking:
            self.wait()
        self.last_stall_s = time.monotonic() - began
        return self.last_error is None

    def wait(self) -> None:
        """Return when no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def row(self) -> dict[str, float]:
        """ckpt/save_s of the save that was committed since the last call, and ckpt/stall_s; else nothing."""
        if self.last_save_s is None:
            return {}
        row = {"ckpt/save_s": self.last_save_s, "ckpt/stall_s": self.last_stall_s}
        self.last_save_s = None
        return row

    def close(self) -> None:
        """Wait for the save under way and give the folder up."""
        self.wait()
        self._staging.close()
        self.folder.release()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        ema: dict[str, Tensor] | None = None,
    ) -> Loaded | None:
        """Load the newest whole checkpoint in place; None where there is none at all.

        One that is not whole is passed over with a warning naming the file. Any mesh may load what any other
        saved; random states come back when there are as many ranks as then. Raises `UserError` when the
        model is another one, or when there are checkpoints but none is whole.
        """
        steps = self._on_rank_0(lambda: [step for step, _ in self.folder.iterations()])
        for step in steps:
            folder = self.folder.iteration(step)
            try:
                self._verify(folder)
                return self._load(folder, step, model, optimizer, ema)
            except (NotWhole, dcp.CheckpointException) as error:
                self.say(f"checkpoint {folder.name} passed over: {_reason(error)}")
        if steps:
            raise UserError(
                f"{self.folder.path}: none of its {len(steps)} checkpoints is whole; mend them or move them "
                "away to start anew"
            )
        return None

    # Saving, in its own thread

    def _write(self, step: int, content: "_Content", began: float) -> None:
        try:
            self._on_rank_0(lambda: self._prepare(step))
            self._check_space(content)
            unfinished = self.folder.unfinished(step)
            for name, state in content.states.items():
                writer = dcp.FileSystemWriter(unfinished / name, sync_files=True)
                dcp.save(state, storage_writer=writer, process_group=self._group)
            files = self._everywhere(lambda: self._write_own(unfinished, content))
            merged = {name: entry for one in files for name, entry in one.items()}
            self._on_rank_0(lambda: self._commit(step, merged))
            self.last_save_s = time.monotonic() - began
        except (Exception, dcp.CheckpointException) as error:
            self.last_error = _reason(error)
            kept = "the checkpoints there are stay"
            self.say(f"checkpoint of step {step} FAILED ({self.last_error}); training goes on, {kept}")
            if self._world.rank == 0:
                shutil.rmtree(self.folder.unfinished(step), ignore_errors=True)

    def _prepare(self, step: int) -> None:
        unfinished = self.folder.unfinished(step)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        (unfinished / "trainer").mkdir(parents=True)

    def _check_space(self, content: "_Content") -> None:
        here = sum(_bytes_to_write(state) for state in content.states.values())
        needed = int(sum(self._everywhere(lambda: here)) * _FREE_MARGIN) + _FREE_MARGIN_BYTES
        free = self._on_rank_0(lambda: shutil.disk_usage(self.folder.path).free)
        if free < needed:
            raise SaveFailed(f"{self.folder.path}: needs {_gib(needed)}, {_gib(free)} free")

    def _write_own(self, unfinished: Path, content: "_Content") -> dict[str, FileSum]:
        """Write this rank's small files; sizes and sums of all files that it wrote."""
        rank = self._world.rank
        (unfinished / "trainer" / rank_file(rank)).write_bytes(content.rank_state)
        paths = [unfinished / "trainer" / rank_file(rank)]
        paths += sorted(unfinished.glob(f"*/__{rank}_*.distcp"))
        if rank == 0:
            write_durably(unfinished / "trainer" / "trainer.json", content.trainer_state + "\n")
            if content.assets is not None:
                shutil.copytree(content.assets, unfinished / "assets")
            paths += [*unfinished.glob("*/.metadata"), unfinished / "trainer" / "trainer.json"]
            paths += [path for path in (unfinished / "assets").rglob("*") if path.is_file()]
        return {str(path.relative_to(unfinished)): sum_of(path, sync=True) for path in paths}

    def _commit(self, step: int, files: dict[str, FileSum]) -> None:
        self.folder.commit(step, files)
        self.folder.retain(self._keep_last, self._keep_every, newest=step)

    # Loading

    def _verify(self, folder: Path) -> None:
        """Compare sizes, then checksums, each rank some of the files."""
        files = self._on_rank_0(lambda: read_commit(folder))
        if self._verify_sums:
            mine = sorted(files)[self._world.rank :: self._world.world_size]
            self._everywhere(lambda: check_sums(folder, {name: files[name] for name in mine}))

    def _load(
        self,
        folder: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ema: dict[str, Tensor] | None,
    ) -> Loaded:
        self._load_state(folder / "model", model.state_dict())
        if ema is not None:
            # A run that turns the average on starts it from the weights.
            averaged = self._on_rank_0((folder / "ema").is_dir)
            self._load_state(folder / ("ema" if averaged else "model"), ema)
        if optimizer is not None:
            # Groups are left out: learning rate and weight decay are the recipe's, not the checkpoint's.
            self._load_state(folder / "optim", {"state": optimizer_state(model, optimizer)["state"]})
        trainer_state = self._on_rank_0(lambda: json.loads((folder / "trainer" / "trainer.json").read_text()))
        own = None
        if trainer_state["world_size"] == self._world.world_size:
            path = folder / "trainer" / rank_file(self._world.rank)
            own = self._everywhere(lambda: torch.load(path, weights_only=True))[self._world.rank]
            set_random_state(own["rng"])
        return Loaded(step, folder, trainer_state, None if own is None else own["state"])

    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place, whatever mesh they lie on."""
        reader = dcp.FileSystemReader(folder)
        self._on_rank_0(lambda: _check_names(folder, reader, state))
        dcp.load(state, storage_reader=reader, process_group=self._group)

    # Agreement: what fails on one rank fails on all, instead of leaving the others waiting

    def _everywhere[T](self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; the results of all, or the first rank's error raised on all."""
        mine: tuple[T | None, Exception | None]
        try:
            mine = (work(), None)
        except Exception as error:
            mine = (None, error)
        all_of_them: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(all_of_them, mine, group=self._group)
        for _, failure in all_of_them:
            if failure is not None:
                raise failure
        return [result for result, _ in all_of_them]

    def _on_rank_0[T](self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; its result, or its error, on all."""
        outcome: list[Any] = [None, None]
        if self._world.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def _print(self, line: str) -> None:
        if self._world.rank == 0:
            print(line, file=sys.stderr, flush=True)


def _reason(error: BaseException) -> str:
    """One line; of DCP's failure, which holds every rank's traceback, the first rank's error."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        return one_line(f"rank {rank}: {type(cause).__name__}: {cause}")
    if isinstance(error, NotWhole | SaveFailed):
        return one_line(str(error))
    return one_line(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Content:
    """Everything of a save, no longer shared with training."""

    states: dict[str, dict[str, Any]]
    trainer_state: str
    rank_state: bytes
    assets: Path | None


def rank_file(rank: int) -> str:
    """Name of a rank's file in trainer/: its random states and its own state."""
    return f"rank_{rank:05d}.pt"


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State by parameter name, as `get_optimizer_state_dict` gives it, sharing memory with the optimizer."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def _bytes_to_write(value: Any) -> int:
    """Of this rank: replicas write nothing."""
    if isinstance(value, dict):
        return sum(map(_bytes_to_write, value.values()))
    if isinstance(value, DTensor):
        coordinate = value.device_mesh.get_coordinate() or []
        replica = any(p.is_replicate() and c for p, c in zip(value.placements, coordinate, strict=True))
        return 0 if replica else local(value).nbytes
    return value.nbytes if isinstance(value, Tensor) and dist.get_rank() == 0 else 0


def _check_names(folder: Path, reader: dcp.FileSystemReader, state: dict[str, Any]) -> None:
    """Compare names and shapes, so that another model is told from a damaged file."""
    saved = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = dict(_shapes(state))
    for what, names in (("lacks", wanted.keys() - saved.keys()), ("has also", saved.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
            raise UserError(f"{folder}: another model's: it {what} {shown} ({len(names)} in all)")
    for name, shape in wanted.items():
        if saved[name] != shape:
            raise UserError(f"{folder}: {name} is {list(saved[name])}, the model's is {list(shape)}")


def _shapes(state: dict[str, Any], prefix: str = "") -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for name, value in state.items():
        if isinstance(value, dict):
            found += _shapes(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            found.append((prefix + name, tuple(value.shape)))
    return found


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
