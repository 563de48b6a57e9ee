"""Start a model from weights that are there: a Hugging Face folder or a checkpoint, straight into shards.

No rank ever holds more than its own shards and the slice that is being read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flywheel_shared.checkpoint_folder import CheckpointFolder, NotWhole, read_commit
from flywheel_shared.errors import UserError, one_line
from flywheel_shared.launch import World
from flywheel_shared.recipe import Section

REPORT = "warm_start.json"
_SHOWN = 3
# What transformers and diffusers call a model's own weights; a folder may hold other safetensors beside them.
_WEIGHTS = ("model", "diffusion_pytorch_model")


class WarmStartSettings(Section):
    """Where weights come from.

    Attributes:
        source: a folder with safetensors (an export, a published repository or its `transformer/`), a run's
            folder, one of its `iter_*`, or a bare DCP folder. Relative paths count from the root.
        skip: parts of names: parameters that have one of them in their name start fresh.
        prefix: what the source's names have before the model's (`net.`, `action_head.model.`).
        weights: of our own checkpoints: the average where there is one, the average, or the weights.
    """

    source: Path
    skip: tuple[str, ...] = ()
    prefix: str = ""
    weights: str = Field(default="auto", pattern="^(auto|model|ema)$")


@dataclass(frozen=True)
class WarmStart:
    """What became of every name: `missing` the source lacks, `unexpected` the model lacks."""

    source: str
    loaded: list[str]
    skipped: list[str]
    missing: list[str]
    unexpected: list[str]

    def line(self) -> str:
        """For the console; names are in the report's file."""
        told = f"{len(self.loaded)} tensors from {self.source}"
        for what in ("skipped", "missing", "unexpected"):
            names: list[str] = getattr(self, what)
            if names:
                shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                told += f"; {len(names)} {what} ({shown})"
        return told


def warm_start(model: nn.Module, settings: WarmStartSettings, root: Path, world: World) -> WarmStart:
    """Load what the source has into the model's parameters and buffers, in place; every rank calls it.

    Raises `UserError` where the source is none, where nothing of it fits, and where a shape differs from the
    model's and is not skipped.
    """
    folder, reader = _open(root / settings.source, settings.weights)
    try:
        found = _tensors(folder, reader)
    except Exception as error:  # pickles, JSON and safetensors headers each fail in their own way
        raise UserError(f"{folder}: cannot be read: {one_line(str(error))[:200]}") from None
    sizes = {
        name.removeprefix(settings.prefix): size
        for name, size in found.items()
        if name.startswith(settings.prefix)
    }
    state = model.state_dict()
    skipped = sorted(name for name in state if any(part in name for part in settings.skip))
    wanted = {name: tensor for name, tensor in state.items() if name not in set(skipped)}
    loaded = sorted(wanted.keys() & sizes.keys())
    _check(folder, settings, {name: tuple(wanted[name].shape) for name in loaded}, sizes, state)
    dcp.load(
        {settings.prefix + name: wanted[name] for name in loaded},
        storage_reader=reader,
        process_group=world.checkpoint_group,
    )
    return WarmStart(
        source=str(folder),
        loaded=loaded,
        skipped=skipped,
        missing=sorted(wanted.keys() - sizes.keys()),
        unexpected=sorted(sizes.keys() - state.keys()),
    )


def write_report(report: WarmStart, folder: Path) -> None:
    """Keep every name in `<folder>/warm_start.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(json.dumps(asdict(report), indent=1))


def _check(
    folder: Path,
    settings: WarmStartSettings,
    wanted: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, Any],
) -> None:
    if not wanted:
        some = ", ".join(sorted(sizes)[:_SHOWN]) or "no tensors"
        hint = f" behind the prefix {settings.prefix!r}" if settings.prefix else ""
        raise UserError(
            f"{folder}: nothing fits the model: it has {some}{hint}, the model {', '.join(sorted(state)[:_SHOWN])}"
        )
    for name, shape in wanted.items():
        if sizes[name] != shape:
            raise UserError(
                f"{folder}: {name} is {list(sizes[name])}, the model's is {list(shape)}; name it in skip to start "
                "it fresh"
            )


def _tensors(folder: Path, reader: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by name; of safetensors only those of the model's own files."""
    metadata = reader.read_metadata()
    entries = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if not isinstance(reader, HuggingFaceStorageReader):
        return entries
    files = {Path(place.relative_path).name for place in metadata.storage_data.values()}
    own = {file for file in files if file.startswith(_WEIGHTS)} or files
    places = {index.fqn: Path(place.relative_path).name for index, place in metadata.storage_data.items()}
    return {name: size for name, size in entries.items() if places[name] in own}


def _open(path: Path, weights: str) -> tuple[Path, Any]:
    """The folder that holds the tensors, and a reader for it."""
    for inner in (path, path / "transformer"):
        if any(inner.glob("*.safetensors")):
            return inner, HuggingFaceStorageReader(str(inner))
    if (path / ".metadata").is_file():
        return path, dcp.FileSystemReader(path)
    iterations = CheckpointFolder(path).iterations() if path.is_dir() else []
    iteration = path / f"iter_{iterations[0][0]:09d}" if iterations else path
    if (iteration / "model" / ".metadata").is_file():
        try:
            read_commit(iteration)
        except NotWhole as error:
            raise UserError(f"{iteration}: not whole: {error}") from None
        averaged = (iteration / "ema" / ".metadata").is_file()
        if weights == "ema" and not averaged:
            raise UserError(f"{iteration}: has no average (ema/); choose weights = auto or model")
        chosen = iteration / ("ema" if averaged and weights != "model" else "model")
        return chosen, dcp.FileSystemReader(chosen)
    raise UserError(f"{path}: neither safetensors nor a checkpoint: no weights to start from")
