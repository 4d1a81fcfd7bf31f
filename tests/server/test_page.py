"""The page in a real browser: `pytest -m browser`, where chromium and its driver are installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from launch.server.page import page
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

WAIT_S = 20
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_the_page_asks_nobody_but_this_server() -> None:
    text = page().text
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text)
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
    policy = page().headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@contextmanager
def served_engine(engine: FakeEngine, **options: Any) -> Iterator[str]:
    """The server in a thread with its own loop, since the browser is driven synchronously."""
    ready, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def main() -> None:
        async with serving(engine, **options) as served:
            urls.append(served.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield urls[0]
    finally:
        stop.set()
        thread.join(WAIT_S)


@contextmanager
def browser(width: int, height: int, downloads: Path, *, dark: bool = False) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium") or shutil.which("google-chrome"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
    finally:
        driver.quit()


def text_of(driver: Any, identity: str) -> str:
    return str(driver.find_element(By.ID, identity).text)


def until(driver: Any, holds: Any) -> None:
    WebDriverWait(driver, WAIT_S, poll_frequency=0.05).until(lambda _: holds())


def send(driver: Any, text: str) -> None:
    driver.find_element(By.ID, "say").send_keys(text)
    driver.find_element(By.ID, "send").click()


@pytest.mark.browser
def test_a_server_that_is_gone_is_said(tmp_path: Path) -> None:
    with browser(1280, 900, tmp_path) as driver:
        with served_engine(FakeEngine()) as url:
            driver.get(url)
            until(driver, lambda: text_of(driver, "state") == "ready")
        until(driver, lambda: text_of(driver, "state") == "no answer from the server")
        assert driver.get_log("browser")  # the browser's own words for it


@pytest.mark.browser
def test_figures_appear_and_the_heat_map_has_the_residents(tmp_path: Path) -> None:
    with served_engine(FakeEngine()) as url, browser(1280, 900, tmp_path) as driver:
        driver.get(url)
        until(driver, lambda: text_of(driver, "state") == "ready")
        assert text_of(driver, "model").startswith("mini")
        label = driver.find_element(By.ID, "heat").get_attribute("aria-label")
        assert label == "3 of 64 experts in memory, 8 layers by 8"
        hosts = driver.execute_script(
            "return performance.getEntriesByType('resource').map(e => new URL(e.name).host)"
        )
        assert set(hosts) == {url.removeprefix("http://")}


@pytest.mark.browser
def test_a_chat_streams_as_text_and_never_as_markup(tmp_path: Path) -> None:
    engine = FakeEngine(f"think{EVIL}</think>Fine 🌍 {EVIL}\n```html\n{EVIL}\n```")
    with served_engine(engine) as url, browser(1280, 900, tmp_path) as driver:
        driver.get(url)
        until(driver, lambda: text_of(driver, "model"))
        driver.find_element(By.ID, "think").click()
        send(driver, f"me {EVIL}")
        until(driver, lambda: " tokens in " in text_of(driver, "log"))
        shown = text_of(driver, "log")
        assert f"me {EVIL}" in shown and f"Fine 🌍 {EVIL}" in shown
        assert driver.title == "Headrace"
        assert not driver.find_elements(By.CSS_SELECTOR, "#log img, #log script")
        assert driver.find_element(By.CSS_SELECTOR, "#log pre").text == EVIL
        send(driver, "again")
        until(driver, lambda: text_of(driver, "log").count(" tokens in ") == 2)
        # The second question went out with the first answer, without its reasoning.
        assert len(engine.requests[1].prompt) > len(engine.requests[0].prompt)


@pytest.mark.browser
def test_stop_ends_the_answer_and_what_came_stays(tmp_path: Path) -> None:
    engine = FakeEngine("abc" * 30)
    engine.hold_from = 3
    with served_engine(engine) as url, browser(1280, 900, tmp_path) as driver:
        driver.get(url)
        until(driver, lambda: text_of(driver, "model"))
        send(driver, "go")
        until(driver, lambda: "abc" in text_of(driver, "log"))
        assert text_of(driver, "send") == "Stop"
        driver.find_element(By.ID, "send").click()
        until(driver, lambda: engine.cancelled == 1)
        until(driver, lambda: text_of(driver, "send") == "Send")
        assert "abc" in text_of(driver, "log")


@pytest.mark.browser
def test_a_trace_is_downloaded(tmp_path: Path) -> None:
    engine = FakeEngine("xyz")
    with served_engine(engine) as url, browser(1280, 900, tmp_path) as driver:
        driver.get(url)
        until(driver, lambda: text_of(driver, "model"))
        tokens = driver.find_element(By.ID, "trace-tokens")
        tokens.clear()
        tokens.send_keys("2")
        driver.find_element(By.ID, "trace-go").click()
        until(driver, lambda: engine.tracing)
        send(driver, "go")
        until(driver, lambda: (tmp_path / "headrace-trace.json").exists())
        assert (tmp_path / "headrace-trace.json").read_text() == '{"traceEvents": []}'


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_everything_without_scrolling_sideways(tmp_path: Path, dark: bool) -> None:
    with (
        served_engine(FakeEngine("w" * 300)) as url,
        browser(360, 740, tmp_path, dark=dark) as driver,
    ):
        driver.get(url)
        until(driver, lambda: text_of(driver, "state") == "ready")
        send(driver, "long")
        until(driver, lambda: " tokens in " in text_of(driver, "log"))
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark


@pytest.mark.browser
def test_the_page_asks_for_the_key_and_uses_it(tmp_path: Path) -> None:
    with (
        served_engine(FakeEngine(), api_key="secret") as url,
        browser(1280, 900, tmp_path) as driver,
    ):
        driver.get(url)
        until(driver, lambda: driver.find_element(By.ID, "key").is_displayed())
        driver.find_element(By.ID, "key").send_keys("secret")
        driver.find_element(By.CSS_SELECTOR, "#key-form button").click()
        until(driver, lambda: text_of(driver, "state") == "ready")
        assert not driver.find_element(By.ID, "key").is_displayed()
        # A refused request is an error in the browser's own log; that one was expected.
        driver.get_log("browser")
