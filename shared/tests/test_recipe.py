from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from flywheel_shared.errors import UserError
from flywheel_shared.recipe import Section, load_recipe


class Trainer(Section):
    max_steps: int = Field(gt=0)
    lr: float = 1e-3
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    output: Path = Path("out")
    device: Literal["cpu", "cuda"] = "cpu"

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Trainer":
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} exceeds max_steps {self.max_steps}")
        return self


class Source(Section):
    path: str


class Recipe(Section):
    trainer: Trainer
    name: str = "run"
    ema: Trainer | None = None
    sources: list[Source] = Field(default_factory=list)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "laptop.toml"
    path.write_text('name = "a"\n[trainer]\nmax_steps = 5\nbetas = [0.5, 0.9]\noutput = "x/y"\nlr = 1\n')
    return path


def test_toml_becomes_the_model_and_whole_numbers_are_floats_where_asked(recipe_file):
    recipe = load_recipe(Recipe, recipe_file)
    assert recipe.trainer == Trainer(max_steps=5, betas=(0.5, 0.9), output=Path("x/y"), lr=1.0)
    assert isinstance(recipe.trainer.lr, float)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "b"


def test_overrides_win_in_order_and_are_parsed_as_toml_or_text(recipe_file):
    overrides = [
        "trainer.max_steps=6", "trainer.max_steps=7", "trainer.lr=1e-4", "trainer.device=cuda",
        "trainer.betas=[0.1, 0.2]", "name=", 'ema.output="a=b"', "ema.max_steps=3",
    ]  # fmt: skip
    recipe = load_recipe(Recipe, recipe_file, overrides)
    assert recipe.trainer.max_steps == 7
    assert recipe.trainer.lr == 1e-4
    assert recipe.trainer.device == "cuda"
    assert recipe.trainer.betas == (0.1, 0.2)
    assert recipe.name == ""
    assert recipe.ema == Trainer(max_steps=3, output=Path("a=b"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_step=6", ["unknown key", "did you mean max_steps?", "allowed: betas, device"]),
        ("trainer.max_steps=2.5", ["trainer.max_steps", "found 2.5", "a valid integer"]),
        ("trainer.max_steps=0", ["found 0", "greater than 0"]),
        ("trainer.max_steps=true", ["found True", "a valid integer"]),
        ("trainer.device=gpu", ["found 'gpu'", "'cpu' or 'cuda'"]),
        ("trainer=3", ["found 3", "a table"]),
        ("ema.warmup_steps=3", ["ema.max_steps", "required key is missing"]),
        ("name.first=3", ["name is a value ('a'), not a table"]),
        ("trainer.warmup_steps=6", ["warmup_steps 6 exceeds max_steps 5"]),
        ("trainer.max_steps", ["expected dotted.key=value"]),
        (".max_steps=3", ["expected dotted.key=value"]),
        ('sources=[{path="a"}, {pth="b"}]', ["sources.1.pth", "did you mean path?"]),
    ],
)
def test_wrong_override_names_key_found_and_allowed(recipe_file, override, words):
    with pytest.raises(UserError) as caught:
        load_recipe(Recipe, recipe_file, [override])
    for word in words:
        assert word in str(caught.value)


def test_line_break_in_an_override_sets_no_second_key(recipe_file):
    recipe = load_recipe(Recipe, recipe_file, ["name=1\ntrainer.max_steps=9"])
    assert recipe.name == "1\ntrainer.max_steps=9"
    assert recipe.trainer.max_steps == 5


def test_wrong_file_is_named_and_a_right_override_is_not_blamed(recipe_file):
    recipe_file.write_text("[trainer]\nmax_steps = 'x'\nextra = 1\n")
    with pytest.raises(UserError) as caught:
        load_recipe(Recipe, recipe_file, ["trainer.lr=0.1"])
    message = str(caught.value)
    assert message.count(str(recipe_file)) == 2
    assert "trainer.max_steps: found 'x'" in message
    assert "trainer.extra: unknown key" in message
    assert "--set" not in message
    assert "\n" not in message


def test_missing_or_malformed_file_says_what_is_there(tmp_path, recipe_file):
    with pytest.raises(UserError, match=r"no such recipe.*holds laptop\.toml"):
        load_recipe(Recipe, tmp_path / "lab.toml")
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(Recipe, tmp_path / "nowhere" / "lab.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(Recipe, tmp_path)
    recipe_file.write_text("[trainer\n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(Recipe, recipe_file)
