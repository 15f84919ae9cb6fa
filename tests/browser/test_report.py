"""Reports in a real browser: they render, fetch nothing, and fit a phone and a sheet of paper.

Needs playwright and a Chromium for it to drive (Debian: ``apt-get install chromium``; or name one by
``ISOSGD_CHROMIUM``).
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from isosgd import Posterior, Target, likelihoods, priors
from isosgd.report import Subject, write_report

SCREENS = {"desktop": (1200, 900), "phone": (390, 844)}
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest('.scroll') && !e.closest('svg');
}).map(e => e.outerHTML.slice(0, 80))"""
CLIPPED = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const room = svg.getBoundingClientRect();
  if (!room.width) return [];
  return [...svg.querySelectorAll('text')].filter(t => {
    const box = t.getBoundingClientRect();
    return box.left < room.left - 1 || box.right > room.right + 1 || box.top < room.top - 1
      || box.bottom > room.bottom + 1;
  }).map(t => t.textContent);
})"""


LEAST_TEXT = """() => Math.min(...[...document.querySelectorAll('svg text')].map(t => {
  const m = t.getScreenCTM();
  return m ? parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b) : 99;
}))"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it drives the browser")
    found = os.environ.get("ISOSGD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium: install it (Debian: apt-get install chromium) or set ISOSGD_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # No sandbox: in a container the browser runs as root, and it sees nothing but our own page.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def _regression(generator):
    """A line whose posterior is normal, and independent draws of it."""
    noise, x = 0.3, torch.rand(300, 1, generator=generator) * 4 - 2
    y = 1.5 * x - 0.5 + noise * torch.randn(300, 1, generator=generator)
    target = Target.from_module(torch.nn.Linear(1, 1), likelihoods.Gaussian(noise), priors.Normal(10.0))
    design = torch.cat([x, torch.ones_like(x)], 1)[:200]
    covariance = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(2) / 100)
    mean = covariance @ design.T @ y[:200] / noise**2
    draws = mean.T + torch.randn(4, 100, 2, generator=generator) @ torch.linalg.cholesky(covariance).T
    group = {"name": "a.module.with.a.very.long.name", "rate": 3e-4, "noise_share": 0.3, "predicted_bias": 0.01}
    info = {"method": "isgd", "temperature": 1.0, "num_data": 200, "warmup": [{"groups": [group]}] * 4}
    posterior = Posterior(target, {"weight": draws[..., :1, None], "bias": draws[..., 1:]}, info)
    subject = Subject(
        "A_title_without_any_place_to_break_" * 3,
        target="height of the plant",
        inputs=["age"],
        notes=["a note " * 40],
        commands=["isosgd fit a/very/long/path/" + "x" * 120 + ".csv --target height"],
    )
    return posterior, {"data": (x[:200], y[:200]), "heldout": (x[200:], y[200:]), "subject": subject}


def _classification(generator):
    x = torch.randn(400, 3, generator=generator)
    target = Target.from_module(torch.nn.Linear(3, 3, bias=False), "categorical")
    posterior = Posterior(target, {"weight": 4 * torch.eye(3) + torch.randn(2, 40, 3, 3, generator=generator)}, {})
    subject = Subject("Which is largest?", classes=["first", "second", "the third of them"])
    rows = {"data": (x[:200], x[:200].argmax(1)), "heldout": (x[200:], x[200:].argmax(1))}
    return posterior, {**rows, "outside": torch.zeros(50, 3), "subject": subject}


@pytest.fixture(scope="module", params=[_regression, _classification], ids=["regression", "classification"])
def report(request, tmp_path_factory):
    posterior, options = request.param(torch.Generator().manual_seed(0))
    return write_report(posterior, tmp_path_factory.mktemp("report") / "report.html", **options)


def opened(browser, path: Path, screen="desktop", **more):
    """The page as it is shown, with what it complained of and asked for."""
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, **more)
    page, complaints, asked = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page, complaints, asked


@pytest.mark.parametrize("screen", SCREENS)
def test_it_renders_and_fits_with_every_drawing_and_all_its_words(browser, report, screen):
    page, complaints, asked = opened(browser, report, screen)
    assert complaints == [] and asked == [report.as_uri()]
    assert page.locator("h1").is_visible() and page.locator(".verdict").is_visible()
    assert page.locator(".verdict").bounding_box()["y"] < SCREENS[screen][1], "the verdict is seen without scrolling"
    assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen][0]
    assert page.evaluate(OVERFLOWING) == []
    figures = page.locator("figure").all()
    assert len(figures) >= 10
    for figure in figures:
        shown = [box for svg in figure.locator("svg").all() if (box := svg.bounding_box()) is not None]
        assert len(shown) == 1 and shown[0]["width"] > 300 and shown[0]["height"] > 80
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(LEAST_TEXT) >= 8, "words in drawings can be read"


def test_it_needs_no_javascript(browser, report):
    page, complaints, _ = opened(browser, report, java_script_enabled=False)
    assert page.locator("figure svg").first.is_visible() and complaints == []


def test_dark_and_light_differ_and_it_prints_in_black_on_white(browser, report, tmp_path):
    page, _, _ = opened(browser, report, color_scheme="light")
    style = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    light = page.evaluate(style)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(style) != light
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 690, "height": 1000})  # A4 without its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 690, "nothing is cut off, tables included"
    page.pdf(path=str(tmp_path / "report.pdf"), format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
