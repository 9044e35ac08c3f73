"""A real headless Chromium for the dashboard's tests.

with Browser() as browser, browser.page(url, scheme="dark", width=360) as page:
    page.page.get_by_role("button", name="Sleep m").click()
    assert page.problems == []
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import needs
from waiting import wait_until

_PALE = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return rgb(getComputedStyle(document.body).backgroundColor);
  };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    const isText = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!isText && !e.matches("input[type=text]") || !e.checkVisibility()) continue;
    const style = getComputedStyle(e);
    const colour = rgb(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(colour), luminance(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(`${e.tagName} ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
_UNNAMED = """() => [...document.querySelectorAll("button, input, a, [tabindex='0']")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
  .map((e) => e.outerHTML)"""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS = 300_000
"""A guard, as `waiting.DEADLINE_S`."""

Scheme = Literal["light", "dark"]


def expect(locator: Any) -> Any:
    """playwright's assertions: they wait until they are true, long, as the machine is shared."""
    from playwright.sync_api import expect as playwright_expect

    playwright_expect.set_options(timeout=TIMEOUT_MS)
    return playwright_expect(locator)


class Shown:
    """A page that is open, with what it complained of and where it asked."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        """Errors of scripts, and of the console (refused styles and scripts are such) except those
        that only say that an answer's status was 4xx."""
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._console)
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def _request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if f"{parts.scheme}://{parts.netloc}" != self.url:
            self.problems.append(f"asked elsewhere: {request.url}")
        self.asked.append((request.method, parts.path))

    def wait_until(self, script: str, argument: Any = None) -> None:
        """Wait until an expression of the page is true. The page's policy has no eval, so it is
        asked from outside."""
        wait_until(lambda: self.page.evaluate(script, argument))

    def row(self, model: str) -> Any:
        """A model's row."""
        return self.page.locator("#rows > tr").filter(
            has=self.page.locator(".name").get_by_text(model, exact=True)
        )

    def has_overflow(self) -> bool:
        """Whether it can be scrolled sideways."""
        return bool(
            self.page.evaluate(
                "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"
            )
        )

    def pale(self) -> list[str]:
        """Texts whose contrast to their ground is below 4.5."""
        return list(self.page.evaluate(_PALE))

    def unnamed(self) -> list[str]:
        """Controls that have no name for those who do not see them."""
        return list(self.page.evaluate(_UNNAMED))

    def picture(self, path: Path) -> None:
        """A screenshot of all of it."""
        self.page.screenshot(path=path, full_page=True)


class Browser:
    """One Chromium; each page has a profile of its own."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=needs.find_chromium(), headless=True, args=ARGUMENTS
        )

    @contextmanager
    def page(
        self,
        url: str,
        *,
        scheme: Scheme = "light",
        width: int = 1400,
        height: int = 900,
        is_phone: bool = False,
        before: str = "",
    ) -> Iterator[Shown]:
        """Open the dashboard; `before` is a script that runs ahead of the page's own."""
        context = self._browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            has_touch=is_phone,
            is_mobile=is_phone,
            device_scale_factor=2 if is_phone else 1,
            reduced_motion="reduce",
        )
        try:
            context.set_default_timeout(TIMEOUT_MS)
            if before:
                context.add_init_script(before)
            shown = Shown(context.new_page(), url)
            shown.page.goto(url + "/")
            yield shown
        finally:
            context.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._playwright.stop()
