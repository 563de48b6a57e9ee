"""The index of a DCP folder: its `.metadata` file, read into plain records.

`.metadata` is a pickle, and a pickle may run anything. This one is read by an unpickler that knows the dozen
classes DCP writes (torch.distributed.checkpoint.metadata and .filesystem) and refuses every other name. It
builds records of our own, so that neither torch nor the writer's version of it is needed.
"""

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from dcp_convert.dtypes import BY_NAME, ElementType
from flywheel_shared.errors import UserError

METADATA = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """A hyperrectangle of a tensor and the bytes (an archive of torch.save) that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the folder; `chunks` cover it without overlap and none is empty."""

    name: str
    shape: tuple[int, ...]
    kind: ElementType
    chunks: tuple[Chunk, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the values, in bytes."""
        return self.elements * self.kind.size


@dataclass(frozen=True)
class DcpIndex:
    """What a DCP folder holds: tensors, other pickled objects (name -> bytes), and how names were nested.

    `paths` maps a name to the keys that led to it in the state dict that was saved; `file_sizes` to each
    data file's least size in bytes.
    """

    folder: Path
    tensors: dict[str, TensorEntry]
    objects: dict[str, int]
    paths: dict[str, tuple[str, ...]]
    file_sizes: dict[str, int]


def read_index(folder: Path) -> DcpIndex:
    """Read and check `folder/.metadata`. Raises UserError that names the file and what is wrong with it."""
    path = folder / METADATA
    if not path.is_file():
        raise UserError(f"{path}: missing, so {folder} is no DCP folder, or its save did not finish")
    try:
        with path.open("rb") as file:
            record = _Unpickler(file, path).load()
        return _index(folder, path, record)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{path}: not readable as DCP metadata ({type(error).__name__}: {error})") from error


class Record:
    """Stands for any DCP class: takes over the attributes (or the tuple of values) that were pickled."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = state


class IndexKey(Record):
    """MetadataIndex, the key of the storage table: equal when name and offset are."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexKey) and (self.fqn, self.offset) == (other.fqn, other.offset)


class BytesRecord(Record):
    """BytesStorageMetadata: an entry that is no tensor."""


class TensorRecord(Record):
    """TensorStorageMetadata: `properties`, `size`, `chunks`."""


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA_MODULE, "Metadata"): Record,
    (_METADATA_MODULE, "StorageMeta"): Record,
    (_METADATA_MODULE, "TensorProperties"): Record,
    (_METADATA_MODULE, "ChunkStorageMetadata"): Record,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): Record,
    (_METADATA_MODULE, "TensorStorageMetadata"): TensorRecord,
    (_METADATA_MODULE, "BytesStorageMetadata"): BytesRecord,
    (_METADATA_MODULE, "MetadataIndex"): IndexKey,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and name in BY_NAME:
            return BY_NAME[name]
        raise UserError(f"{self.path}: names {module}.{name}, which DCP metadata does not hold; refused")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UserError(f"{self.path}: refers to an object outside the file ({pid!r}); refused")


def _index(folder: Path, path: Path, record: Any) -> DcpIndex:
    storage = record.storage_data
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, int] = {}
    file_sizes: dict[str, int] = {}
    for key, place in storage.items():
        if PurePosixPath(place.relative_path).name != place.relative_path:
            raise UserError(
                f"{path}: {key.fqn} lies in {place.relative_path!r}, outside of the folder; refused"
            )
        if getattr(place, "transform_descriptors", None):
            raise UserError(
                f"{path}: {key.fqn} was written through {', '.join(place.transform_descriptors)}, which this "
                "version cannot read; save without extensions"
            )
        end = place.offset + place.length
        file_sizes[place.relative_path] = max(end, file_sizes.get(place.relative_path, 0))
    for name, entry in record.state_dict_metadata.items():
        if isinstance(entry, BytesRecord):
            objects[name] = storage[_key(name, None)].length
        elif isinstance(entry, TensorRecord):
            tensors[name] = _tensor(path, name, entry, storage)
        else:
            raise UserError(f"{path}: {name} is neither a tensor nor bytes")
    nesting = record.planner_data if isinstance(record.planner_data, dict) else {}
    paths = {
        name: tuple(str(part) for part in nesting.get(name, (name,))) for name in record.state_dict_metadata
    }
    return DcpIndex(folder, tensors, objects, paths, file_sizes)


def _tensor(path: Path, name: str, entry: Any, storage: dict[IndexKey, Any]) -> TensorEntry:
    kind = entry.properties.values[0]
    if not isinstance(kind, ElementType):
        raise UserError(f"{path}: {name} has no element type")
    shape = tuple(entry.size)
    chunks: dict[tuple[int, ...], Chunk] = {}
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if math.prod(sizes) == 0:  # a rank that got nothing of an uneven split
            continue
        inside = len(offsets) == len(sizes) == len(shape) and all(
            start >= 0 and size > 0 and start + size <= limit
            for start, size, limit in zip(offsets, sizes, shape, strict=True)
        )
        place = storage.get(_key(name, offsets))
        if not inside or place is None:
            where = "outside of the tensor" if not inside else "in no file"
            raise UserError(
                f"{path}: {name} {list(shape)}: chunk {list(sizes)} at {list(offsets)} lies {where}"
            )
        chunks[offsets] = Chunk(offsets, sizes, place.relative_path, place.offset, place.length)
    found = sum(math.prod(chunk.sizes) for chunk in chunks.values())
    if found != math.prod(shape):
        raise UserError(
            f"{path}: {name} {list(shape)}: its chunks hold {found} of {math.prod(shape)} elements; "
            "the save did not finish on every rank"
        )
    return TensorEntry(name, shape, kind, tuple(chunks.values()))


def _key(name: str, offset: tuple[int, ...] | None) -> IndexKey:
    key = IndexKey()
    key.fqn, key.offset = name, offset
    return key
