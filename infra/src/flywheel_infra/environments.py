"""One virtual environment a stage, made from its hash-pinned lock the first time that it is needed.

Standard library only and readable by Python 3.8, because `infra/bootstrap.py` runs it before anything is
installed. In the order in which a cold machine needs it: uv, an interpreter, an environment, its stamp.

    .venv/uv/            uv, where the machine has none that is new enough
    .venv/<stage>/       packages of requirements.lock, and the stage and flywheel-shared editable
    .venv/<stage>/flywheel-stamp.json   written last: an environment without it is taken for half made
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = ROOT / ".venv"
STAMP = "flywheel-stamp.json"

# The locks are compiled for this version; another one that runs is taken only where this cannot be had.
PYTHON = (3, 12)
PYTHON_BELOW = (3, 14)  # no wheels of the locked torch beyond
UV_MINIMUM = (0, 5, 0)
UV_LOCK = ROOT / "infra" / "requirements-bootstrap.lock"


class SetupError(Exception):
    """Set-up cannot go on; the message is one line that says what the user can do."""


def stages() -> list[str]:
    """Names that have an environment: `infra` and every folder of stages/ with a lock."""
    return ["infra", *sorted(lock.parent.name for lock in ROOT.glob("stages/*/requirements.lock"))]


def folder_of(stage: str) -> Path:
    """Folder of a stage's pyproject.toml and locks."""
    folder = ROOT / "infra" if stage == "infra" else ROOT / "stages" / stage
    if not (folder / "requirements.lock").is_file():
        raise SetupError(f"stage '{stage}' does not exist; there are: {', '.join(stages())}")
    return folder


def program(stage: str, name: str) -> Path:
    """Path of a console script (or `python`) in a stage's environment."""
    return ENVIRONMENTS / stage / "bin" / name


# --- the stamp ----------------------------------------------------------------------------------------


def lock_file(stage: str, test: bool) -> Path:
    """The plain lock, or the one for tests: a superset with the same versions."""
    return folder_of(stage) / ("requirements-test.lock" if test else "requirements.lock")


def _digest(stage: str, test: bool) -> str:
    """Everything that decides what an environment contains; ROOT because its scripts hold full paths."""
    parts = [lock_file(stage, test), folder_of(stage) / "pyproject.toml", ROOT / "shared" / "pyproject.toml"]
    digest = hashlib.sha256(str(ROOT).encode())
    for part in parts:
        digest.update(part.read_bytes())
    return digest.hexdigest()


def is_ready(stage: str, test: bool = False) -> bool:
    """Whether the stamp matches the lock; a few file reads, no process. Tests' packages serve both uses."""
    try:
        stamp = json.loads((ENVIRONMENTS / stage / STAMP).read_text())
    except (OSError, ValueError):
        return False
    if not program(stage, "python").exists():  # follows the link: the interpreter may have been removed
        return False
    flavours = [True] if test else [True, False]
    return stamp.get("digest") in [_digest(stage, flavour) for flavour in flavours]


# --- uv and the interpreter ---------------------------------------------------------------------------


def _answer(argv: Sequence[str]) -> str | None:
    """What a command printed, or None where it is absent, fails or hangs: the only proof that it runs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(text: str | None) -> tuple[int, ...]:
    words = (text or "").split()
    numbers = words[1] if len(words) > 1 and words[0] == "uv" else (words[0] if words else "")
    return tuple(int(part) for part in numbers.split(".")[:3] if part.isdigit())


def find_uv() -> str:
    """A uv that runs and is new enough: the PATH's, else a pinned one installed into .venv/uv."""
    own = str(ENVIRONMENTS / "uv" / "bin" / "uv")
    for candidate in filter(None, [shutil.which("uv"), own]):
        if _version(_answer([candidate, "--version"])) >= UV_MINIMUM:
            return candidate
    _say(f"installing uv into {ENVIRONMENTS / 'uv'}")
    with _locked("uv"):
        base = ENVIRONMENTS / "uv"
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(base)], check=False)
        if made.returncode != 0:
            raise SetupError("cannot make a virtual environment for uv: install python3-venv, or uv itself")
        # PIP_CONSTRAINT and the like cannot change a hash-pinned choice, only forbid it.
        pip = [str(base / "bin" / "python"), "-m", "pip", "install", "-q", "--require-hashes"]
        if subprocess.run([*pip, "-r", str(UV_LOCK)], check=False).returncode != 0:
            raise SetupError(
                "pip could not install uv (its message is above); install uv yourself, then retry"
            )
    return own


