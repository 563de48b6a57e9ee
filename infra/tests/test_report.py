import json
import re
import shutil

import pytest

from flywheel_infra import clips
from flywheel_infra.charts import line_chart, smooth, thin
from flywheel_infra.corpora import corpora, mixes, were_demonstrated
from flywheel_infra.ledger import Ledger
from flywheel_infra.report import write_report
from flywheel_infra.run_folder import Rate, evaluations, parameters, titles, trainings
from flywheel_infra.words import duration, size
from flywheel_shared.errors import UserError


@pytest.fixture
def root(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.fixture
def turns(run_of_two_turns, tmp_path):
    return shutil.copytree(run_of_two_turns, tmp_path / "turns")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def page_of(root):
    write_report(root, root / "report.html")
    return (root / "report.html").read_text()


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.S)))


def test_the_page_says_what_the_run_found(root):
    text = text_of(page_of(root))
    for said in [
        "The policy succeeds in 10 of 14 initial states",
        "71%",
        "95% interval 45% to 88%",
        "1 of 14 initial states",
        "64 percentage points worse",
        "initial states that no demonstration used",
        "not comparable with published ones",
        "36 demonstrations, 5,210 frames; 7 failed attempts left out",
        "43: 36 kept, 7 failed",
        "3,000,000",
        "(2 attempts)",
        "4 min 23 s",
        "mujoco 3.17.0",
        "A Processor 9000",
        "trainer.max_steps",
    ]:
        assert said in text, said


