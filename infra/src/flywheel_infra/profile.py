"""A profile: the steps of the flywheel in order, read from a strict TOML file."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flywheel_infra.environments import ROOT, folder_of
from flywheel_shared.errors import UserError
from flywheel_shared.recipe import Section, load_recipe

PROFILES = ROOT / "infra" / "profiles"


class Step(Section):
    """One command of one stage.

    In `argv`, `{root}` is the folder of the run, `{recipe}` the full path of `recipe`, and `{server}` the
    address that the step named by `server` answers at.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    stage: str
    argv: list[str] = Field(min_length=1)
    recipe: str | None = None  # relative to the repository; its content belongs to the step's digest
    recipe_tables: tuple[str, ...] = ()  # those that the command reads, where it does not read all
    needs: tuple[str, ...] = ()  # earlier steps whose outputs this one reads
    outputs: tuple[str, ...] = ()  # relative to the root; all exist once the step is done
    kind: Literal["run", "serve"] = "run"
    server: str | None = None  # a serve step that must answer while this one runs
    ready_file: str | None = None  # a serve step writes its address here, relative to the root
    resumes: bool = False  # a killed step goes on from what its outputs hold already

    @model_validator(mode="after")
    def _serve_steps_say_when_they_are_ready(self) -> Self:
        if (self.kind == "serve") != (self.ready_file is not None):
            raise ValueError(
                f"step {self.name}: ready_file belongs to every step of kind serve, and to no other"
            )
        if any(Path(output).is_absolute() or ".." in Path(output).parts for output in self.outputs):
            raise ValueError(f"step {self.name}: outputs lie under the root, found {self.outputs}")
        return self

    def command(self, root: Path, server: str | None) -> list[str]:
        """`argv` with its placeholders filled in."""
        recipe = str(ROOT / self.recipe) if self.recipe else ""
        values = {"{root}": str(root), "{recipe}": recipe, "{server}": server or ""}
        words = list(self.argv)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words

    def read_recipe(self) -> dict[str, Any] | None:
        """What the command reads of its recipe; UserError where the file is absent or no TOML."""
        if self.recipe is None:
            return None
        path = ROOT / self.recipe
        try:
            tables = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"step {self.name}: recipe {path} cannot be read: {error}") from None
        return {name: table for name, table in tables.items() if name in (self.recipe_tables or tables)}


class Profile(Section):
    """Steps in the order in which they run."""

    description: str
    steps: list[Step] = Field(min_length=1)

    @model_validator(mode="after")
    def _steps_name_earlier_steps(self) -> Self:
        kinds: dict[str, str] = {}
        for step in self.steps:
            if step.name in kinds:
                raise ValueError(f"two steps are named {step.name}")
            for needed in [*step.needs, *([step.server] if step.server else [])]:
                if needed not in kinds:
                    raise ValueError(f"step {step.name} needs {needed}, which is no earlier step")
            if step.server and kinds[step.server] != "serve":
                raise ValueError(f"step {step.name}: server names {step.server}, which is not of kind serve")
            kinds[step.name] = step.kind
        return self

    def digests(self) -> dict[str, str]:
        """What decides each step's outputs: argv, recipe, stage version, and those of what it needs."""
        digests: dict[str, str] = {}
        for step in self.steps:
            project = tomllib.loads((folder_of(step.stage) / "pyproject.toml").read_text())["project"]
            parts = {
                "argv": step.argv,
                # Parsed, so that a comment or a blank line reruns nothing.
                "recipe": step.read_recipe(),
                "stage": [step.stage, project["version"]],
                "needs": [digests[needed] for needed in step.needs],
            }
            digests[step.name] = hashlib.sha256(
                json.dumps(parts, sort_keys=True, default=str).encode()
            ).hexdigest()
        return digests


def load_profile(name: str) -> Profile:
    """The profile of that name in infra/profiles, or of that path where it ends in .toml."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.toml")))
        raise UserError(f"profile '{name}' does not exist ({path}); there are: {known}")
    return load_recipe(Profile, path)
