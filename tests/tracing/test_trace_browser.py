"""The trace page in a browser: keys, clicks, narrow screens, dark mode, long answers, no network.

Skipped where there is no Chromium with its ChromeDriver.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trace_scenes import made_up_trace, page_of

from eagle_dropmatch.tracing.trace import AnswerTrace

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None, reason="needs chromium and chromedriver"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: Generous: on two busy cores these took 0.3 s and 34 ms.
OPEN_SECONDS, STEP_SECONDS = 10.0, 0.25


class Browser:
    """One Chromium; every page is a fresh load."""

    def __init__(self, profile: Path, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(CHROMEDRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.folder = folder

    def open(self, *traces: AnswerTrace, width: int = 1280, place: str = "") -> None:
        self.resize(width)
        file = self.folder / "page.html"
        file.write_text(page_of(*traces), encoding="utf-8")
        self.driver.get("about:blank")
        self.logged("browser")
        self.logged("performance")
        self.driver.get(file.as_uri() + place)

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def logged(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.get_log(kind)
        return found

    def requested(self) -> list[str]:
        """Everything that was asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.logged("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
            selector,
        )
        return found

    @property
    def steps(self) -> list[int]:
        """The step that each column shows."""
        found: list[int] = self.run(
            "return [...document.querySelectorAll('.moves input')].map((e) => Number(e.value))"
        )
        return found

    @property
    def place(self) -> str:
        return str(self.run("return location.hash"))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"), tmp_path_factory.mktemp("pages"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Also: no page may log an error, nor ask for anything but itself."""
    chromium.prefer("light")
    yield chromium
    assert [entry for entry in chromium.logged("browser") if entry["level"] == "SEVERE"] == []
    requested = chromium.requested()
    assert requested
    assert all(url.startswith("file:") and "/page.html" in url for url in requested)


KEYS = webdriver.Keys
TRACE = made_up_trace(9, 8)  # of three tokens a step; relaxed ones in steps 1, 4 and 7


def test_a_page_opens_at_the_first_step(browser: Browser) -> None:
    browser.open(TRACE)
    assert browser.steps == [1]
    assert "rule 0" in browser.texts("h2 code")
    assert "".join(browser.texts("a.token")) == bytes(TRACE.tokens).decode()
    assert len(browser.texts(".tree tbody tr")) == 9  # eight nodes and the bonus
    assert "2 of 7 drafted tokens kept; exact acceptance would have kept 1." in "".join(
        browser.texts(".told")
    )
    # Its relaxed token is what is looked at.
    assert browser.place == "#a=1.2"
    why = " ".join(browser.texts(".why"))
    assert "kept, relaxed" in why
    assert "the target says" in why
    assert "p(x)" in why
    assert "head 1" in why


def test_keys_step_through_the_answer(browser: Browser) -> None:
    browser.open(TRACE)
    seen = []
    for key in (KEYS.ARROW_RIGHT, "j", "k", KEYS.END, KEYS.ARROW_RIGHT, KEYS.ARROW_LEFT, KEYS.HOME):
        browser.press(key)
        seen += browser.steps
    assert seen == [2, 3, 2, 9, 9, 8, 1]
    places = []
    for key in ("n", "n", "n", "p", "p", "p"):
        browser.press(key)
        places.append(browser.place)
    assert places == ["#a=4.2", "#a=7.2", "#a=7.2", "#a=4.2", "#a=1.2", "#a=1.2"]


def test_a_question_mark_shows_the_keys_and_escape_closes_them(browser: Browser) -> None:
    browser.open(TRACE)
    browser.press("?")
    assert browser.run("return document.getElementById('help').open")
    browser.press("j")
    assert browser.steps == [1]
    browser.press(KEYS.ESCAPE)
    assert not browser.run("return document.getElementById('help').open")


def test_a_click_on_a_token_goes_to_its_step_and_node(browser: Browser) -> None:
    browser.open(TRACE)
    tokens = browser.driver.find_elements("css selector", "a.token")
    tokens[14].click()  # the second token of step 5, which its path holds
    assert browser.place == "#a=5.2"
    assert browser.texts("tr.picked .chip")[0] == "kept"
    tokens[15].click()
    assert browser.place == f"#a=5.{len(TRACE.steps[4].tokens)}"
    assert browser.texts("tr.picked .chip") == ["bonus"]
    tokens[0].click()
    assert browser.place == "#a=1.0"


def test_the_tree_is_walked_without_a_mouse(browser: Browser) -> None:
    browser.open(TRACE)
    for _ in range(30):
        browser.press(KEYS.TAB)
        if browser.run("return document.activeElement.closest('tbody') !== null"):
            break
    before = browser.texts("tr.picked")
    browser.press(KEYS.ARROW_DOWN)
    assert browser.texts("tr.picked") != before
    assert browser.run("return document.activeElement.closest('tr.picked') !== null")
    browser.press(KEYS.ARROW_UP)
    assert browser.texts("tr.picked") == before
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.run(outline) == "solid"


