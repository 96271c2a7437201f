"""Chromium, and pages that fail their test after a console error, a page error, or a request to another origin.

Playwright drives the Chromium of the system. Without it these tests are skipped with a reason; under CI=true a missing
browser is an error.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOCAL_SCHEMES = ("data", "blob", "file", "about")


def problem():
    """Why no browser can be driven; "" if one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    if not any(map(shutil.which, BROWSERS)):
        return f"none of {', '.join(BROWSERS)} is installed"
    return ""


@pytest.fixture(scope="session")
def browser():
    if reason := problem():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a browser: {reason}")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield launched
        launched.close()


class Watch:
    """What must not happen in a page. A test that provokes something names a part of its text in `expected`."""

    def __init__(self):
        self.problems: list[str] = []
        self.expected: list[str] = []
        self.origins: set[str] = set()

    @property
    def unexpected(self) -> list[str]:
        return [problem for problem in self.problems if not any(part in problem for part in self.expected)]

    def add(self, page):
        page.on("console", lambda message: message.type == "error" and self.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self.check(request.url))
        return page

    def check(self, url):
        parts = urlsplit(url)
        if parts.scheme not in LOCAL_SCHEMES and f"{parts.scheme}://{parts.netloc}" not in self.origins:
            self.problems.append(f"a request to {url}")


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    assert not watch.unexpected


@pytest.fixture
def new_page(browser, watch):
    """new_page(url): a watched page in a context of its own. Options are those of Playwright's new_context."""
    contexts = []

    def new_page(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = watch.add(context.new_page())
        parts = urlsplit(url)
        if parts.scheme == "http":
            watch.origins.add(f"http://{parts.netloc}")
        page.goto(url)
        return page

    yield new_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def wait_for():
    """wait_for(page, expression): its value, as soon as it is truthy. The page's policy forbids wait_for_function."""

    def wait_for(page, expression, seconds=60.0):
        end = time.monotonic() + seconds
        while not (value := evaluate(page, expression)):
            text = page.inner_text("body")[:500]
            assert time.monotonic() < end, f"{expression} is {value!r}; the page shows {text!r}"
            page.wait_for_timeout(20)
        return value

    return wait_for


def evaluate(page, expression):
    """None while the page is being replaced by another one."""
    from playwright.sync_api import Error

    try:
        return page.evaluate(expression)
    except Error as error:
        if "context was destroyed" in str(error):
            return None
        raise


@pytest.fixture(scope="session")
def ask_engine():
    """ask_engine(page, call, expression): `expression` of the answer to an engine's call on the viewer's input.

    The viewer itself uses the engine, and a newer call of its own makes an older one resolve with null.
    """

    def ask_engine(page, call, expression):
        code = f"""async () => {{
          const viewer = document.getElementById("clearhead").viewer;
          const [engine, pixels] = [viewer.engine, viewer.session.input.pixels];
          const noEdits = {{ heads: [], hiddenPatches: [], maskedPatches: [], beta: null }};
          for (;;) {{
            const answer = await engine.{call};
            if (answer) return {expression};
          }}
        }}"""
        return page.evaluate(code)

    return ask_engine


@pytest.fixture(scope="session")
def viewer_result(wait_for):
    """viewer_result(page): the logits of the first pass that the viewer shows."""

    def viewer_result(page):
        return wait_for(page, "Array.from(document.getElementById('clearhead').viewer?.result?.logits ?? [])")

    return viewer_result


@contextmanager
def served(folder, *arguments):
    """The opening link of `clearhead open`, which runs in a folder."""
    command = [sys.executable, "-m", "clearhead", "open", *arguments, "--no-browser"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            lines = []
            for line in iter(process.stdout.readline, ""):
                lines.append(line)
                if match := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line):
                    yield match[0]
                    break
            else:
                pytest.fail("".join(lines))
        finally:
            process.terminate()


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def serve():
    """serve(folder, *arguments): a context with the opening link of `clearhead open`."""
    return served


@pytest.fixture(scope="session")
def shipped_link(tmp_path_factory):
    """The opening link of a server that shows the shipped checkpoint."""
    with served(tmp_path_factory.mktemp("empty")) as link:
        yield link
