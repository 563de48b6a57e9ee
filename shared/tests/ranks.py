"""Runs a function on several ranks, with a deadline after which every rank shows where it stood.

Ranks are forked from a server that has PyTorch imported, so that starting them costs a fraction of a second.
"""

import faulthandler
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
# torch._dynamo is imported by whoever shards a model first, and takes seconds.
_context.set_forkserver_preload(
    ["toy", "flywheel_shared.trainer", "torch._dynamo", "torch.utils.tensorboard"]
)
_GRACE_S = 10.0


class RanksFailed(Exception):
    """Some rank failed or the deadline passed; the message holds what every rank printed."""

    def __init__(self, message: str, exit_codes: list[int | None]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    scratch: Path,
    timeout_s: float = 180.0,
    kill_after_s: float = math.inf,
) -> list[Any]:
    """Call `function(world, *arguments)` on `count` ranks; what each returned (tensors and plain values).

    `scratch` takes what ranks print. A rank that fails gives the others 10 s to notice. After
    `kill_after_s`, counted from rank 0's first line, all of them are killed.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    processes = [
        _context.Process(target=_rank, args=(rank, count, port, function, arguments, scratch, timeout_s))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    first_line = math.inf
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if any(p.exitcode not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if first_line == math.inf and printed(scratch, 0):
            first_line = time.monotonic()
        if time.monotonic() > first_line + kill_after_s:
            for process in processes:
                process.kill()
        time.sleep(0.02)
    late = [p for p in processes if p.is_alive()]
    for process in late:  # faulthandler answers with the stacks of all threads
        os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    exit_codes = [p.exitcode for p in processes]
    if late or any(exit_codes):
        said = "\n".join(f"--- rank {r}\n{printed(scratch, r)[-6000:]}" for r in range(count))
        reason = f"{len(late)} ranks were still running at the deadline" if late else "some rank failed"
        raise RanksFailed(f"{reason}; exit codes {exit_codes}\n{said}", exit_codes)
    return [torch.load(scratch / f"{rank}.pt", weights_only=True) for rank in range(count)]


def printed(scratch: Path, rank: int) -> str:
    """What a rank wrote on stdout and stderr."""
    path = scratch / f"{rank}.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    rank: int,
    count: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    scratch: Path,
    timeout_s: float,
) -> None:
    output = os.open(scratch / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(timeout_s + 2 * _GRACE_S, exit=True)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    from flywheel_shared.launch import distributed

    try:
        with distributed("cpu", timeout_s=60) as world:
            result = function(world, *arguments)
            torch.save(result, scratch / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the server's forks share its exit handlers
