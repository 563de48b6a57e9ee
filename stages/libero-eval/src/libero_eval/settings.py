"""What can be asked of the two verbs: the sections of a recipe, shared by `record` and `run`."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from flywheel_shared.errors import UserError
from flywheel_shared.recipe import Section, load_recipe

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10"]
Rendering = Literal["fast", "full"]


def parse_indices(text: str) -> list[int]:
    """Numbers named by "0", "0,3,7" or "36-49,2", in that order.

    Raises:
        ValueError: for anything else, a range that runs backwards, or a number named twice.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"found {text!r}, expected numbers and ranges such as 0-9 or 36-49,3")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"found {text!r}, which names a number twice")
    return numbers


def _check_indices(text: str) -> str:
    parse_indices(text)
    return text


Indices = Annotated[str, AfterValidator(_check_indices)]


class SimulatorSection(Section):
    """The simulator as policies meet it: recording and evaluation must agree on all of it."""

    suite: Suite = "libero_spatial"
    rate_hz: int = Field(default=10, ge=1, le=100)
    size: int = Field(default=128, ge=32, le=1024)  # pixels, of both square views
    rendering: Rendering = "fast"


class RecordSection(Section):
    """Demonstrations of the scripted expert."""

    tasks: Indices = "0"
    init_states: Indices = "0-35"
    episodes: int = Field(default=36, ge=1)  # attempts a task; initial states are gone through in turn
    spread_m: float = Field(default=0.0, ge=0, le=0.2)  # largest displacement of the object along x and y
    seed: int = Field(default=0, ge=0)
    noise: float = Field(default=0.25, ge=0, le=1)  # of the executed action; the recorded one is clean
    max_steps: int = Field(default=90, ge=1)
    workers: int = Field(default=2, ge=1)


class RunSection(Section):
    """One closed-loop evaluation."""

    tasks: Indices = "0"
    init_states: Indices = "36-49"
    episodes_per_state: int = Field(default=1, ge=1)
    spread_m: float = Field(default=0.0, ge=0, le=0.2)  # largest displacement of the object along x and y
    seed: int = Field(default=0, ge=0)
    execute: int = Field(default=4, ge=1)  # actions of a chunk before the policy is asked again
    max_steps: int = Field(default=120, ge=1)
    workers: int = Field(default=2, ge=1)
    blank_cameras: bool = False
    render: Literal["query", "every-step"] = "query"
    videos: int = Field(default=4, ge=0)
    request_timeout_s: float = Field(default=30.0, gt=0)
    episode_timeout_s: float = Field(default=300.0, gt=0)
    reconnect_s: float = Field(default=30.0, ge=0)  # how long a server that is away is waited for


class Recipe(Section):
    """recipes/*.toml."""

    simulator: SimulatorSection = SimulatorSection()
    record: RecordSection = RecordSection()
    run: RunSection = RunSection()


def read_recipe(path: Path | None, overrides: list[str], flags: dict[str, Any]) -> Recipe:
    """The recipe at `path` (all defaults without one), changed by `--set`, then by options.

    `flags` maps dotted keys to what options gave; None is an option that was not given.

    Raises:
        UserError: naming the file, override or key, what was found and what is allowed.
    """
    if path is None and overrides:
        raise UserError("--set changes a recipe: name it with --recipe")
    recipe = load_recipe(Recipe, path, overrides) if path is not None else Recipe()
    tables = recipe.model_dump()
    for dotted, value in flags.items():
        if value is not None:
            section, key = dotted.split(".")
            tables[section][key] = value
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "--" + str(first["loc"][-1]).replace("_", "-")
        raise UserError(f"{option}: {first['msg'].removeprefix('Value error, ')}") from None
