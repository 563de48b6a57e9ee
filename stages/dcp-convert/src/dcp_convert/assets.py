"""The files that travel with the weights: config.json, stats.json, tokenizers, copied as they are."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcp_convert.commit import FileSum
from dcp_convert.output import PROVENANCE
from dcp_convert.safetensors_file import INDEX, Shard
from dcp_convert.source import Source
from flywheel_shared.errors import UserError

_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class Asset:
    """A file to copy: `name` in the export, `path` of the original, its size, whether the commit lists it."""

    name: str
    path: Path
    bytes: int
    committed: bool


def find_assets(source: Source, shards: list[Shard], warn: Callable[[str], None]) -> list[Asset]:
    """The assets of the checkpoint, none of a bare folder.

    Raises UserError for a link out of the assets folder and for a name that the export itself uses.
    """
    if source.iteration is None or source.commit is None:
        return []
    root = source.iteration / "assets"
    taken = {PROVENANCE, INDEX, *(shard.file for shard in shards)}
    assets = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        if not path.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{path}: a link to {path.resolve()}, outside of the assets; refused")
        if name in taken:
            raise UserError(f"{path}: the export writes a file of that name itself; rename the asset")
        committed = f"assets/{name}" in source.commit.files
        if not committed:
            warn(f"{path}: not in the commit, added later; copied unchecked")
        assets.append(Asset(name, path, path.stat().st_size, committed))
    return assets


def copy_asset(asset: Asset, folder: Path) -> FileSum:
    """Copy one asset durably; return its size and sum as copied."""
    target = folder / asset.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    count = 0
    with asset.path.open("rb") as original, target.open("xb") as copy:
        while piece := original.read(_COPY_BYTES):
            copy.write(piece)
            digest.update(piece)
            count += len(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return FileSum(count, digest.hexdigest())
