"""Stands between a run and a step's command, so that nothing of the step outlives the run.

    python -m flywheel_infra.guard <pid of the run> <command...>

A launcher puts its workers into sessions of their own, out of reach of a signal to a process group, and a run
that is killed with SIGKILL cannot pass anything on. The guard asks the kernel for a SIGTERM when the run dies
and for the orphans of everything below it (PR_SET_CHILD_SUBREAPER). On SIGTERM it passes the signal to the
command, which may save and exit, and after a grace kills whatever is left. It exits with the command's code.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
GRACE_S = 30.0  # the run is there and asked for a stop: training may save
ORPHANED_GRACE_S = 8.0  # the run is dead; the next one is waiting for the folder


class _Stop(Exception):
    pass


def main() -> None:
    """Run the command to its end, or until told to stop; exit with its code."""
    run, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != run:  # it died before the kernel was told
        sys.exit(1)
    child, code = None, None
    try:
        child = subprocess.Popen(command, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        code = _wait_for(child.pid)
    except FileNotFoundError:
        print(f"guard: no such program: {command[0]}", file=sys.stderr)
        code = 127
    except _Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if child is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it ended at this very moment
                code = _stop_softly(child.pid, GRACE_S if os.getppid() == run else ORPHANED_GRACE_S)
    _kill_descendants()
    sys.exit(1 if code is None else code)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _Stop


def _wait_for(pid: int) -> int:
    """Reap every child and adopted orphan until `pid` ends; its exit code (128 + signal where killed)."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return _code(status)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _stop_softly(pid: int, grace_s: float) -> int | None:
    """SIGTERM to `pid` alone: it knows its workers. None where it has not ended within the grace."""
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return _code(status)
        if ended == 0:
            time.sleep(0.05)
    return None


def _kill_descendants() -> None:
    """SIGKILL everything below this process until nothing is: an orphan becomes our child on the way."""
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in listed.split()]


if __name__ == "__main__":
    main()
