import pytest

from flywheel_infra.profile import PROFILES, Profile, load_profile
from flywheel_shared.errors import UserError

STEP = '[[steps]]\nname = "{name}"\nstage = "infra"\nargv = ["python", "{root}"]\n'


def write(tmp_path, text):
    path = tmp_path / "p.toml"
    path.write_text('description = "test"\n' + text)
    return load_profile(str(path))


def step(name, more=""):
    return STEP.replace("{name}", name) + more


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_is_valid_and_its_recipes_exist(path):
    assert load_profile(path.stem).digests()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (step("a", "colour = 1\n"), "steps.0.colour"),
        (step("a") + step("a"), "two steps are named a"),
        (step("a", 'needs = ["b"]\n'), "step a needs b"),
        (step("a") + step("b", 'server = "a"\n'), "not of kind serve"),
        (step("a", 'kind = "serve"\n'), "ready_file"),
        (step("a", 'outputs = ["../x"]\n'), "under the root"),
        (step("Not A Name"), "steps.0.name"),
    ],
)
def test_a_mistake_in_a_profile_is_named(tmp_path, text, said):
    with pytest.raises(UserError, match=r"p\.toml") as caught:
        write(tmp_path, text)
    assert said in str(caught.value)


def test_an_unknown_profile_names_those_that_exist():
    with pytest.raises(UserError, match="laptop"):
        load_profile("no-such-profile")


def test_a_change_reaches_the_steps_that_need_it_and_no_others(tmp_path):
    text = step("a") + step("b") + step("c", 'needs = ["a"]\n') + step("d", 'needs = ["c"]\n')
    before = write(tmp_path, text).digests()
    after = write(tmp_path, text.replace('"python", "{root}"', '"python", "-v", "{root}"', 1)).digests()
    assert [name for name in before if before[name] != after[name]] == ["a", "c", "d"]


def test_a_recipe_counts_by_content_and_by_the_tables_that_are_read(tmp_path):
    recipe = tmp_path / "r.toml"
    step = {"name": "a", "stage": "infra", "argv": ["x"], "recipe": str(recipe), "recipe_tables": ["record"]}
    profile = Profile.model_validate({"description": "", "steps": [step]}, strict=False)

    def digest(content):
        recipe.write_text(content)
        return profile.digests()["a"]

    plain = digest("[record]\nepisodes = 10\n")
    assert digest("# a comment\n[record]\nepisodes = 10\n[run]\nworkers = 2\n") == plain
    assert digest("[record]\nepisodes = 11\n") != plain
