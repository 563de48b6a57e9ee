import json
import re
import shutil

import pytest

from flywheel_infra.charts import line_chart, smooth, thin
from flywheel_infra.report import duration, size, write_report
from flywheel_infra.run_folder import Rate, evaluations, parameters, trainings
from flywheel_shared.errors import UserError


@pytest.fixture
def root(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


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
    assert [run.is_blank for run in evaluations(root)] == [False, True]


def test_a_step_written_twice_counts_once_and_a_cut_line_is_left_out(root):
    path = root / "checkpoints" / "dreamzero" / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 600, "train/loss": 5.0}) + "\n" + '{"step": 601, "tra')
    (training,) = trainings(root)
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
    svg = line_chart(list(enumerate(values)), "a <curve>")
    assert "&lt;curve&gt;" in svg
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", svg):
        assert 0 <= float(x) <= 360
        assert 0 <= float(y) <= 230


def test_durations_and_sizes_are_readable():
    assert [duration(s) for s in (3.14, 48, 425)] == ["3.1 s", "48 s", "7 min 05 s"]
    assert [size(n) for n in (12, 4_300_000, 2**34)] == ["12 bytes", "4.1 MiB", "16 GiB"]