def test_the_page_fetches_nothing(root):
    page = page_of(root)
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]*)""", page)
    assert len(addresses) > 28, "videos and sheets lie inside"
    assert [address for address in addresses if not address.startswith("data:")] == []
    assert "<script" not in page
    assert not re.search(r"https?://", re.sub(r'data:[^"]*', "", page))


def test_states_that_demonstrations_used_are_not_called_unseen(root):
    path = root / "corpus" / "libero" / "meta" / "recording.json"
    recording = json.loads(path.read_text())
    recording["record"]["init_states"] = "0-35,49"
    path.write_text(json.dumps(recording))
    assert "no demonstration used" not in page_of(root)
    path.unlink()
    assert "no demonstration used" not in page_of(root), "nor where nothing is known of the demonstrations"


def test_names_from_a_run_cannot_become_markup(root):
    path = root / "eval" / "dreamzero" / "results.json"
    path.write_text(path.read_text().replace("pick up", "<script>alert(1)</script>"))
    page = page_of(root)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("absent", ["eval", "checkpoints", "corpus", "export"])
def test_a_run_without_a_part_still_has_a_page(root, absent):
    shutil.rmtree(root / absent)
    assert "What was done" in page_of(root)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"flywheel\.json"):
        write_report(tmp_path, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_results_file_is_named(root):
    (root / "eval" / "dreamzero" / "results.json").write_text('{"overall": ')
    with pytest.raises(UserError, match=r"eval/dreamzero/results\.json"):
        write_report(root, root / "report.html")


def test_the_sighted_evaluation_comes_first(root):
    assert [run.is_blank for run in evaluations(root, Ledger.load(root))] == [False, True]


def test_a_step_written_twice_counts_once_and_a_cut_line_is_left_out(root):
    path = root / "checkpoints" / "dreamzero" / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 600, "train/loss": 5.0}) + "\n" + '{"step": 601, "tra')
    (training,) = trainings(root, Ledger.load(root))
    assert training.last_step == 600
    assert training.series("train/loss")[-1] == (600, 5.0)
    assert len(training.rows) == 600


def test_parameters_are_counted_from_headers(root):
    assert parameters(root / "export" / "dreamzero") == 1200 * 2500


def test_newcombe_interval_of_a_difference():
    """Newcombe 1998, table II, example (a): 56/70 against 48/80 gives 0.0524 to 0.3339 by method 10."""

    def wilson(successes, n, z=1.959963984540054):
        p = successes / n
        centre, half = p + z * z / 2 / n, z * (p * (1 - p) / n + z * z / 4 / n / n) ** 0.5
        return Rate(successes, n, (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))

    difference, low, high = wilson(56, 70).minus(wilson(48, 80))
    assert difference == pytest.approx(0.2)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)  # as many digits as the paper prints


def test_smoothing_keeps_the_ends_and_the_mean_of_a_line():
    line = [(step, 2.0 * step) for step in range(100)]
    assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])


def test_thinning_keeps_both_ends():
    points = [(step, 0.0) for step in range(1000)]
    kept = thin(points, 100)
    assert (len(kept), kept[0], kept[-1]) == (100, points[0], points[-1])


@pytest.mark.parametrize(
    "values", [[0.5] * 5, [0.0] * 5, [1e-9, 2e-9, 3e-9], [1e4, 1.0, 1e-4], [-1.0, 2.0, 0.0]]
)
def test_a_chart_stays_inside_its_frame(values):
    svg = line_chart([("one", list(enumerate(values))), ("two", list(enumerate(values[:2])))], "a <curve>")
    assert "&lt;curve&gt;" in svg
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", svg):
        assert 0 <= float(x) <= 360
        assert 0 <= float(y) <= 230


def test_durations_and_sizes_are_readable():
    assert [duration(s) for s in (3.14, 48, 425)] == ["3.1 s", "48 s", "7 min 05 s"]
    assert [size(n) for n in (12, 4_300_000, 2**34)] == ["12 bytes", "4.1 MiB", "16 GiB"]


def test_the_page_of_two_turns_says_what_each_found(turns):
    text = text_of(page_of(turns))
    for said in [
        "Success in initial states: cosmos 3 of 14, then 4 of 14; dreamzero 3 of 14, then 6 of 14",
        "Turn 2 does 21 percentage points better than turn 1 (95% interval of the difference: -12 to +50)",
        "Cameras blanked: 1 of 14, 7%",
        "Turn 1, dreamzero 45 episodes Recorded 36 Generated, then labelled 9",
        "Turn 2, dreamzero 57 episodes Recorded 36 Recorded from failures 4 Generated, then labelled 17",
        "PSNR, dB 22.0 20.5 +1.5",
        "SSIM 0.700 0.650 +0.050",
        "Kept 5 Dropped: static 1 Dropped: too far from the corpus 1",
        "Over 600 and 1,200 optimiser steps",
        "record 2 min 51 s · 4.1 MiB 36 demonstrations",
        "train 3 min 20 s · 61 MiB 600 optimiser steps, 1 checkpoint kept (2 attempts) 6 min 40 s · 61 MiB",
        "again – 55 s",
        "What is done once took 2 min 51 s, turn 1 took 15 min 06 s",
        "3 targets",
    ]:
        assert said in text, said


def test_titles_name_what_differs(root, turns):
    assert titles(evaluations(root, Ledger.load(root))) == ["policy with its cameras", "cameras blanked"]
    assert titles(evaluations(turns, Ledger.load(turns)))[2:5] == [
        "dreamzero, turn 1, policy with its cameras",
        "dreamzero, turn 2, policy with its cameras",
        "cosmos, turn 1, cameras blanked",
    ]


def test_turns_that_were_not_asked_for_are_left_out(turns):
    """A run of one turn after one of two: what the second made may be out of date."""
    edit(turns / "flywheel.json", lambda ledger: ledger.update(turns=1))
    text = text_of(page_of(turns))
    assert "cosmos 3 of 14; dreamzero 3 of 14" in text
    for stale in ["Turn 2", "then 6 of 14", "labelled-2", "dreamzero-2", "@2", "1,200"]:
        assert stale not in text, stale


def test_a_name_that_ends_in_a_number_is_no_turn_where_the_run_has_no_such_turn(root):
    (root / "eval" / "dreamzero").rename(root / "eval" / "policy-5")
    (root / "eval" / "dreamzero-blank").rename(root / "eval" / "policy-5-blank")
    assert [(one.policy, one.turn) for one in evaluations(root, Ledger.load(root))] == [("policy-5", 1)] * 2
    assert "The policy succeeds in 10 of 14 initial states" in page_of(root)


def test_two_policies_of_one_turn_stand_side_by_side(turns):
    edit(turns / "flywheel.json", lambda ledger: ledger.update(turns=1))
    page = page_of(turns)
    (cards,) = re.findall(r'<div class="turns">(.*?)<p class="note">', page, flags=re.S)
    assert re.findall(r"<h3>(.*?)</h3>", cards) == ["cosmos", "dreamzero"]


def test_without_word_from_training_a_turn_has_what_was_made_by_then(turns):
    ledger = Ledger.load(turns)
    found = corpora(turns, ledger)
    assert [(mix.model, mix.turn, mix.episodes) for mix in mixes(found, [], ledger.turns)] == [
        (None, 1, {"recorded": 36, "labelled": 9}),
        (None, 2, {"recorded": 36, "targets": 4, "labelled": 17}),
    ]


def test_a_corpus_of_an_unknown_kind_is_named(turns):
    edit(turns / "corpus" / "again-2" / "meta" / "flywheel.json", lambda about: about.update(kind="dreamt"))
    with pytest.raises(
        UserError, match=r"again-2/meta/flywheel\.json: kind: found 'dreamt'; allowed: recorded"
    ):
        write_report(turns, turns / "report.html")


def test_states_demonstrated_for_a_later_turn_count_against_that_turn_alone(turns):
    for name, states in (("labelled-1", "0"), ("labelled-2", "0"), ("again-2", "36-39")):
        recording = {"record": {"tasks": "0", "init_states": states}, "attempts": 4, "kept": 4}
        (turns / "corpus" / name / "meta" / "recording.json").write_text(json.dumps(recording))
    ledger = Ledger.load(turns)
    found = corpora(turns, ledger)
    known = {(one.policy, one.turn): were_demonstrated(found, one) for one in evaluations(turns, ledger)}
    assert known[("dreamzero", 1)] is False
    assert known[("dreamzero", 2)] is True
    (turns / "corpus" / "labelled-1" / "meta" / "recording.json").unlink()
    assert were_demonstrated(found, evaluations(turns, ledger)[0]) is None


def test_a_source_is_found_by_uuid_or_path_and_never_outside_the_run(turns):
    rows = turns / "clips" / "generated-1" / clips.ROWS
    shutil.copy(turns / "clips" / "real" / "videos" / "real-0.mp4", turns.parent / "outside.mp4")
    sources = [
        "real-3",
        "../../real/videos/real-4.mp4",
        "clips/real/videos/real-5.mp4",
        "../../../../outside.mp4",
    ]
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for line, source in zip(lines, [*sources, "no-such", {"clip": 1}], strict=True):
        line["provenance"]["source"] = source
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = {folder.path.name: folder for folder in clips.clip_folders(turns, Ledger.load(turns))}
    found = [clip.real and clip.real.name for clip in folders["generated-1"].clips]
    assert found == ["real-3.mp4", "real-4.mp4", "real-5.mp4", None, None, None]
    assert "real" not in folders


@pytest.mark.parametrize("absent", ["eval", "checkpoints", "corpus", "clips", "targets", "clips/real"])
def test_two_turns_without_a_part_still_have_a_page(turns, absent):
    shutil.rmtree(turns / absent)
    assert "What was done" in page_of(turns)
