"""The output folder: written beside its place under another name, made durable, then renamed into it."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Self

from flywheel_shared.errors import UserError

PROVENANCE = "export.json"


class OutputFolder:
    """A folder in the making, `.<name>.partial` beside `target`; nothing is at `target` before `commit`.

    An interrupted one is removed by the next attempt; one that another process is writing is left alone and
    ends this one with a UserError. On an error everything written is removed.
    """

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target = target
        self.partial = target.parent / f".{target.name}.partial"
        self._overwrite = overwrite
        self._lock: int | None = None
        self._done = False

    def check(self) -> None:
        """Raise UserError if the target exists and may not be replaced."""
        if not self.target.exists() and not self.target.is_symlink():
            return
        if self.target.is_dir() and not any(self.target.iterdir()):
            return
        if not self._overwrite:
            raise UserError(f"{self.target}: exists already; choose another OUTPUT or add --overwrite")
        if not (self.target / PROVENANCE).is_file():  # a slip of the hand must not delete somebody's folder
            raise UserError(
                f"{self.target}: not an export (no {PROVENANCE}); --overwrite replaces exports only"
            )

    def __enter__(self) -> Self:
        self.check()
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._take()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._done:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def need(self, needed: int) -> None:
        """Raise UserError if the file system has fewer than `needed` bytes free."""
        free = shutil.disk_usage(self.partial).free
        if free < needed:
            raise UserError(
                f"{self.target}: needs {needed / 1e9:.3f} GB, found {free / 1e9:.3f} GB free; "
                "make room, or choose a smaller --dtype"
            )

    def write(self, name: str, content: bytes) -> None:
        """Write a small file durably."""
        with (self.partial / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Rename the finished folder into place; an export that it replaces is removed after that."""
        for folder, _, _ in os.walk(self.partial):
            sync_folder(Path(folder))
        self.check()  # somebody may have made one meanwhile
        replaced = self.target.parent / f".{self.target.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if self.target.exists():
            self.target.rename(replaced)
        self.partial.rename(self.target)
        self._done = True
        sync_folder(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _take(self) -> None:
        assert self._lock is not None
        busy = UserError(f"{self.target}: another conversion is writing {self.partial}; wait for it")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy from error
        except OSError:
            pass  # a file system without locks: two conversions at once are then the user's to avoid
        try:
            same = self.partial.stat().st_ino == os.fstat(self._lock).st_ino
        except FileNotFoundError as error:
            raise busy from error
        if not same:  # the other one finished between our open and our lock
            raise busy
        for left in self.partial.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
