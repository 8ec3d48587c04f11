"""The server's page in a real browser: Chromium, by Playwright (`pip install playwright`; a chromium on the PATH).
Skipped where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_la.inference import generate
from ring_la.testing.processes import free_port
from tests.serving.test_load import hybrid
from tests.serving.test_serve import PROMPT, port_of, start

pytest.importorskip("fastapi")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.distributed,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]
KEY = "the-key"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Two ranks that serve a small model."""
    model = hybrid()
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    port = free_port()
    options = ["--port", "0", "--name", "demo", "--piece", "5", "--request-log", "off", "--api-key", KEY]
    ranks = [start(r, port, str(tmp_path), *options) for r in range(2)]
    try:
        yield f"http://127.0.0.1:{port_of(ranks[0].stdout.readline())}/"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    """The page, opened; what its scripts complain of fails the test."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.set_default_timeout(20_000)
        playwright.expect.set_options(timeout=20_000)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
    assert wrong == []


def sent(page: Any) -> str:
    """The answer after "Send", once it has ended and its picture is there."""
    page.click("#send")
    expect()(page.locator("#stop")).to_be_disabled()  # "Send" is not, then
    expect()(page.locator("#send")).to_be_enabled()
    return page.inner_text("#answer")


def expect() -> Any:
    return pytest.importorskip("playwright.sync_api").expect


def test_a_prompt_a_chat_and_a_picture(page):
    """Without the key it says so; with it the answer is the model's, and each rank's share is drawn."""
    page.fill("#prompt", PROMPT)
    page.fill("#tokens", "6")
    page.fill("#temperature", "0")
    assert "API key" in sent(page)
    page.fill("#key", KEY)
    said = sent(page)
    expect()(page.locator("#model")).to_have_text("demo")
    want = bytes(generate(hybrid(), torch.tensor([list(PROMPT.encode())]), 6)[0].tolist()).decode(errors="replace")
    assert (page.locator("#answer > span").last.text_content(), said.startswith(PROMPT)) == (want, True)
    figures = page.inner_text("#figures")
    assert f"{len(PROMPT)} tokens of the prompt" in figures
    assert "6 tokens" in figures
    drawn = page.locator("#shares text").all_text_contents()
    assert [text for text in drawn if text.startswith("rank")] == ["rank 0", "rank 1"]
    assert "read 20, holds 14" in drawn  # of 28 tokens half each, and the 6 that both decode
    page.select_option("#kind", "chat")
    assert page.inner_text("#answer") == ""
    sent(page)
    turn = sent(page)
    assert turn.count(PROMPT) == 2  # one behind the other
    assert page.is_visible("#clear")
    page.click("#clear")
    assert page.inner_text("#answer") == ""


def test_stop_ends_an_answer(page):
    page.fill("#key", KEY)
    page.fill("#prompt", PROMPT)
    page.fill("#tokens", "100000")
    page.click("#send")
    expect()(page.locator("#figures")).to_contain_text("a second")
    page.click("#stop")
    expect()(page.locator("#send")).to_be_enabled()
    expect()(page.locator("#answer")).to_contain_text("(stopped)")
    expect()(page.locator("#state")).to_contain_text("ok: 0 under way")
