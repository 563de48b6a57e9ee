"""`to-safetensors`: from the shards of a checkpoint to the files that a model is loaded from.

Values stream: each tensor is cut into bands of a few MiB; a band is gathered from the chunks that hold it,
cast, summed and appended to the output file. Memory grows neither with the model nor with its largest tensor.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dcp_convert.assets import copy_asset, find_assets
from dcp_convert.chunks import ChunkReader, bands
from dcp_convert.commit import COMMIT, FileSum, check_sums, sha256_of
from dcp_convert.dtypes import cast, target_of
from dcp_convert.metadata import METADATA, DcpIndex, TensorEntry, read_index
from dcp_convert.names import model_tensors
from dcp_convert.output import PROVENANCE, OutputFolder
from dcp_convert.progress import progress
from dcp_convert.safetensors_file import INDEX, OutputTensor, Shard, ShardWriter, index_of, plan_shards
from dcp_convert.source import Source, find_weights
from flywheel_shared.errors import UserError

# One band is read while the one before is summed and written; 8 MiB keep disks busy and memory small.
BAND_BYTES = 8 << 20
# Free space asked for beyond the files that are counted: directories, journals, other writers.
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Export:
    """What was written: `values` and `parameters` count the tensors' bytes and elements."""

    output: Path
    source: Source
    files: dict[str, FileSum]
    tensors: int
    parameters: int
    values: int


def to_safetensors(
    path: Path,
    output: Path,
    weights: str,
    dtype: str,
    max_shard_bytes: int,
    overwrite: bool,
    warn: Callable[[str], None],
) -> Export:
    """Convert the checkpoint at `path` into the new folder `output`.

    Args:
        path: a run folder, an iter_* folder or a bare DCP folder.
        output: the export; appears only when it is complete.
        weights: "auto" (ema where the checkpoint has it), "model" or "ema".
        dtype: "keep", or what float16/bfloat16/float32/float64 tensors are cast to.
        max_shard_bytes: most bytes of values in one output file.
        overwrite: replace an export that exists.
        warn: gets each warning as a line.

    Raises:
        UserError: the source is not whole, damaged or unsupported; no space; the output exists.
    """
    target = OutputFolder(output.absolute(), overwrite)
    target.check()
    source = find_weights(path, weights, warn)
    _keep_apart(source, output)
    _verify(source, [f"{source.weights}/{METADATA}"])
    index = read_index(source.dcp)
    tensors, left_out = model_tensors(index)
    _check_complete(source, tensors.keys())
    data_files = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})
    _check_lengths(index, data_files)
    if left_out:
        some = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        warn(f"{source.dcp}: {len(left_out)} entries are no weights and are left out ({some})")
    planned = [_planned(name, tensor, dtype) for name, tensor in tensors.items()]
    shards = plan_shards(planned, max_shard_bytes)
    assets = find_assets(source, shards, warn)
    values = sum(tensor.bytes for tensor in planned)
    with target:
        target.need(sum(shard.bytes for shard in shards) + sum(a.bytes for a in assets) + _SPARE_BYTES)
        committed = [f"assets/{asset.name}" for asset in assets if asset.committed]
        _verify(source, [f"{source.weights}/{file}" for file in data_files] + committed, shown=True)
        with progress("convert", values) as advance, ChunkReader(source.dcp) as reader:
            files = {shard.file: _write(reader, shard, tensors, target.partial, advance) for shard in shards}
        if len(shards) > 1:
            target.write(INDEX, index_of(shards))
            files[INDEX] = _sum(target.partial / INDEX)
        files |= {asset.name: copy_asset(asset, target.partial) for asset in assets}
        _read_back(target.partial, shards)
        parameters = sum(math.prod(tensor.shape) for tensor in planned)
        export = Export(output, source, files, len(planned), parameters, values)
        target.write(PROVENANCE, _provenance(export, dtype, len(left_out)))
        target.commit()
    return export


def _keep_apart(source: Source, output: Path) -> None:
    """Refuse an output that would lie inside the checkpoint, or replace a folder around it."""
    root = (source.iteration or source.dcp).resolve()
    place = output.resolve()
    if place == root or root in place.parents or place in root.parents:
        raise UserError(f"{output}: overlaps the checkpoint {root}; choose an OUTPUT apart from it")


