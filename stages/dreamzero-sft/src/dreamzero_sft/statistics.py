"""Normalisation statistics of a corpus, in the form that RLinf writes and reads (``metadata.json``)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from flywheel_shared.errors import UserError
from flywheel_shared.normalisation import summarise


def build_metadata(
    embodiment: str,
    actions: np.ndarray,
    states: np.ndarray,
    cameras: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The metadata of one embodiment.

    Args:
        embodiment: its tag, the top-level key.
        actions: every action of the corpus ``[N, Da]``.
        states: every state ``[N, Ds]``.
        cameras: for each view its ``resolution`` [width, height], ``channels`` and ``fps``.
    """
    return {
        embodiment: {
            "statistics": {"state": {"state": summarise(states)}, "action": {"actions": summarise(actions)}},
            "modalities": {
                "video": cameras,
                "state": {"state": {"shape": [states.shape[1]], "continuous": True}},
                "action": {"actions": {"shape": [actions.shape[1]], "continuous": True}},
            },
            "embodiment_tag": embodiment,
        }
    }


def read_metadata(path: Path, embodiment: str) -> dict[str, Any]:
    """One embodiment's metadata from ``metadata.json`` or an export's ``stats.json``.

    Raises:
        UserError: if the file, the embodiment or a statistic is missing.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: run `dreamzero-sft metadata` first") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(document, dict) or embodiment not in document:
        found = ", ".join(sorted(document)) if isinstance(document, dict) else type(document).__name__
        raise UserError(f"{path}: no embodiment {embodiment!r}; found {found or 'none'}")
    metadata = document[embodiment]
    try:
        for kind, key in (("state", "state"), ("action", "actions")):
            for field in ("q01", "q99"):
                column = metadata["statistics"][kind][key][field]
                if not np.isfinite(np.asarray(column, dtype=np.float64)).all():
                    raise UserError(f"{path}: statistics.{kind}.{key}.{field} is not finite: {column}")
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: {embodiment}.statistics lacks state.state or action.actions q01/q99"
        ) from None
    return metadata