def find_python(uv: str) -> str:
    """Full path of an interpreter that really runs: PATH, then pyenv's, then one that uv downloads."""
    found = [(path, _interpreter_version(path)) for path in _candidates()]
    exact = [path for path, version in found if version[:2] == PYTHON]
    if exact:
        return exact[0]
    wanted = ".".join(map(str, PYTHON))
    _say(f"no Python {wanted} found; asking uv for one")
    if subprocess.run([uv, "python", "install", wanted], check=False).returncode == 0:
        path = _answer([uv, "python", "find", "--managed-python", wanted])
        if path and _interpreter_version(path)[:2] == PYTHON:
            return path
    newer = [path for path, version in found if PYTHON < version[:2] < PYTHON_BELOW]
    if newer:
        return newer[0]
    raise SetupError(f"no Python {wanted} runs here and uv could not download one: install Python {wanted}")


def _candidates() -> Iterator[str]:
    names = ["python{}.{}".format(*PYTHON), "python3", "python", "python3.13"]
    yield sys.executable
    for name in names:
        path = shutil.which(name)
        if path:
            yield path
    # A pyenv shim on the PATH fails unless pyenv is told a version, so its folders are looked at directly.
    pyenv = Path(_answer(["pyenv", "root"]) or Path.home() / ".pyenv")
    if pyenv.is_dir():
        folders = pyenv.glob("versions/3.*/bin/python")
        yield from sorted(
            map(str, folders), key=lambda path: _version(Path(path).parents[1].name), reverse=True
        )


def _interpreter_version(path: str) -> tuple[int, ...]:
    return _version(_answer([path, "-c", "import sys, venv; print('%d.%d.%d' % sys.version_info[:3])"]))


# --- an environment -----------------------------------------------------------------------------------


def ensure(stage: str, test: bool = False) -> Path:
    """Folder of the stage's environment, made or brought up to date where its stamp does not match.

    Safe under two callers at once (the second waits) and under a kill at any point (see STAMP).
    """
    folder_of(stage)  # raises before anything is made for a name that is none
    environment = ENVIRONMENTS / stage
    if is_ready(stage, test):
        return environment
    with _locked(stage):
        if not is_ready(stage, test):
            _make(stage, test)
    return environment


def _make(stage: str, test: bool) -> None:
    environment, stamp = ENVIRONMENTS / stage, ENVIRONMENTS / stage / STAMP
    uv = find_uv()
    # An environment made for tests stays one, so that a plain run in between removes nothing.
    test = test or (stamp.is_file() and json.loads(stamp.read_text()).get("test", False))
    whole = stamp.is_file() and _interpreter_version(str(program(stage, "python")))[:2] >= PYTHON
    _say(f"{'updating' if whole else 'making'} the environment of {stage} (minutes where it downloads)")
    if whole:
        stamp.unlink()
    else:
        _uv(uv, "venv", "--clear", "--python", find_python(uv), str(environment))
    python = str(program(stage, "python"))
    _uv(uv, "pip", "install", "--python", python, "--require-hashes", "-r", str(lock_file(stage, test)))
    editable = [word for package in (folder_of(stage), ROOT / "shared") for word in ("-e", str(package))]
    _uv(uv, "pip", "install", "--python", python, "--no-deps", *editable)
    beside = stamp.with_name(STAMP + ".tmp")
    beside.write_text(json.dumps({"digest": _digest(stage, test), "test": test}) + "\n")
    beside.replace(stamp)


def _uv(uv: str, *arguments: str) -> None:
    # A VIRTUAL_ENV of the caller's must not decide where packages go: --python does.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    manners = [] if sys.stderr.isatty() else ["--quiet"]  # progress bars for a person, silence for a log
    done = subprocess.run([uv, *manners, *arguments], env=environment, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"`uv {' '.join(arguments)}` failed with exit code {done.returncode}; its message is above"
        )


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold .venv/.<name>.lock; the kernel lets go of it when the holder dies, however it dies."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"set-up: {line}", file=sys.stderr, flush=True)
