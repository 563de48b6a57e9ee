"""Who am I among the ranks, and the process groups they talk over.

with distributed() as world:
    mesh = ParallelDims().build(world)
    ...

Start several local ranks with `launch_local` (in launcher.py).
"""

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flywheel_shared.errors import UserError, one_line
from flywheel_shared.launcher import FAILURES, LAUNCHER_PID, launch_local, must_launch

__all__ = ["Ranks", "World", "discover", "distributed", "launch_local", "must_launch"]

DEFAULT_PORT = 29500
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """Place of this process: `rank` of `world_size`, `local_rank` on its node, and where rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


@dataclass(frozen=True)
class World:
    """The ranks of a run that has its process groups.

    `checkpoint_group` is a gloo group of its own, over all ranks: checkpoints and objects travel on it from
    whatever thread, and never interleave with the collectives of the training step.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup


def discover(env: Mapping[str, str]) -> Ranks:
    """Read the place of this process from the environment.

    Understood: torchrun and everything that sets RANK and WORLD_SIZE as it does (PyTorchJob with one process
    a pod sets no LOCAL_RANK); JobSet with JOB_COMPLETION_INDEX, NUM_NODES and MASTER_ADDR, one process a
    node; and a process alone. Raises `UserError` naming the variable that is missing or wrong.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK", 0)
    elif "NUM_NODES" in env and _number(env, "NUM_NODES") > 1:
        rank, world_size, local_rank = _number(env, "JOB_COMPLETION_INDEX"), _number(env, "NUM_NODES"), 0
    else:
        return Ranks()
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of {world_size} ranks: it must be 0 to {world_size - 1}")
    if world_size > 1 and not env.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR is not set, but there are {world_size} ranks: name the host of rank 0")
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return Ranks(rank, world_size, local_rank, address, _number(env, "MASTER_PORT", DEFAULT_PORT))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"environment variable {name} is {text!r}, expected a whole number") from None


@contextlib.contextmanager
def distributed(device: str = "auto", timeout_s: float = 600.0) -> Iterator[World]:
    """Join the process groups, hand out the `World`, and leave them again.

    `device` is auto (CUDA where there is one), cpu or cuda. The default group is gloo on a CPU and
    cpu:gloo,cuda:nccl on CUDA; a collective that takes longer than `timeout_s` fails on every rank. A lone
    process opens no socket. What is raised inside is noted for the launcher before the groups are left, so
    that the first failure is known from those it causes on other ranks.
    """
    _die_with_the_launcher()
    rank = os.environ.get("RANK", "0")
    try:
        ranks = discover(os.environ)
        target = _device(device, ranks.local_rank)
        with quiet_gloo():
            world = _join(ranks, target, datetime.timedelta(seconds=timeout_s))
        yield world
    except BaseException as error:
        _note_failure(rank, error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise UserError(f"local rank {local_rank} needs its own GPU, {found} found; start fewer ranks")
    target = torch.device("cuda", local_rank)
    torch.cuda.set_device(target)
    return target


def _join(ranks: Ranks, device: torch.device, timeout: datetime.timedelta) -> World:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    bound = device if device.type == "cuda" else None
    if ranks.world_size == 1:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
    else:
        # env:// reuses the launcher's store where there is one (TORCHELASTIC_USE_AGENT_STORE).
        os.environ.setdefault("MASTER_PORT", str(ranks.master_port))
        dist.init_process_group(
            backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout, device_id=bound
        )
    checkpoints = dist.new_group(backend="gloo", timeout=timeout)
    if not isinstance(checkpoints, dist.ProcessGroup):
        raise RuntimeError("this process is in no group for checkpoints")
    return World(ranks.rank, ranks.world_size, ranks.local_rank, device, checkpoints)


@contextlib.contextmanager
def quiet_gloo() -> Iterator[None]:
    """Drop what gloo prints on stdout whenever a group is made (it has no switch for that)."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _die_with_the_launcher() -> None:
    """Ranks whose launcher is killed must not train on: a restarted run would find two trainers."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        raise RuntimeError("the launcher of this rank has died")


def _note_failure(rank: str, error: BaseException) -> None:
    folder = os.environ.get(FAILURES)
    if folder is None or isinstance(error, GeneratorExit | SystemExit) or type(error).__name__ == "Exit":
        return
    # Another rank may fail of this one's absence, upon which the launcher ends all that still run: it must not
    # cut off the cause, which is about to be said.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = {"time": time.time(), "error": one_line(f"{type(error).__name__}: {error}")}
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(note))
    path.with_suffix(".tmp").replace(path)
