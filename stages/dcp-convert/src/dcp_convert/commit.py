"""Is a checkpoint whole? `commit.json` says what was written: {"format": 1, "step": S, "files": {name: ...}}.

Training writes it last, with the size and SHA-256 of every other file of the iter_* folder. Sizes are
compared always (a stat each); sums only of the files that are about to be read.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flywheel_shared.errors import UserError

COMMIT = "commit.json"
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """A commit.json that was read: `files` maps paths relative to the iter_* folder to what they must be."""

    step: int
    files: dict[str, FileSum]


def read_commit(iteration: Path) -> Commit:
    """Read `iteration/commit.json`; raises UserError when it is missing, malformed or leaves the folder."""
    path = iteration / COMMIT
    if iteration.name.endswith(".tmp"):
        raise UserError(f"{iteration}: a save that did not finish (it was never renamed)")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{iteration}: no {COMMIT}, which a save writes last; it did not finish") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from error
    try:
        if content["format"] != 1:
            raise UserError(f"{path}: format {content['format']!r}, this version reads format 1")
        files = {
            str(name): FileSum(int(x["bytes"]), str(x["sha256"])) for name, x in content["files"].items()
        }
        commit = Commit(int(content["step"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a commit of format 1 ({type(error).__name__}: {error})") from error
    for name in commit.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{path}: lists {name!r}, outside of the folder; refused")
    return commit


def check_sizes(iteration: Path, commit: Commit) -> None:
    """Compare the sizes of all committed files; raises UserError naming the first missing or different."""
    for name, expected in commit.files.items():
        path = iteration / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: missing, expected {expected.bytes} bytes ({COMMIT})") from error
        if found != expected.bytes:
            raise UserError(f"{path}: found {found} bytes, expected {expected.bytes} ({COMMIT})")


def check_sums(iteration: Path, commit: Commit, names: Iterable[str], advance: Callable[[int], None]) -> None:
    """Compare the SHA-256 of the committed files `names`, several at once; `advance` gets the bytes done.

    Raises UserError naming a file that differs, what was expected and what was found.
    """

    def check(name: str) -> None:
        found = sha256_of(iteration / name, advance)
        expected = commit.files[name].sha256
        if found != expected:
            raise UserError(
                f"{iteration / name}: found sha256 {found}, expected {expected} ({COMMIT}); damaged"
            )

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        checks = [pool.submit(check, name) for name in names]
        try:
            for done in checks:
                done.result()
        finally:
            for waiting in checks:
                waiting.cancel()


def sha256_of(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """The SHA-256 of a file in hex, read in pieces."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()
