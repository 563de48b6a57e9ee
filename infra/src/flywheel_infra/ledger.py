"""flywheel.json: which steps of a run are done, what each took and what it made.

Written atomically after every change, so that a kill leaves the former or the new content, never half of it.
"""

import datetime
import fcntl
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flywheel_infra.environments import ROOT
from flywheel_shared.errors import UserError

LEDGER = "flywheel.json"
LOCK = ".flywheel.lock"
ORPHANS_STOP_WITHIN_S = 45.0  # how long a killed run's own processes may take to stop


class StepRecord(BaseModel):
    """What is known of one step."""

    model_config = ConfigDict(extra="forbid")

    digest: str
    state: Literal["started", "done"]
    stage: str
    argv: list[str]  # with its placeholders
    outputs: list[str]  # relative to the root
    recipe: dict[str, Any] | None = None  # what it was asked, as parsed
    log: str  # relative to the root
    started_at: str  # ISO 8601, UTC
    finished_at: str | None = None
    attempts: int = 1
    wall_s: float = 0.0  # over all attempts; of a killed one up to its last heartbeat
    size_bytes: int = 0  # of its outputs


class Ledger(BaseModel):
    """The whole of flywheel.json."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    profile: str
    commit: str
    machine: dict[str, str | int | float]
    turns: int = 1  # what the last run was asked for; the folder may hold more
    setup_s: float = 0.0  # environments and system packages, over all attempts
    steps: dict[str, StepRecord] = {}

    @classmethod
    def load(cls, root: Path) -> "Ledger | None":
        """The ledger of a run's folder, None where there is none yet."""
        path = root / LEDGER
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(f"{path}: {where}: {first['msg']}; mend it, or start over with --fresh") from None

    def asked(self) -> dict[str, StepRecord]:
        """Records of the turns that the last run was asked for."""
        return {name: record for name, record in self.steps.items() if split_turn(name)[1] <= self.turns}

    def known_turns(self) -> int:
        """How many turns the folder holds something of, those that the last run did not ask for included."""
        return max([self.turns, *(split_turn(name)[1] for name in self.steps)])

    def place(self, folder: str) -> tuple[str, int]:
        """`dreamzero` and 2 of a folder named dreamzero-2, where the run knows so many turns.

        A name that ends otherwise belongs to the first turn as it is.
        """
        base, _, number = folder.rpartition("-")
        if base and number.isdecimal() and 1 <= int(number) <= self.known_turns():
            return base, int(number)
        return folder, 1

    def save(self, root: Path) -> None:
        """Write beside and rename into place."""
        beside = root / f".{LEDGER}.tmp"
        with beside.open("w") as file:
            file.write(self.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(root / LEDGER)


def split_turn(step: str) -> tuple[str, int]:
    """`train` and 2 of the step train@2; a plain name is of the first turn, or of none."""
    name, _, turn = step.partition("@")
    return name, int(turn or 1)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """The checkout's commit, `-dirty` where tracked files differ from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, str | int | float]:
    """What a reader needs to judge the times: processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        processor = models[0] if models else processor
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def hold(root: Path) -> IO[str]:
    """Hold the run's folder for this process and for whoever inherits the handle.

    Raises UserError at once where a living run holds it. Where the holder was killed, its processes are
    stopping on their own (see guard.py) and are waited for.
    """
    root.mkdir(parents=True, exist_ok=True)
    handle = (root / LOCK).open("a+")
    deadline = time.monotonic() + ORPHANS_STOP_WITHIN_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip()
            if not holder or Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                raise UserError(
                    f"{root} is in use by another run (process {holder or '?'}); "
                    "wait for it, or choose another --root"
                ) from None
            time.sleep(0.2)
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
