"""A profile: the steps of one turn of the flywheel in order, read from a strict TOML file, and its turns.

The same steps make every turn. `unrolled` writes them out one turn after the other, each step under a name of
its own (`train`, then `train@2`), so that whatever runs or records them knows steps alone.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flywheel_infra.environments import ROOT, folder_of, stages
from flywheel_shared.errors import UserError
from flywheel_shared.recipe import Section, load_recipe

PROFILES = ROOT / "infra" / "profiles"
PLACEHOLDERS = {"root", "recipe", "server", "turn", "previous"}
OF_PREVIOUS = "@previous"


class Step(Section):
    """One command of one stage.

    In `argv`, `{root}` is the folder of the run, `{recipe}` the full path of `recipe`, and `{server}` the
    address that the step named by `server` answers at. In `argv`, `recipe`, `outputs` and `ready_file`,
    `{turn}` is the number of the turn, from 1, and `{previous}` that of the turn before, so 0 in the first.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    stage: str
    argv: list[str] = Field(min_length=1)
    # Which turns have this step; "last" is once, in the last turn. Two steps may share a name, one of them
    # "first" and one "later": the same step asked differently once there is a turn before.
    turns: Literal["first", "later", "all", "last"] = "all"
    recipe: str | None = None  # relative to the repository; its content belongs to the step's digest
    recipe_tables: tuple[str, ...] = ()  # those that the command reads, where it does not read all
    # Steps whose outputs this one reads: earlier ones of the same turn (of the first turn where they run in
    # that alone, none where they run in later turns alone), or `name@previous`, none in the first turn.
    needs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # relative to the root; all exist once the step is done
    kind: Literal["run", "serve"] = "run"
    server: str | None = None  # a serve step that must answer while this one runs
    ready_file: str | None = None  # a serve step writes its address here, relative to the root
    resumes: bool = False  # a killed step goes on from what its outputs hold already

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.stage not in stages():
            raise ValueError(
                f"step {self.name}: stage '{self.stage}' does not exist; there are: {', '.join(stages())}"
            )
        if (self.kind == "serve") != (self.ready_file is not None):
            raise ValueError(
                f"step {self.name}: ready_file belongs to every step of kind serve, and to no other"
            )
        if any(Path(output).is_absolute() or ".." in Path(output).parts for output in self.outputs):
            raise ValueError(f"step {self.name}: outputs lie under the root, found {self.outputs}")
        named = {name for text in (*self.argv, *self.outputs) for name in re.findall(r"{([a-z_]+)}", text)}
        if unknown := named - PLACEHOLDERS:
            raise ValueError(
                f"step {self.name}: unknown placeholder {{{min(unknown)}}}; there are: "
                + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
            )
        return self

    def runs_in(self, turn: int, of: int) -> bool:
        """Whether turn `turn` of a run of `of` turns has this step."""
        return {"first": turn == 1, "later": turn > 1, "all": True, "last": turn == of}[self.turns]

    def command(self, root: Path, server: str | None) -> list[str]:
        """`argv` with the placeholders filled in that no turn decides."""
        recipe = str(ROOT / self.recipe) if self.recipe else ""
        return [
            _filled(word, {"root": str(root), "recipe": recipe, "server": server or ""}) for word in self.argv
        ]

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
    """Steps in the order in which they run in a turn."""

    description: str
    steps: list[Step] = Field(min_length=1)

    @model_validator(mode="after")
    def _steps_name_earlier_steps(self) -> Self:
        earlier: dict[str, list[Step]] = {}
        every = {name: [s for s in self.steps if s.name == name] for name in {s.name for s in self.steps}}
        for step in self.steps:
            namesakes = earlier.get(step.name, [])
            if namesakes and sorted(one.turns for one in [*namesakes, step]) != ["first", "later"]:
                raise ValueError(
                    f'two steps are named {step.name}, and not one for the "first" and one for "later" turns'
                )
            for needed in [*step.needs, *([step.server] if step.server else [])]:
                name = needed.removesuffix(OF_PREVIOUS)
                found = every.get(name) if needed != name else earlier.get(name)
                if not found or (needed == name == step.name):
                    raise ValueError(f"step {step.name} needs {needed}, which is no earlier step")
                turns = {one.turns for one in found}
                if "last" in turns and (step.turns != "last" or needed != name):
                    raise ValueError(f"step {step.name} needs {needed}, which runs in the last turn alone")
                if turns == {"first"} and needed != name:
                    raise ValueError(
                        f"step {step.name} needs {needed}, which runs in the first turn alone: say {name}"
                    )
            if step.server:
                _check_server(step, earlier.get(step.server, []))
            earlier[step.name] = [*namesakes, step]
        return self

    def unrolled(self, turns: int) -> list[Step]:
        """The steps of all turns in the order in which they run.

        Those of the first turn, and one of the last turn alone, keep their names: a run of more turns finds
        what one of fewer has done. Raises UserError where two steps of the list would make the same output.
        """
        if turns > 1:
            self._check_outputs_differ()
        names: dict[tuple[str, int], str] = {}
        steps: list[Step] = []
        for turn in range(1, turns + 1):
            for step in [step for step in self.steps if step.runs_in(turn, turns)]:
                name = step.name if turn == 1 or step.turns == "last" else f"{step.name}@{turn}"
                names[step.name, turn] = name
                steps.append(self._in_turn(step, name, turn, names))
        makers: dict[str, str] = {}
        for step in steps:
            for output in step.outputs:
                if makers.setdefault(output, step.name) != step.name:
                    raise UserError(f"steps {makers[output]} and {step.name} both make {output}")
        return steps

    def _check_outputs_differ(self) -> None:
        for step in self.steps:
            for output in step.outputs if step.turns in ("all", "later") else ():
                if "{turn}" not in output:
                    raise UserError(
                        f"step {step.name}: every turn would make the same {output}; put {{turn}} into the name "
                        'of this output, or let the step say turns = "first"'
                    )

    @staticmethod
    def _in_turn(step: Step, name: str, turn: int, names: dict[tuple[str, int], str]) -> Step:
        """The step with everything filled in that its turn decides."""
        values = {"turn": str(turn), "previous": str(turn - 1)}
        needs = []
        for needed in step.needs:
            base = needed.removesuffix(OF_PREVIOUS)
            found = names.get((base, turn if base == needed else turn - 1))
            # What the first turn alone makes stays in use in all.
            needs.append(found or (names.get((base, 1)) if base == needed else None))
        server = step.server and (names.get((step.server, turn)) or names[step.server, 1])
        return step.model_copy(
            update={
                "name": name,
                "argv": [_filled(word, values) for word in step.argv],
                "recipe": step.recipe and _filled(step.recipe, values),
                "outputs": tuple(_filled(output, values) for output in step.outputs),
                "ready_file": step.ready_file and _filled(step.ready_file, values),
                "needs": tuple(needed for needed in needs if needed),
                "server": server,
            }
        )


