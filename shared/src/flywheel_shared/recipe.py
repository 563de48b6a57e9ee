"""Recipes: a TOML file read into a strict pydantic model, with dotted overrides from the command line.

class Trainer(Section):
    max_steps: int = Field(gt=0)

class Recipe(Section):
    trainer: Trainer

recipe = load_recipe(Recipe, Path("recipes/laptop.toml"), ["trainer.max_steps=10"])
"""

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flywheel_shared.errors import UserError

_ERRORS_SHOWN = 3


class Section(BaseModel):
    """Base of every table of a recipe: no unknown keys, no silent conversions, immutable once read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def load_recipe[R: Section](model_cls: type[R], path: Path, overrides: Sequence[str] = ()) -> R:
    """Read `path` and apply `overrides`, each `dotted.key=value`, the last one winning.

    A value is parsed as TOML (`10`, `1e-4`, `true`, `[1, 2]`, `"10"`) and taken as a string where it is no
    TOML (`cpu`). Raises `UserError` naming the file or the override, the dotted key, what was found and what
    is allowed.
    """
    tables = _read_toml(path)
    sources: dict[tuple[str, ...], str] = {}
    for override in overrides:
        keys, value = _parse_override(override)
        _put(tables, keys, value, override)
        sources[keys] = f"--set {override}"
    try:
        # Through JSON, strictness still lets an array become a tuple and a string a Path: TOML has neither.
        return model_cls.model_validate_json(json.dumps(tables, default=str))
    except ValidationError as error:
        found = error.errors(include_url=False)
        lines = [_explain(model_cls, dict(one), path, sources) for one in found[:_ERRORS_SHOWN]]
        more = f"; and {len(found) - _ERRORS_SHOWN} more" if len(found) > _ERRORS_SHOWN else ""
        raise UserError("; ".join(lines) + more) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = sorted(file.name for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        raise UserError(
            f"{path}: no such recipe; {path.parent} holds {', '.join(beside) or 'no .toml file'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, text = override.partition("=")
    keys = tuple(key.strip() for key in dotted.split("."))
    if not equals or not all(keys):
        raise UserError(f"--set {override}: expected dotted.key=value, such as trainer.max_steps=10")
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return keys, text
    # A line break in the text could smuggle in further keys: then it is just a string.
    return keys, parsed["value"] if len(parsed) == 1 else text


def _put(tables: dict[str, Any], keys: tuple[str, ...], value: Any, override: str) -> None:
    table = tables
    for depth, key in enumerate(keys[:-1]):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            dotted = ".".join(keys[: depth + 1])
            raise UserError(f"--set {override}: {dotted} is a value ({inner!r}), not a table")
        table = inner
    table[keys[-1]] = value


def _explain(
    model_cls: type[BaseModel], error: dict[str, Any], path: Path, sources: dict[tuple[str, ...], str]
) -> str:
    """Turn one pydantic error into `where: key: found X; allowed Y`."""
    location: tuple[Any, ...] = error["loc"]
    dotted = ".".join(map(str, location)) or "the recipe"
    # An override is to blame for its own key and for all that lies beneath it.
    where = next(
        (source for keys, source in reversed(sources.items()) if location[: len(keys)] == keys), str(path)
    )
    message: str = error["msg"]
    if error["type"] == "extra_forbidden":
        allowed = sorted(_keys_at(model_cls, location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        return f"{where}: {dotted}: unknown key{guess}; allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{where}: {dotted}: required key is missing"
    if error["type"] == "value_error":
        return f"{where}: {dotted}: {message.removeprefix('Value error, ')}"
    found = "a table" if isinstance(error["input"], dict) else repr(error["input"])
    wanted = message.replace("Input should be an object", "Input should be a table")
    return f"{where}: {dotted}: found {found}; allowed: {wanted.removeprefix('Input should be ')}"


def _keys_at(model_cls: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Names of the keys that the table at `location` may hold."""
    models = [model_cls]
    for step in location:
        inner = [
            nested
            for model in models
            if step in model.model_fields
            for nested in _models_in(model.model_fields[step].annotation)
        ]
        # A step that is no field is an index of an array or the tag of a union: the candidates stay.
        models = inner or models
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model named by an annotation: `Trainer | None`, `list[Stage]`, `Annotated[...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
