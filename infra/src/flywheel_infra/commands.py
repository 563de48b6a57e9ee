"""Start a step's command in its stage's environment, watch it, stop it; and servers that other steps use."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from flywheel_infra import ledger
from flywheel_infra.environments import ENVIRONMENTS, ROOT
from flywheel_infra.profile import Step

SERVER_READY_WITHIN_S = 240.0
POLL_S = 0.25
TAIL_LINES = 15
HEADER = "--- "  # before an attempt's own output


class StepFailed(Exception):
    """A step's command failed; the message says which, how and where its log is."""

    def __init__(self, step: Step, reason: str, log: Path) -> None:
        super().__init__(f"step '{step.name}' {reason}; log: {log}")
        self.tail = tail(log, TAIL_LINES)


class Command:
    """A running command under its guard, its output appended to a log."""

    def __init__(self, step: Step, root: Path, log: Path, lock: IO[str], server: str | None = None) -> None:
        """Start it. The guard inherits `lock`: the folder stays held until the last process is gone."""
        self.step, self.log = step, log
        argv = step.command(root, server)
        programs = ENVIRONMENTS / step.stage / "bin"
        environment = {
            name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', '')}"
        environment["PYTHONUNBUFFERED"] = "1"  # the last line of the log is the progress shown
        environment.setdefault("PYTHONWARNINGS", "ignore")  # of libraries, about themselves
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as output:
            output.write(f"{HEADER}{ledger.now()} $ {' '.join(argv)}\n")
            output.flush()
            guard = [sys.executable, "-m", "flywheel_infra.guard", str(os.getpid())]
            self.process = subprocess.Popen(
                [*guard, str(programs / argv[0]), *argv[1:]],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
                start_new_session=True,  # a Ctrl-C reaches the run alone, which stops in order
            )

    def wait(self, on_tick: Callable[[str], None]) -> None:
        """Until it ends, calling `on_tick(last line of the log)`; raises StepFailed where it fails."""
        while (code := self._poll()) is None:
            on_tick(tail(self.log, 1))
        if code != 0:
            raise StepFailed(self.step, f"failed with exit code {code}", self.log)

    def _poll(self) -> int | None:
        try:
            return self.process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ask it to end and wait until everything below it has; the guard puts a limit to that."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


class Server(Command):
    """A serve step: started, then asked until it answers."""

    def address(self, root: Path, on_tick: Callable[[str], None]) -> str:
        """ws://host:port of what the server wrote to its ready file, once GET /healthz answers there.

        Raises StepFailed where it ends first or takes too long.
        """
        ready = root / str(self.step.ready_file)
        deadline = time.monotonic() + SERVER_READY_WITHIN_S
        while time.monotonic() < deadline:
            if self._poll() is not None:
                raise StepFailed(self.step, "ended before it was ready", self.log)
            on_tick(tail(self.log, 1))
            if ready.is_file():
                place = ready.read_text().strip()
                if place and _answers(f"http://{place}/healthz"):
                    return f"ws://{place}"
        raise StepFailed(self.step, f"was not ready within {SERVER_READY_WITHIN_S:.0f} s", self.log)

    def check(self) -> None:
        """Raise StepFailed where the server has died: an evaluation against it measured nothing."""
        if self.process.poll() is not None:
            raise StepFailed(self.step, f"ended early with exit code {self.process.returncode}", self.log)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - an address of our own server
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def tail(log: Path, lines: int) -> str:
    """The last lines of the newest attempt; progress bars' carriage returns split lines too.

    Of a single line it is the newest that a stage itself wrote: libraries' chatter begins with a bracket, a
    slash or a space.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        text = file.read().decode(errors="replace")
    said: list[str] = []
    for line in text.replace("\r", "\n").splitlines():
        if line.startswith(HEADER):
            said = []
        elif line.strip() and not (lines == 1 and line.startswith(("[", "/", " "))):
            said.append(line)
    return "\n".join(said[-lines:])
