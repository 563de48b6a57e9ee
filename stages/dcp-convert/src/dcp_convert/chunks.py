"""Read any part of a tensor from the chunks of a DCP folder.

A chunk is a zip archive written by torch.save: `data.pkl` says how the tensor lies over its storage (offset
and strides), `data/<key>` holds the storage uncompressed. Reading goes straight to the bytes that are needed,
so that a tensor of any size can be read band by band. (A chunk saved with its dims permuted is held whole.)
"""

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dcp_convert.dtypes import BY_NAME, ElementType, raw
from dcp_convert.metadata import Chunk, TensorEntry
from flywheel_shared.errors import UserError

# Few enough for the usual limit of 1024 descriptors, enough to keep the files of hundreds of ranks open.
_OPEN_FILES = 256
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member; the last two are the lengths of name and extra


@dataclass(frozen=True)
class StoredTensor:
    """How a chunk lies in its file: strides and origin in elements, `start` and `bytes` of the storage."""

    kind: ElementType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    origin: int
    start: int
    bytes: int


def bands(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into (offsets, sizes) of at most `limit` elements, in the order of its row-major bytes."""
    if math.prod(shape) == 0:
        return
    if math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for offsets, sizes in bands(shape[1:], limit):
                yield (index, *offsets), (1, *sizes)
        return
    step = limit // row
    for index in range(0, shape[0], step):
        yield (index, *(0,) * (len(shape) - 1)), (min(step, shape[0] - index), *shape[1:])


class ChunkReader:
    """Reads boxes of tensors; keeps files open and the layout of chunks in use. Close it, or use `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: OrderedDict[str, int] = OrderedDict()
        self._layouts: dict[Chunk, StoredTensor] = {}
        self._permuted: dict[Chunk, np.ndarray] = {}
        self._tensor: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: TensorEntry, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        """The box of `tensor` at `offsets` with shape `sizes`, row-major, in the raw carrier of its type.

        Raises UserError naming the file when a chunk is truncated, damaged or not what the index says.
        """
        if tensor.name != self._tensor:
            self._layouts, self._permuted, self._tensor = {}, {}, tensor.name
        box = np.empty(sizes, raw(tensor.kind))
        copied = 0
        for chunk in tensor.chunks:
            low = tuple(map(max, offsets, chunk.offsets))
            high = tuple(
                min(a + m, b + n)
                for a, m, b, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            )
            part = tuple(max(0, b - a) for a, b in zip(low, high, strict=True))
            if math.prod(part) == 0:
                continue
            copied += math.prod(part)
            inside = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
            outside = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offsets, part, strict=True))
            self._copy(tensor, chunk, inside, box[outside] if outside else box)
        if copied != box.size:
            raise UserError(f"{self.folder}: {tensor.name}: chunks overlap or leave a gap at {list(offsets)}")
        return box

    def _copy(self, tensor: TensorEntry, chunk: Chunk, inside: tuple[int, ...], into: np.ndarray) -> None:
        stored = self._layout(tensor, chunk)
        size = stored.kind.size
        first = stored.origin + sum(a * s for a, s in zip(inside, stored.stride, strict=True))
        span = 1 + sum((n - 1) * s for n, s in zip(into.shape, stored.stride, strict=True))
        strides = tuple(s * size for s in stored.stride)
        # Row-major in the file and in the target alike: read in place. (A stride over one element is moot.)
        plain = into.flags.c_contiguous and all(
            a == b or n == 1 for a, b, n in zip(strides, into.strides, into.shape, strict=True)
        )
        if plain:
            self._read_bytes(chunk.file, stored.start + first * size, into)
            return
        if span <= 2 * into.size:
            buffer = np.empty(span, into.dtype)
            self._read_bytes(chunk.file, stored.start + first * size, buffer)
        else:  # scattered over the chunk, as those of the other bands: read it once for all of them
            if chunk not in self._permuted:
                self._permuted[chunk] = np.empty(stored.bytes // size, into.dtype)
                self._read_bytes(chunk.file, stored.start, self._permuted[chunk])
            buffer = self._permuted[chunk][first:]
        into[...] = np.lib.stride_tricks.as_strided(buffer, into.shape, strides, writeable=False)

    def _layout(self, tensor: TensorEntry, chunk: Chunk) -> StoredTensor:
        if chunk not in self._layouts:
            where = f"{self.folder / chunk.file}: {tensor.name}"
            try:
                stored = _stored_tensor(_Slice(self, chunk), chunk)
            except UserError:
                raise
            except Exception as error:  # damaged archives raise nearly anything
                raise UserError(
                    f"{where}: damaged at byte {chunk.start} ({type(error).__name__}: {error})"
                ) from error
            if (stored.kind, stored.shape) != (tensor.kind, chunk.sizes):
                raise UserError(
                    f"{where}: found {stored.kind.name} {list(stored.shape)}, "
                    f"expected {tensor.kind.name} {list(chunk.sizes)}"
                )
            self._layouts[chunk] = stored
        return self._layouts[chunk]

    def _read_bytes(self, file: str, start: int, into: np.ndarray) -> None:
        view = memoryview(into.reshape(-1).view(np.uint8))
        descriptor = self._open(file)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], start + done)
            if count == 0:
                raise UserError(
                    f"{self.folder / file}: found {start + done} bytes, "
                    f"expected {start + len(view)} or more; truncated"
                )
            done += count

    def _open(self, file: str) -> int:
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            self._files[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.folder / file}: missing; the index of {self.folder} refers to it"
            ) from error
        return self._files[file]


class _Slice(io.RawIOBase):
    """The bytes of one chunk as a file of its own, for zipfile."""

    def __init__(self, reader: ChunkReader, chunk: Chunk) -> None:
        self._reader, self._chunk, self._at = reader, chunk, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._chunk.length}[whence]
        if self._at < 0:
            raise OSError("seek before the start")
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._chunk.length - self._at)
        count = left if count is None or count < 0 else min(count, left)
        buffer = np.empty(count, np.uint8)
        self._reader._read_bytes(self._chunk.file, self._chunk.start + self._at, buffer)
        self._at += count
        return buffer.tobytes()


def _stored_tensor(file: _Slice, chunk: Chunk) -> StoredTensor:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("big-endian values")
        key, kind, origin, shape, stride = _TensorUnpickler(archive.open(members["data.pkl"])).load()
        data = members[f"data/{key}"]
    if data.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed values")
    file.seek(data.header_offset)
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = data.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    reach = origin + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if origin < 0 or min(stride, default=0) < 0 or reach * kind.size > data.file_size:
        raise ValueError(
            f"{data.file_size} bytes of values do not hold {list(shape)} with strides {list(stride)}"
        )
    if start + data.file_size > chunk.length:
        raise ValueError("values run over the end of the chunk")
    return StoredTensor(kind, tuple(shape), tuple(stride), origin, chunk.start + start, data.file_size)


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_Layout = tuple[str, ElementType, int, tuple[int, ...], tuple[int, ...]]


def _rebuild_v2(
    storage: Any, origin: int, shape: Any, stride: Any, grad: bool, hooks: Any, flags: Any = None
) -> _Layout:
    return _rebuild_v3(storage, origin, shape, stride, grad, hooks, storage[1], flags)


def _rebuild_v3(
    storage: Any, origin: int, shape: Any, stride: Any, grad: bool, hooks: Any, kind: Any, flags: Any = None
) -> _Layout:
    if flags:
        raise ValueError(f"lazily transformed values ({flags})")
    return storage[0], kind, origin, shape, stride


class _TensorUnpickler(pickle.Unpickler):
    """Reads the `data.pkl` of one plain tensor into its layout; knows nothing else, so it cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return BY_NAME[_STORAGES[name]]
        if module == "torch" and name in BY_NAME:
            return BY_NAME[name]
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
            ("torch.storage", "UntypedStorage"): None,
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in known:
            raise ValueError(f"holds {module}.{name}, not a plain tensor")
        return known[module, name]

    def persistent_load(self, pid: Any) -> tuple[str, Any]:
        _, kind, key, *_ = pid
        return str(key), kind
