"""`inspect`: what a checkpoint or an export holds and whether it is whole, as plain data (see `--json`)."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dcp_convert.commit import COMMIT, read_commit
from dcp_convert.dtypes import BY_SAFETENSORS
from dcp_convert.metadata import METADATA, read_index
from dcp_convert.names import natural, plain_name
from dcp_convert.output import PROVENANCE
from dcp_convert.safetensors_file import INDEX
from dcp_convert.source import LATEST, iterations, kind_of, latest, why_not_whole
from flywheel_shared.errors import UserError

_UNVOUCHED = "no index or export.json says what belongs to it"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: `chunks` is the number of pieces it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Part:
    """The tensors of a DCP folder (model, ema, optim) or an export. `objects`: name -> bytes of the rest."""

    name: str
    path: str
    tensors: tuple[TensorInfo, ...]
    objects: dict[str, int]

    @property
    def elements(self) -> int:
        """Elements of all tensors: the parameters, in a folder of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def elements_by_module(self) -> dict[str, int]:
        """Elements by the first component of the plain names."""
        counts: dict[str, int] = {}
        for tensor in self.tensors:
            module = plain_name(tensor.name).partition(".")[0]
            counts[module] = counts.get(module, 0) + math.prod(tensor.shape)
        return counts


@dataclass(frozen=True)
class Checkpoint:
    """An iter_* folder of a run; `reason` it is not whole, whether latest_checkpoint.txt names it."""

    name: str
    whole: bool
    reason: str | None
    bytes: int
    latest: bool


@dataclass(frozen=True)
class Inspection:
    """All that was found at `path`. `kind`: run, iteration, dcp or safetensors.

    `whole` is by commit and sizes (contents are not read), None where no commit exists to tell. `files` are
    those of a checkpoint that hold no tensors (trainer state, assets) with their bytes.
    """

    path: str
    kind: str
    whole: bool | None
    reason: str | None
    step: int | None
    parts: tuple[Part, ...]
    files: dict[str, int] = field(default_factory=dict)
    checkpoints: tuple[Checkpoint, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The same as JSON; of each part also the sums."""
        content = asdict(self)
        for part, sums in zip(content["parts"], self.parts, strict=True):
            part |= {
                "elements": sums.elements,
                "bytes": sums.bytes,
                "elements_by_module": sums.elements_by_module,
            }
        return json.dumps(content, indent=2, ensure_ascii=False)


def inspect_path(path: Path) -> Inspection:
    """Look at a run, an iter_* folder, a DCP folder, an export or one safetensors file.

    Only indexes and sizes are read. A checkpoint that is not whole is reported, not an error; UserError where
    there is nothing to look at or an index is damaged.
    """
    kind = kind_of(path)
    if kind == "run":
        return _run(path)
    if kind == "iteration":
        return _iteration(path)
    if kind == "dcp":
        return _bare(path)
    return _export(path)


def _run(path: Path) -> Inspection:
    named = (path / LATEST).read_text(errors="replace").strip() if (path / LATEST).is_file() else None
    rows = []
    for folder in iterations(path):
        reason = why_not_whole(folder)
        rows.append(
            Checkpoint(
                folder.name, reason is None, reason, sum(_files(folder).values()), folder.name == named
            )
        )
    warnings: list[str] = []
    try:
        shown = _iteration(latest(path, warnings.append))
    except UserError as error:
        return Inspection(str(path), "run", False, str(error), None, (), {}, tuple(rows))
    return Inspection(
        str(path), "run", True, None, shown.step, shown.parts, shown.files, tuple(rows), tuple(warnings)
    )


def _iteration(path: Path) -> Inspection:
    reason = why_not_whole(path)
    parts, damaged = [], []
    for folder in sorted(folder.parent for folder in path.glob(f"*/{METADATA}")):
        try:
            parts.append(_part(folder))
        except UserError as error:
            damaged.append(str(error))
    tensors = tuple(f"{part.name}/" for part in parts)
    files = {name: size for name, size in _files(path).items() if not name.startswith(tensors)}
    reason = reason or (damaged[0] if damaged else None)
    step = None if reason else read_commit(path).step
    return Inspection(str(path), "iteration", reason is None, reason, step, tuple(parts), files)


def _bare(path: Path) -> Inspection:
    parent = path.absolute().parent
    part = _part(path)
    if not (parent / COMMIT).is_file():
        reason = f"no {COMMIT} vouches for a bare DCP folder"
        return Inspection(str(path), "dcp", None, reason, None, (part,))
    problem = why_not_whole(parent)
    step = None if problem else read_commit(parent).step
    return Inspection(str(path), "dcp", problem is None, problem, step, (part,))


def _part(folder: Path) -> Part:
    index = read_index(folder)
    tensors = [
        TensorInfo(entry.name, entry.shape, entry.kind.name, entry.bytes, len(entry.chunks))
        for entry in sorted(index.tensors.values(), key=lambda entry: natural(entry.name))
    ]
    return Part(folder.resolve().name, str(folder), tuple(tensors), index.objects)


def _export(path: Path) -> Inspection:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    tensors: list[TensorInfo] = []
    for file in files:
        tensors += _tensors_of(file)
    part = Part(
        path.resolve().name, str(path), tuple(sorted(tensors, key=lambda tensor: natural(tensor.name))), {}
    )
    if path.is_file():
        return Inspection(str(path), "safetensors", None, _UNVOUCHED, None, (part,))
    others = {name: size for name, size in _files(path).items() if not name.endswith(".safetensors")}
    whole, reason, step = _export_state(path, part)
    return Inspection(str(path), "safetensors", whole, reason, step, (part,), others)


def _export_state(path: Path, part: Part) -> tuple[bool | None, str | None, int | None]:
    """Compare an export with its export.json (sizes) or, of another's making, with its index (names)."""
    record = _json(path / PROVENANCE)
    if record is not None:
        step = record.get("source", {}).get("step")
        for name, expected in record.get("files", {}).items():
            file = path / name
            found = file.stat().st_size if file.is_file() else None
            if found != expected["bytes"]:
                problem = "missing" if found is None else f"found {found} bytes"
                return False, f"{file}: {problem}, expected {expected['bytes']} ({PROVENANCE})", step
        return True, None, step
    index = _json(path / INDEX)
    if index is None:
        return None, _UNVOUCHED, None
    missing = set(index.get("weight_map", {})) - {tensor.name for tensor in part.tensors}
    if missing:
        return (
            False,
            f"{path}: {len(missing)} tensors of {INDEX} are missing, {min(missing)} among them",
            None,
        )
    return True, None, None


def _tensors_of(file: Path) -> list[TensorInfo]:
    from safetensors import SafetensorError, safe_open

    found = []
    try:
        with safe_open(file, framework="np") as content:
            for name in content.keys():  # noqa: SIM118 (no mapping)
                entry = content.get_slice(name)
                kind = BY_SAFETENSORS.get(entry.get_dtype())
                if kind is None:
                    raise UserError(
                        f"{file}: {name} has the type {entry.get_dtype()}, which this version does not know"
                    )
                shape = tuple(entry.get_shape())
                found.append(TensorInfo(name, shape, kind.name, math.prod(shape) * kind.size, 1))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not readable as safetensors ({error})") from error
    return found


def _files(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: found {type(content).__name__}, expected an object")
    return content