def digests(steps: Sequence[Step]) -> dict[str, str]:
    """What decides each step's outputs: argv, recipe, stage version, and those of what it needs."""
    found: dict[str, str] = {}
    for step in steps:
        project = tomllib.loads((folder_of(step.stage) / "pyproject.toml").read_text())["project"]
        parts = {
            "argv": step.argv,
            # Parsed, so that a comment or a blank line reruns nothing.
            "recipe": step.read_recipe(),
            "stage": [step.stage, project["version"]],
            "needs": [found[needed] for needed in step.needs],
        }
        found[step.name] = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return found


def load_profile(name: str) -> Profile:
    """The profile of that name in infra/profiles, or of that path where it ends in .toml."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.toml")))
        raise UserError(f"profile '{name}' does not exist ({path}); there are: {known}")
    return load_recipe(Profile, path)


def _check_server(step: Step, serving: Sequence[Step]) -> None:
    """ValueError unless `serving` are serve steps and one of them is there whenever `step` runs."""
    if not serving or any(one.kind != "serve" for one in serving):
        raise ValueError(f"step {step.name}: server names {step.server}, which is not of kind serve")
    first = any(one.turns != "later" for one in serving)  # and then in all turns
    if not first and step.turns != "later":
        raise ValueError(f"step {step.name}: server {step.server} does not run in the first turn")


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
