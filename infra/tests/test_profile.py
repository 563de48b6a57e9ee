import pytest

from flywheel_infra.profile import PROFILES, Profile, digests, load_profile
from flywheel_shared.errors import UserError

STEP = '[[steps]]\nname = "{name}"\nstage = "infra"\nargv = ["python", "{root}"]\n'
SERVER = '[[steps]]\nname = "a"\nstage = "infra"\nargv = ["x"]\nkind = "serve"\nready_file = "r"\nturns = "TURNS"\n'


def write(tmp_path, text):
    path = tmp_path / "p.toml"
    path.write_text('description = "test"\n' + text)
    return load_profile(str(path))


def step(name, more=""):
    return STEP.replace("{name}", name) + more


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_is_valid_and_its_recipes_exist(path):
    assert digests(load_profile(path.stem).unrolled(1))


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
        (step("a").replace("infra", "no-such-stage"), "stage 'no-such-stage' does not exist; there are: "),
        (step("a", 'outputs = ["x-{trun}"]\n'), "unknown placeholder {trun}"),
        (step("a", 'turns = "second"\n'), "steps.0.turns"),
        (step("a", 'turns = "first"\n') + step("a"), "two steps are named a"),
        (step("a", 'needs = ["b@previous"]\n'), "step a needs b@previous"),
        (step("a", 'turns = "first"\n') + step("b", 'needs = ["a@previous"]\n'), "say a"),
        (step("a", 'turns = "last"\n') + step("b", 'needs = ["a"]\n'), "in the last turn alone"),
        (SERVER.replace("TURNS", "later") + step("b", 'server = "a"\n'), "does not run in the first turn"),
        (SERVER.replace("TURNS", "all") + step("b", 'server = "a@previous"\n'), "not of kind serve"),
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
    before = digests(write(tmp_path, text).unrolled(1))
    changed = text.replace('"python", "{root}"', '"python", "-v", "{root}"', 1)
    after = digests(write(tmp_path, changed).unrolled(1))
    assert [name for name in before if before[name] != after[name]] == ["a", "c", "d"]


def test_a_recipe_counts_by_content_and_by_the_tables_that_are_read(tmp_path):
    recipe = tmp_path / "r.toml"
    step = {"name": "a", "stage": "infra", "argv": ["x"], "recipe": str(recipe), "recipe_tables": ["record"]}
    profile = Profile.model_validate({"description": "", "steps": [step]}, strict=False)

    def digest(content):
        recipe.write_text(content)
        return digests(profile.unrolled(1))["a"]

    plain = digest("[record]\nepisodes = 10\n")
    assert digest("# a comment\n[record]\nepisodes = 10\n[run]\nworkers = 2\n") == plain
    assert digest("[record]\nepisodes = 11\n") != plain


LOOP = (
    step("record", 'turns = "first"\noutputs = ["corpus/real"]\n')
    + step("train", 'turns = "first"\nneeds = ["record"]\noutputs = ["checkpoints/a-{turn}"]\n')
    + '[[steps]]\nname = "train"\nstage = "infra"\nargv = ["python", "--from", "checkpoints/a-{previous}"]\n'
    + 'turns = "later"\nneeds = ["record", "train@previous", "targets@previous"]\n'
    + 'outputs = ["checkpoints/a-{turn}"]\n'
    + step("targets", 'needs = ["train"]\noutputs = ["targets/{turn}.jsonl"]\n')
    + step("report", 'turns = "last"\nneeds = ["record", "targets"]\noutputs = ["report.html"]\n')
)


def test_each_turn_has_its_steps_its_outputs_and_its_needs(tmp_path):
    steps = write(tmp_path, LOOP).unrolled(3)
    assert [(step.name, *step.outputs, *step.needs) for step in steps] == [
        ("record", "corpus/real"),
        ("train", "checkpoints/a-1", "record"),
        ("targets", "targets/1.jsonl", "train"),
        ("train@2", "checkpoints/a-2", "record", "train", "targets"),
        ("targets@2", "targets/2.jsonl", "train@2"),
        ("train@3", "checkpoints/a-3", "record", "train@2", "targets@2"),
        ("targets@3", "targets/3.jsonl", "train@3"),
        ("report", "report.html", "record", "targets@3"),
    ]
    assert steps[5].argv == ["python", "--from", "checkpoints/a-2"]


def test_needs_of_steps_that_the_first_turn_lacks_are_left_out_there(tmp_path):
    text = step("label", 'turns = "later"\noutputs = ["l-{turn}"]\n')
    text += step("train", 'needs = ["label", "train@previous"]\noutputs = ["t-{turn}"]\n')
    needs = {step.name: step.needs for step in write(tmp_path, text).unrolled(2)}
    assert needs == {"train": (), "label@2": (), "train@2": ("label@2", "train")}


def test_more_turns_change_no_digest_of_those_before(tmp_path):
    profile = write(tmp_path, LOOP)
    one, two, three = (digests(profile.unrolled(turns)) for turns in (1, 2, 3))
    for name in ("record", "train", "targets"):
        assert one[name] == two[name] == three[name]
    assert two["train@2"] == three["train@2"] != two["train"]
    assert len({one["report"], two["report"], three["report"]}) == 3, "it tells of all turns"


def test_a_change_in_the_first_turn_reaches_the_later_ones_through_what_they_need(tmp_path):
    before = digests(write(tmp_path, LOOP + step("z", 'outputs = ["z{turn}"]\n')).unrolled(2))
    changed = LOOP.replace('turns = "first"\nneeds = ["record"]', 'turns = "first"\nneeds = []')
    after = digests(write(tmp_path, changed + step("z", 'outputs = ["z{turn}"]\n')).unrolled(2))
    assert [name for name in before if before[name] != after[name]] == [
        "train", "targets", "train@2", "targets@2", "report"
    ]  # fmt: skip


def test_turns_that_would_overwrite_each_other_are_refused(tmp_path):
    profile = write(tmp_path, step("a", 'outputs = ["corpus/x"]\n'))
    assert [one.name for one in profile.unrolled(1)] == ["a"], "one turn overwrites nothing"
    with pytest.raises(UserError, match=r"step a: every turn would make the same corpus/x; put \{turn\}"):
        profile.unrolled(2)
    profile = write(
        tmp_path, step("a", 'outputs = ["x-2"]\nturns = "first"\n') + step("b", 'outputs = ["x-{turn}"]\n')
    )
    with pytest.raises(UserError, match="steps a and b@2 both make x-2"):
        profile.unrolled(2)