def test_everything_that_can_be_pressed_has_a_name(browser: Browser) -> None:
    browser.open(TRACE, TRACE)
    names = browser.run(
        "return [...document.querySelectorAll('button, input, [role=group], nav, section')].map("
        "(e) => e.ariaLabel || e.textContent.trim() || e.closest('label')?.textContent || '')"
    )
    assert len(names) > 20
    assert all(names)


def test_the_address_keeps_the_place(browser: Browser) -> None:
    browser.open(TRACE, place="#a=6.4")
    assert (browser.steps, browser.place) == ([6], "#a=6.4")
    browser.driver.refresh()
    assert (browser.steps, browser.place) == ([6], "#a=6.4")
    browser.run("location.hash = '#a=99.99'")
    assert browser.steps == [9]


def two_answers() -> tuple[AnswerTrace, AnswerTrace]:
    first, second = made_up_trace(9, 8), made_up_trace(12, 6, relaxed=2)
    for trace in (first, second):
        second.tokens[10] = first.tokens[10] + 1
        assert len(trace.tokens) > 20
    return first, second


def test_two_rules_stand_side_by_side_and_part_at_one_height(browser: Browser) -> None:
    browser.open(*two_answers())
    boxes = (
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect())"
    )
    left, right = browser.run(boxes, ".trace")
    assert left["right"] <= right["left"]
    marks = browser.run(boxes, ".parting")
    assert len(marks) == 2
    assert marks[0]["top"] == marks[1]["top"]
    answers = browser.run(boxes, ".tree")
    assert answers[0]["top"] == answers[1]["top"]
    shared = "return [...document.querySelectorAll('.parting')].map((e) => { let n = 0; "
    shared += "while ((e = e.previousElementSibling)) n++; return n; })"
    assert browser.run(shared) == [10, 10]
    browser.resize(390)
    above, below = browser.run(boxes, ".trace")
    assert above["bottom"] <= below["top"]


def test_two_rules_step_together_or_each_alone(browser: Browser) -> None:
    browser.open(*two_answers())
    browser.press("j", "j")
    assert browser.steps == [3, 3]
    browser.press("t", "j")
    assert browser.steps == [4, 3]
    browser.press("x", "j", "j", "j")
    assert browser.steps == [4, 6]
    assert browser.place.endswith("on=b")
    browser.driver.refresh()
    assert browser.steps == [4, 6]
    browser.press("j")  # together again, and the other rule's keys
    assert browser.steps == [7, 7]


@pytest.mark.parametrize("count", [1, 2])
def test_a_phone_of_360_px_never_scrolls_the_page_sideways(browser: Browser, count: int) -> None:
    deep = made_up_trace(3, 40, text=b"averyveryverylongwordwithoutanyspace")
    browser.open(*[deep] * count, width=360)
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    browser.press("?")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    browser.press(KEYS.ESCAPE)


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", WCAG's."""
    parts = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable_and_tell_kinds_apart_without_colour(
    browser: Browser, scheme: str
) -> None:
    browser.prefer(scheme)
    browser.open(TRACE)

    def style(selector: str, name: str) -> str:
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        return str(browser.run(script, selector, name))

    paper, ink = (luminance(style("body", name)) for name in ("backgroundColor", "color"))
    assert (paper > ink) == (scheme == "light")
    grounds = [
        luminance(style(f".legend .{kind}", "backgroundColor")) for kind in ("exact", "relaxed")
    ]
    for ground in (paper, *grounds):
        bright, dim = max(ground, ink), min(ground, ink)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5
    kinds = ("exact", "relaxed", "bonus")
    lines = {style(f".legend .{kind}", "textDecorationStyle") for kind in kinds}
    assert lines == {"solid", "wavy", "dotted"}


def test_what_a_model_writes_is_text(browser: Browser) -> None:
    said = b"</script><img src=x onerror=alert(1)>"
    browser.open(made_up_trace(13, 4, text=said))
    assert browser.run("return document.images.length") == 0
    assert "".join(browser.texts("a.token")).startswith(said.decode())


def test_a_thousand_steps_of_sixty_nodes_open_and_step_fast(browser: Browser) -> None:
    browser.open(made_up_trace(1000, 60))
    opened = browser.run("return performance.getEntriesByType('navigation')[0].domComplete") / 1000
    assert opened < OPEN_SECONDS
    assert len(browser.texts(".tree tbody tr")) == 61
    script = """
      const began = performance.now();
      for (let i = 0; i < 50; i++) {
        document.querySelector('[data-go=on]').click();
        document.body.offsetHeight;
      }
      return (performance.now() - began) / 50000;
    """
    step = browser.run(script)
    assert browser.steps == [51]
    assert step < STEP_SECONDS
    print(f"opened in {opened:.2f} s, a step in {1000 * step:.1f} ms")
