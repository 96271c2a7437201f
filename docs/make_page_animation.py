"""Records the animation of the README from the real page: python docs/make_page_animation.py

It starts `clearhead open`, lets the page tell its story in headless Chromium (a 3 is drawn, closed to an 8, and one
patch is hidden), and writes a screenshot of every moment to docs/figures/page.webp. The clock of the page is driven by
this script, so that the speed of the machine does not matter. It needs Playwright and Chromium.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parent / "figures" / "page.webp"
SIZE = {"width": 1400, "height": 790}
WIDTH = 1000
"""width of the animation, in pixels"""
FRAME = 80
"""milliseconds between two screenshots of something that moves"""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def main() -> None:
    command = [sys.executable, "-m", "clearhead", "open", "--no-browser"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        try:
            address = read_address(server)
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            page = browser.new_page(viewport=SIZE, device_scale_factor=1)
            page.clock.install(time=0)
            page.clock.pause_at(1000)  # from now on, time passes only in run_for
            page.goto(address)
            frames = record(page)
            browser.close()
        finally:
            server.terminate()
    images, durations = merge_repeated(frames)
    images[0].save(
        OUT,
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
        quality=80,
        method=6,
        minimize_size=True,
    )
    print(f"{OUT}: {len(images)} frames, {sum(durations) / 1000:.1f} s, {OUT.stat().st_size / 1000:.0f} kB")


def read_address(server: subprocess.Popen) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.search(r"http://\S+", line):
            return match[0]
    raise SystemExit("clearhead open has printed no address")


def record(page: Page) -> list[tuple[Image.Image, int]]:
    """Screenshots of the story, each with the time for which it is shown, in milliseconds."""
    frames = []

    def film(milliseconds: int, until: str | None = None) -> None:
        for _ in range(0, milliseconds, FRAME):
            page.clock.run_for(FRAME)
            page.wait_for_timeout(50)  # in real time: the worker computes
            frames.append((screenshot(page), FRAME))
            if until is not None and page.locator(f"text={until}").is_visible():
                break

    def hold(milliseconds: int) -> None:
        page.clock.run_for(400)
        page.wait_for_timeout(600)
        frames.append((screenshot(page), milliseconds))

    page.wait_for_selector("[data-part=story]")
    film(6000, until="Close the left side")
    hold(1500)
    page.get_by_role("button", name="Show me").click()
    film(6000, until="Now hide that patch")
    hold(2000)
    page.get_by_role("button", name="Hide it").click()
    film(320)
    hold(4000)
    return frames


def screenshot(page: Page) -> Image.Image:
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)


def merge_repeated(frames: list[tuple[Image.Image, int]]) -> tuple[list[Image.Image], list[int]]:
    """Consecutive equal screenshots become one, which is shown for longer."""
    images, durations = [], []
    for image, duration in frames:
        if images and images[-1].tobytes() == image.tobytes():
            durations[-1] += duration
        else:
            images.append(image)
            durations.append(duration)
    return images, durations


if __name__ == "__main__":
    main()
