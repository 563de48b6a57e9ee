"""Recipes and options."""

from pathlib import Path

import pytest

from flywheel_shared.errors import UserError
from libero_eval.run_cli import server_uri
from libero_eval.settings import parse_indices, read_recipe

LAPTOP = Path(__file__).parents[1] / "recipes" / "laptop.toml"


def test_indices_keep_their_order():
    assert parse_indices("36-38, 2,0-1") == [36, 37, 38, 2, 0, 1]


@pytest.mark.parametrize("text", ["", "3-1", "1,1", "0-3,2", "-1", "a", "1;2", "1.5"])
def test_what_names_no_indices_is_refused(text):
    with pytest.raises(ValueError, match="found"):
        parse_indices(text)


def test_options_override_the_recipe():
    recipe = read_recipe(LAPTOP, ["run.execute=3"], {"run.init_states": "40", "run.blank_cameras": None})
    assert (recipe.run.execute, recipe.run.init_states, recipe.run.blank_cameras) == (3, "40", False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"run.init_states": "9-3"}, "--init-states: found '9-3'"), ({"run.execute": 0}, "--execute: ")],
)
def test_a_wrong_option_is_named(flags, words):
    with pytest.raises(UserError, match=words):
        read_recipe(LAPTOP, [], flags)


def test_an_override_needs_a_recipe():
    with pytest.raises(UserError, match="--recipe"):
        read_recipe(None, ["run.execute=3"], {})


def test_the_server_is_named_once(tmp_path):
    file = tmp_path / "serve.ready"
    file.write_text("127.0.0.1:4711\n")
    assert server_uri(None, file, 0) == "ws://127.0.0.1:4711"
    assert server_uri("127.0.0.1:8000", None, 0) == "ws://127.0.0.1:8000"
    assert server_uri("ws://policy:8000", None, 0) == "ws://policy:8000"
    for both in ((None, None), ("ws://a:1", file)):
        with pytest.raises(UserError, match="--server-file"):
            server_uri(*both, 0)


def test_an_address_file_that_never_comes_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no host:port"):
        server_uri(None, tmp_path / "absent", 0.3)
