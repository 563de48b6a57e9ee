"""Start several ranks on this node and watch over them.

if must_launch(nproc):
    raise typer.Exit(launch_local(nproc, "dreamzero_sft.cli", sys.argv[1:]))
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel_shared.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

FAILURES = "FLYWHEEL_FAILURES"  # folder in which a rank notes what it failed of
LAUNCHER_PID = "FLYWHEEL_LAUNCHER_PID"
_TERMINATED = 128 + signal.SIGTERM
_FORWARD_EVERY_S = 0.2
_HOLD_BACK_S = 1.0
_SHOWN_LINES = 60


def must_launch(nproc: int, env: Mapping[str, str] | None = None) -> bool:
    """Whether ranks must be started: not so when this process is a rank, or the only one there will be."""
    env = os.environ if env is None else env
    return "LOCAL_RANK" not in env and nproc > 1


def launch_local(nproc: int, module: str, argv: Sequence[str]) -> int:
    """Run `python -m module *argv` on `nproc` ranks of this node; returns the exit code of the whole.

    0 when all ranks end with 0; else that of the rank that failed first, whose last words on stderr are
    shown (other ranks fail of the first one's absence). Rank 0's stderr is passed on as it comes, everybody's
    stdout too. SIGTERM and Ctrl-C are passed to the ranks, which have all the time they need to save and
    exit; the code is then 143 unless all of them ended with 0.

    With NUM_NODES, JOB_COMPLETION_INDEX and MASTER_ADDR (JobSet), or PET_NNODES and PET_NODE_RANK
    (PyTorchJob), these are the ranks of one node of several; otherwise all sockets are bound to loopback.
    """
    if nproc < 1:
        raise UserError(f"nproc is {nproc}, expected 1 or more")
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    # Its banners and tracebacks are about the launcher; what the user needs is the rank's own error.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="flywheel-ranks-") as scratch:
        folder = Path(scratch)
        _set_environment(nproc, folder)
        spec = _worker_spec(nproc, module, argv)
        logs = DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ERR)
        agent = LocalElasticAgent(spec, logs_specs=logs)
        forwarder = _Forwarder(folder)
        stop = _StopForwarding(agent)
        try:
            result = agent.run()
        finally:
            stop.restore()
            forwarder.close()
        exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        if stop.received and set(exit_codes.values()) <= {_TERMINATED, -signal.SIGTERM}:
            forwarder.flush()
            return _TERMINATED if exit_codes else 0
        if not result.is_failed():
            forwarder.flush()
            return 0
        return _report_failure(folder, exit_codes, forwarder)


def _set_environment(nproc: int, folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ[FAILURES] = str(folder)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # The agent would raise at these and give the ranks 30 s; a save may need longer (see _StopForwarding).
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"


def _worker_spec(nproc: int, module: str, argv: Sequence[str]) -> "WorkerSpec":
    from torch.distributed.elastic.agent.server import WorkerSpec

    nodes, node_rank = _nodes(os.environ)
    return WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-m", module, *argv),
        rdzv_handler=_cluster_rendezvous(nodes, node_rank) if nodes > 1 else _loopback_rendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if nodes == 1 else None,
    )


def _nodes(env: Mapping[str, str]) -> tuple[int, int]:
    """Number of nodes and which one this is."""
    for count, index in (("NUM_NODES", "JOB_COMPLETION_INDEX"), ("PET_NNODES", "PET_NODE_RANK")):
        if count in env:
            try:
                return int(env[count]), int(env.get(index, "0"))
            except ValueError:
                raise UserError(
                    f"{count} is {env[count]!r} and {index} {env.get(index)!r}, expected whole numbers"
                ) from None
    return 1, 0


def _cluster_rendezvous(nodes: int, node_rank: int) -> "RendezvousHandler":
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    if "MASTER_ADDR" not in os.environ:
        raise UserError(f"MASTER_ADDR is not set, but there are {nodes} nodes: name the host of node 0")
    port = int(os.environ.get("MASTER_PORT", "29500"))
    return StaticTCPRendezvous(os.environ["MASTER_ADDR"], port, node_rank, nodes, "flywheel", timeout=900)


def _loopback_rendezvous() -> "RendezvousHandler":
    """One node: the store listens on 127.0.0.1 alone, on a port that the system picks.

    PyTorch's own rendezvous would listen on every interface; a socket that is already bound is the way to
    tell its store where to listen.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class Loopback(RendezvousHandler):
        def __init__(self) -> None:
            self._run_id = uuid.uuid4().hex
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            self._port: int = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1",
                self._port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )

        def get_backend(self) -> str:
            return "loopback"

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            info = RendezvousStoreInfo("127.0.0.1", self._port)
            return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, info)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    return Loopback()