def _verify(source: Source, names: list[str], shown: bool = False) -> None:
    """Compare the sums of files that are about to be read; for a bare folder nothing is known to compare."""
    if source.commit is None or source.iteration is None:
        return
    for name in names:
        if name not in source.commit.files:
            raise UserError(f"{source.iteration / name}: to be read but not listed in {COMMIT}")
    total = sum(source.commit.files[name].bytes for name in names)
    with progress("verify", total) if shown else nullcontext(lambda _: None) as advance:
        check_sums(source.iteration, source.commit, names, advance)


def _check_complete(source: Source, names: Collection[str]) -> None:
    """Averaged weights must cover the model: an average kept of parameters alone lacks its buffers."""
    if source.weights != "ema" or source.iteration is None or not (source.iteration / "model").is_dir():
        return
    _verify(source, [f"model/{METADATA}"])
    model, _ = model_tensors(read_index(source.iteration / "model"))
    missing = [name for name in model if name not in names]
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(
            f"{source.dcp}: lacks {len(missing)} of the {len(model)} tensors of {source.iteration / 'model'} "
            f"({some}), an export of it would be incomplete; choose --weights model"
        )


def _check_lengths(index: DcpIndex, data_files: list[str]) -> None:
    """Every data file must be as long as the index says; all that can be told of a bare folder."""
    for file in data_files:
        path, expected = index.folder / file, index.file_sizes[file]
        if not path.is_file():
            raise UserError(f"{path}: missing, expected {expected} bytes ({METADATA})")
        found = path.stat().st_size
        if found < expected:
            raise UserError(f"{path}: found {found} bytes, expected {expected} ({METADATA}); truncated")


def _planned(name: str, tensor: TensorEntry, dtype: str) -> OutputTensor:
    kind = target_of(tensor.kind, dtype)
    return OutputTensor(name, tensor.shape, kind, tensor.elements * kind.size)


def _write(
    reader: ChunkReader,
    shard: Shard,
    tensors: dict[str, TensorEntry],
    folder: Path,
    advance: Callable[[int], None],
) -> FileSum:
    """Write one output file; a thread sums and writes a band while the next one is read."""
    with ShardWriter(folder, shard) as writer, ThreadPoolExecutor(max_workers=1) as pool:
        written: Future[int] | None = None
        for band in _values(reader, shard, tensors):
            if written is not None:
                advance(written.result())
            written = pool.submit(writer.append, band)
        if written is not None:
            advance(written.result())
        return writer.finish()


def _values(reader: ChunkReader, shard: Shard, tensors: dict[str, TensorEntry]) -> Iterator[np.ndarray]:
    """The values of a shard's tensors, in the order of the file and in its types."""
    for planned in shard.tensors:
        tensor = tensors[planned.name]
        limit = BAND_BYTES // max(tensor.kind.size, planned.kind.size)
        for offsets, sizes in bands(tensor.shape, limit):
            yield cast(reader.read(tensor, offsets, sizes), tensor.kind, planned.kind, planned.name)


def _read_back(folder: Path, shards: list[Shard]) -> None:
    """Have the safetensors library accept every header; it checks types, shapes, offsets and file size."""
    from safetensors import safe_open

    for shard in shards:
        with safe_open(folder / shard.file, framework="np") as file:
            if set(file.keys()) != {tensor.name for tensor in shard.tensors}:
                raise RuntimeError(f"{folder / shard.file}: read back other tensors than were written")


def _sum(path: Path) -> FileSum:
    return FileSum(path.stat().st_size, sha256_of(path))


def _provenance(export: Export, dtype: str, left_out: int) -> bytes:
    """export.json: where the weights come from and what was written. The same input gives the same bytes."""
    source = export.source
    checkpoint = (source.iteration or source.dcp).resolve()
    content = {
        "format": 1,
        "tool": f"dcp-convert {version('dcp-convert')}",
        "source": {
            "run": checkpoint.parent.name if source.iteration else None,
            "checkpoint": checkpoint.name,
            "step": source.commit.step if source.commit else None,
            "weights": source.weights,
            "verified": "sha256" if source.commit else "sizes",
            "commit_sha256": sha256_of(source.iteration / COMMIT) if source.iteration else None,
        },
        "dtype": dtype,
        "tensors": export.tensors,
        "parameters": export.parameters,
        "total_size": export.values,
        "left_out": left_out,
        "files": {name: asdict(found) for name, found in sorted(export.files.items())},
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
