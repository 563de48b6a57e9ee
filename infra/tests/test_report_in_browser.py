"""The page in a real Chromium: what a reader on a phone and on a desk sees."""

import pytest
from playwright.sync_api import sync_playwright

from flywheel_infra.report import write_report

# Without these Chromium looks up hosts of its own at every start.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

TOO_WIDE = """[...document.querySelectorAll('main *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""

# Relative luminance and contrast ratio as WCAG 2 defines them.
CONTRASTS = r"""() => {
  const probe = document.body.appendChild(document.createElement('i'));
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = name => {
    probe.style.color = `var(${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  return ['--ink', '--soft', '--good', '--bad', '--accent'].flatMap(text =>
    ['--page', '--card'].map(back => [text, back, ratio(light(text), light(back))]));
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        yield chromium
        chromium.close()


def page_of(run, folder):
    output = folder / "report.html"
    write_report(run, output)
    return output.as_uri()


@pytest.fixture(scope="module")
def address(finished_run, tmp_path_factory):
    return page_of(finished_run, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def address_of_turns(run_of_two_turns, tmp_path_factory):
    return page_of(run_of_two_turns, tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("run", ["address", "address_of_turns"])
def test_the_page_opens_cleanly_and_fits(request, browser, run, width, scheme):
    address = request.getfixturevalue(run)
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    troubles, requests = [], []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_function(
        "[...document.querySelectorAll('section > .videos video, .pair video')].every(v => v.readyState >= 1)"
    )
    assert troubles == []
    assert [url for url in requests if not url.startswith(("data:", "file:"))] == []
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) == []
    page.close()


def test_videos_curves_and_pictures_are_there(browser, address):
    page = browser.new_page()
    page.goto(address)
    assert page.locator("h1").inner_text() == "The policy succeeds in 10 of 14 initial states"
    assert page.locator("h2").all_inner_texts() == ["Rollouts", "Learning", "What was done", "Particulars"]
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.wait_for_function("[...document.querySelectorAll('video')].every(v => v.readyState >= 1)")
    durations = page.evaluate("[...document.querySelectorAll('video')].map(v => v.duration)")
    assert len(durations) == 28
    assert min(durations) > 0.5
    assert page.evaluate(
        "[...document.querySelectorAll('video')].every(v => v.muted && v.playsInline && v.controls)"
    )
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    curves = page.evaluate("[...document.querySelectorAll('.chart .mean')].map(c => c.getTotalLength())")
    assert len(curves) == 3
    assert min(curves) > 100
    page.close()


def test_turns_stand_side_by_side_on_a_phone(browser, address_of_turns):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address_of_turns)
    headings = page.locator("h2").all_inner_texts()
    assert headings == [
        "Data", "Rollouts", "Generated clips", "Learning: cosmos", "Learning: dreamzero", "Learning: vision-sft",
        "What was done", "Particulars",
    ]  # fmt: skip
    for row in page.locator(".turns").all():
        one, two = (card.bounding_box() for card in row.locator("> .card").all())
        assert one["y"] == two["y"]
        assert one["x"] + one["width"] < two["x"]
    cells = page.locator(".turn-steps tr", has_text="cosmos-policy").locator("td[data-turn]").all()
    one, two = (cell.bounding_box() for cell in cells)
    assert one["y"] == two["y"]
    assert one["x"] + one["width"] < two["x"]
    page.close()


def test_both_turns_have_a_curve_of_their_own_in_each_chart(browser, address_of_turns):
    page = browser.new_page()
    page.goto(address_of_turns)
    strokes = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.mean')]"
        ".map(m => getComputedStyle(m).stroke))"
    )
    assert len(strokes) == 9
    assert all(len(set(colours)) == 2 for colours in strokes)
    page.close()


def test_generated_clips_play_beside_the_real_ones(browser, address_of_turns):
    page = browser.new_page()
    page.goto(address_of_turns)
    ready = "[...document.querySelectorAll('.pair video')].every(v => v.readyState >= 1)"
    page.wait_for_function(ready)
    durations = page.evaluate(
        "[...document.querySelectorAll('.pair')].map(p => [...p.querySelectorAll('video')].map(v => v.duration))"
    )
    assert durations == [[1, 2]] * 8, "the fixture's real clips last 1 s, its generated ones 2 s"
    page.close()


def test_text_has_contrast_in_both_schemes(browser, address):
    """WCAG AA: 4.5 to 1 for the soft text on the page and on a card."""
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        ratios = page.evaluate(CONTRASTS)
        assert [ratio for ratio in ratios if ratio[2] < 4.5] == []
        page.close()
