"""Plan and write safetensors files front to back: the header first, then each tensor's bytes as they come.

Form: u64 little-endian length of the header, the header in JSON padded with spaces to 8 bytes, the values
without holes. https://huggingface.co/docs/safetensors says so; the bytes equal those of the library's
`save_file(tensors, metadata={"format": "pt"})`.
"""

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dcp_convert.commit import FileSum
from dcp_convert.dtypes import FILE_ORDER, ElementType
from flywheel_shared.errors import UserError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the export: `kind` is the type that it has in the file."""

    name: str
    shape: tuple[int, ...]
    kind: ElementType
    bytes: int


@dataclass(frozen=True)
class Shard:
    """One output file: its name, its header as written, and its tensors in the order of their bytes."""

    file: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.bytes for tensor in self.tensors)


def plan_shards(tensors: list[OutputTensor], limit: int) -> list[Shard]:
    """Fill files of at most `limit` bytes of values in the order given, as Hugging Face does.

    A tensor over the limit gets a file of its own. Raises UserError for a type unknown to safetensors.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if tensor.kind.safetensors is None:
            raise UserError(f"tensor {tensor.name}: safetensors has no type for {tensor.kind.name}")
        if groups[-1] and filled + tensor.bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.bytes
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [
        _shard(name if count > 1 else "model.safetensors", group)
        for name, group in zip(names, groups, strict=True)
    ]


def index_of(shards: list[Shard]) -> bytes:
    """The index file of several shards: total_size in bytes and the file of each tensor."""
    index = {
        "metadata": {"total_size": sum(tensor.bytes for shard in shards for tensor in shard.tensors)},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class ShardWriter:
    """Writes one shard: `append` takes the values in order, `finish` makes them durable."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path = folder / shard.file
        self._shard = shard
        self._digest = hashlib.sha256()
        self._written = 0
        self._file = self.path.open("xb", buffering=0)

    def __enter__(self) -> Self:
        self._write(memoryview(self._shard.header))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: np.ndarray) -> int:
        """Write row-major values of any type as they are; return their bytes."""
        view = memoryview(values.reshape(-1).view(np.uint8))
        self._write(view)
        return len(view)

    def finish(self) -> FileSum:
        """Flush to the disk, return size and sum. Raises RuntimeError if values are missing or too many."""
        if self._written != self._shard.bytes:
            raise RuntimeError(f"{self.path}: wrote {self._written} of {self._shard.bytes} bytes")
        os.fsync(self._file.fileno())
        return FileSum(self._written, self._digest.hexdigest())

    def _write(self, view: memoryview) -> None:
        self._digest.update(view)
        while view:
            count = self._file.write(view)
            self._written += count
            view = view[count:]


def _shard(file: str, tensors: list[OutputTensor]) -> Shard:
    ordered = sorted(tensors, key=lambda tensor: (FILE_ORDER[tensor.kind.name], tensor.name.encode()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.kind.safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Shard(file, struct.pack("<Q", len(text)) + text, tuple(ordered))
