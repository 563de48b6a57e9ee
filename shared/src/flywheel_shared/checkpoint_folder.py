"""The folder of a run's checkpoints: names, what is whole, commits, retention. Knows nothing of tensors.

<run>/latest_checkpoint.txt            "iter_000000100"
<run>/iter_000000100/commit.json       written last: every other file's size and SHA-256
<run>/iter_000000100.tmp/              a save under way, or one that was interrupted
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from flywheel_shared.errors import UserError

COMMIT = "commit.json"
LATEST = "latest_checkpoint.txt"
FORMAT = 1
_LOCK = ".lock"
_NAME = re.compile(r"iter_(\d{9})")
_READ_BYTES = 4 << 20


class NotWhole(Exception):
    """A checkpoint that must not be used; the message names file, what was found and what was expected."""


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


class CheckpointFolder:
    """Checkpoints below `path`, one folder each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def claim(self) -> None:
        """Make the folder ours, until this process ends, and remove what interrupted saves left behind.

        Raises `UserError` when another process trains into it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / _LOCK).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"{self.path}: another process trains into this folder; stop it, or choose another run name"
            ) from None
        except OSError:
            pass  # a file system without locks (Lustre without -o flock) is used without one
        self._lock = lock
        for stale in self.path.glob("iter_*.tmp"):
            shutil.rmtree(stale)

    def release(self) -> None:
        """Let others train into the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def iteration(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"iter_{step:09d}"

    def unfinished(self, step: int) -> Path:
        """Where it is written until it is whole."""
        return self.path / f"iter_{step:09d}.tmp"

    def iterations(self) -> list[tuple[int, Path]]:
        """(step, folder) of all that were renamed into place, newest first, whole or not."""
        found = [(_NAME.fullmatch(path.name), path) for path in self.path.glob("iter_*") if path.is_dir()]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def commit(self, step: int, files: dict[str, FileSum]) -> None:
        """Turn the unfinished folder of `step` into a checkpoint; `files` are all that it holds."""
        unfinished, final = self.unfinished(step), self.iteration(step)
        content = {
            "format": FORMAT,
            "step": step,
            "files": {name: vars(files[name]) for name in sorted(files)},
        }
        write_durably(unfinished / COMMIT, json.dumps(content, indent=1) + "\n")
        for folder in {unfinished / PurePosixPath(name).parent for name in files} | {unfinished}:
            sync_folder(folder)
        if final.exists():  # one that was found not to be whole, and trained past again
            self._remove(final)
        unfinished.rename(final)
        sync_folder(self.path)
        beside = self.path / f".{LATEST}.tmp"
        write_durably(beside, f"{final.name}\n")
        beside.replace(self.path / LATEST)
        sync_folder(self.path)

    def retain(self, keep_last: int, keep_every: int, newest: int) -> None:
        """Remove what is older than the last `keep_last` whole checkpoints up to `newest`.

        With `keep_every`, those whose step is a multiple of it stay for good. Damaged ones do not count.
        """
        steps = [step for step, _ in self.iterations() if step <= newest]
        kept = [step for step in steps if self._is_whole(step)][: max(1, keep_last)]
        for step in steps:
            if step < min(kept, default=0) and not (keep_every and step % keep_every == 0):
                self._remove(self.iteration(step))

    def _is_whole(self, step: int) -> bool:
        """By its marker and sizes."""
        try:
            read_commit(self.iteration(step))
        except NotWhole:
            return False
        return True

    def _remove(self, folder: Path) -> None:
        # Renamed first: a removal that is interrupted leaves no folder that looks like a checkpoint.
        doomed = folder.with_name(f"{folder.name}.old.tmp")
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def read_commit(iteration: Path) -> dict[str, FileSum]:
    """Files that the checkpoint is made of, once their sizes were compared; raises `NotWhole`."""
    path = iteration / COMMIT
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise NotWhole(f"{path}: format {content['format']!r}, expected {FORMAT}")
        files = {
            str(name): FileSum(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
    except FileNotFoundError:
        raise NotWhole(f"{path}: missing, though a save writes it last") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotWhole(f"{path}: not readable ({type(error).__name__}: {error})") from None
    for name, expected in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise NotWhole(f"{path}: lists {name!r}, which lies outside of the folder")
        try:
            found = (iteration / name).stat().st_size
        except OSError as error:
            raise NotWhole(
                f"{iteration / name}: {error.strerror}, expected a file of {expected.bytes} bytes"
            ) from None
        if found != expected.bytes:
            raise NotWhole(f"{iteration / name}: found {found} bytes, expected {expected.bytes}")
    return files


def check_sums(iteration: Path, files: dict[str, FileSum]) -> None:
    """Read the files and compare their SHA-256; raises `NotWhole`."""
    for name, expected in files.items():
        path = iteration / name
        try:
            found = sum_of(path)
        except OSError as error:
            raise NotWhole(f"{path}: not readable ({error.strerror})") from None
        if found.sha256 != expected.sha256:
            raise NotWhole(f"{path}: found SHA-256 {found.sha256}, expected {expected.sha256}: damaged")


def sum_of(path: Path, sync: bool = False) -> FileSum:
    """Size and SHA-256 of a file; `sync` also puts it on the disk."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileSum(size, digest.hexdigest())


def write_durably(path: Path, content: str) -> None:
    """Write a text file and put it on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
