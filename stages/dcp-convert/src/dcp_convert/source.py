"""Find out what a path is: a run, a checkpoint of it (iter_*), a bare DCP folder, a safetensors export."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcp_convert.commit import COMMIT, Commit, check_sizes, read_commit
from dcp_convert.metadata import METADATA
from flywheel_shared.errors import UserError

LATEST = "latest_checkpoint.txt"
_ITERATION = re.compile(r"iter_\d+")


@dataclass(frozen=True)
class Source:
    """The weights to convert: the DCP folder and, where there is one, the checkpoint that it is part of.

    `weights` is "model" or "ema"; None of a bare folder. `commit` None means that nothing vouches for it.
    """

    dcp: Path
    weights: str | None
    iteration: Path | None
    commit: Commit | None


def kind_of(path: Path) -> str:
    """Say "run", "iteration", "dcp" or "safetensors"; raises UserError for anything else."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix == ".safetensors":
            return "safetensors"
        raise UserError(f"{path}: neither a folder nor a .safetensors file")
    if (path / METADATA).is_file():
        return "dcp"
    if (path / COMMIT).is_file() or _ITERATION.fullmatch(path.name.removesuffix(".tmp")):
        return "iteration"
    if (path / LATEST).is_file() or iterations(path):
        return "run"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    if any(path.glob("*.distcp")):
        raise UserError(
            f"{path / METADATA}: missing; its save did not finish, or the file was not copied along"
        )
    raise UserError(
        f"{path}: found no {METADATA} (DCP folder), {COMMIT} (checkpoint), iter_* (run) or safetensors"
    )


def iterations(run: Path) -> list[Path]:
    """The iter_* folders of a run, the newest first; a save in progress (.tmp) is not one."""
    found = [path for path in run.iterdir() if path.is_dir() and _ITERATION.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("iter_")), reverse=True)


def why_not_whole(iteration: Path) -> str | None:
    """None of a checkpoint that is whole by its commit and sizes, else the reason in a line."""
    try:
        check_sizes(iteration, read_commit(iteration))
    except UserError as error:
        return str(error)
    return None


def latest(run: Path, warn: Callable[[str], None]) -> Path:
    """The checkpoint that `latest_checkpoint.txt` names, else the newest whole one after a warning."""
    pointer = run / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else None
    if name is None:
        problem = f"{pointer}: missing"
    elif not _ITERATION.fullmatch(name):
        problem = f"{pointer}: found {name[:80]!r}, expected a name like iter_000000100"
    elif (reason := why_not_whole(run / name)) is not None:
        problem = reason if (run / name).exists() else f"{pointer}: names {name}, which does not exist"
    else:
        return run / name
    for iteration in iterations(run):
        if why_not_whole(iteration) is None:
            warn(f"{problem}; taking {iteration.name}, the newest whole checkpoint")
            return iteration
    raise UserError(f"{problem}; and no other checkpoint of {run} is whole")


def find_weights(path: Path, weights: str, warn: Callable[[str], None]) -> Source:
    """Resolve what to convert. `weights`: "model", "ema" or "auto" (ema where the checkpoint has it).

    Compares the sizes of all committed files; raises UserError when the checkpoint is not whole, has no such
    weights, or `path` is nothing that can be converted.
    """
    kind = kind_of(path)
    if kind == "safetensors":
        raise UserError(f"{path}: already safetensors; name a run, an iter_* folder or a DCP folder")
    if kind == "dcp":
        return _bare(path, weights, warn)
    iteration = latest(path, warn) if kind == "run" else path
    commit = read_commit(iteration)
    check_sizes(iteration, commit)
    if weights == "auto":
        weights = "ema" if (iteration / "ema" / METADATA).is_file() else "model"
    dcp = iteration / weights
    if not dcp.is_dir():
        raise UserError(f"{dcp}: missing; {iteration} has no {weights} weights (--weights {weights})")
    return Source(dcp, weights, iteration, commit)


def _bare(dcp: Path, weights: str, warn: Callable[[str], None]) -> Source:
    iteration = dcp.absolute().parent
    if dcp.name not in ("model", "ema") or not (iteration / COMMIT).is_file():
        if weights != "auto":
            raise UserError(f"{dcp}: a bare DCP folder holds one set of weights; leave --weights at auto")
        warn(f"{dcp}: no {COMMIT} vouches for this folder; only sizes are checked")
        return Source(dcp, None, None, None)
    if weights not in ("auto", dcp.name):
        raise UserError(f"{dcp}: holds the {dcp.name} weights, found --weights {weights}")
    commit = read_commit(iteration)
    check_sizes(iteration, commit)
    return Source(dcp, dcp.name, iteration, commit)
