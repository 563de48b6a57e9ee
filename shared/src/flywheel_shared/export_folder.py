"""Reading an export of `dcp-convert to-safetensors`: its JSON files and its weights."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from flywheel_shared.errors import UserError

_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of an export; raises `UserError` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: is this an export of dcp-convert?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def read_weights(export: Path, expected: set[str]) -> dict[str, Tensor]:
    """All tensors of an export's safetensors shards.

    Raises:
        UserError: if a shard is missing, or names differ from the model's.
    """
    index = export / _INDEX
    shards = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for shard in shards:
        path = export / Path(shard).name
        if not path.is_file():
            raise UserError(f"{path}: no such file: convert the checkpoint again with dcp-convert")
        with safe_open(path, framework="pt") as tensors:
            weights.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    missing, extra = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    if missing or extra:
        raise UserError(
            f"{export}: weights do not fit the model: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} unexpected {extra[:3]}"
        )
    return weights