class _StopForwarding:
    """Pass SIGTERM and Ctrl-C to the ranks as SIGTERM, and let them end by themselves.

    A second Ctrl-C ends the launcher, and with it the ranks.
    """

    def __init__(self, agent: Any) -> None:
        self.received = False
        self._agent = agent
        stops = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._pass_on) for number in stops}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = True
        for worker in self._agent.get_worker_group().workers:
            if isinstance(worker.id, int):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.id, signal.SIGTERM)


class _Forwarder(threading.Thread):
    """Passes on rank 0's stderr, a moment later: should another rank fail, what rank 0 says then is noise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True, name="stderr of rank 0")
        self._folder = folder
        self._passed_on = 0
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        seen: list[tuple[float, int]] = []  # (when, how many bytes there were)
        while not self._ended.wait(_FORWARD_EVERY_S):
            path = stderr_of(self._folder, 0)
            if path is None or any(self._folder.glob("*.json")):
                continue
            now = time.monotonic()
            seen.append((now, path.stat().st_size))
            due = [size for when, size in seen if when <= now - _HOLD_BACK_S]
            seen = [entry for entry in seen if entry[0] > now - _HOLD_BACK_S]
            if due:
                self._pass_on(path, due[-1])

    def flush(self) -> None:
        """Pass on the rest; call after `close`."""
        path = stderr_of(self._folder, 0)
        if path is not None:
            self._pass_on(path, path.stat().st_size)

    def close(self) -> None:
        self._ended.set()
        self.join()

    def _pass_on(self, path: Path, end: int) -> None:
        if end <= self._passed_on:
            return
        with path.open("rb") as file:
            file.seek(self._passed_on)
            text = file.read(end - self._passed_on)
        self._passed_on = end
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


def stderr_of(folder: Path, local_rank: int) -> Path | None:
    """The file that takes the stderr of a rank, once there is one."""
    return next(iter(folder.glob(f"logs/*/attempt_0/{local_rank}/stderr.log")), None)


def _report_failure(folder: Path, exit_codes: dict[int, int], forwarder: _Forwarder) -> int:
    """Show the last words of the rank that failed first; returns its exit code."""
    notes = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}

    def order(rank: int) -> tuple[int, float]:
        # A rank that was killed left no note; a user's mistake ends with 2 on whichever rank met it.
        code = exit_codes[rank]
        killed = code < 0 and code != -signal.SIGTERM
        kind = 0 if killed else 1 if code == 2 else 2
        return (kind, notes.get(rank, {}).get("time", float("inf")))

    first = min(exit_codes, key=order)
    code = exit_codes[first]
    path = stderr_of(folder, first)
    lines = path.read_text(errors="replace").splitlines() if path is not None else []
    if code == 2:
        print(*lines[-1:], file=sys.stderr, flush=True)
    elif first == 0:
        forwarder.flush()
    else:
        print(*lines[-_SHOWN_LINES:], sep="\n", file=sys.stderr, flush=True)
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"rank {first} was killed by {name}{hint}", file=sys.stderr, flush=True)
        return 1
    return code
