"""Reports as a browser shows them, on a phone and on a desk: nothing is wider than the screen, no text lies on another,
and nothing is asked of a network.
"""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from can_train.cli.main import main
from can_train.runs.recording import MemoryLimits, StepLog, StepRecord, steps_path, write_predictions
from can_train.task import Predictions
from fakes.finished_runs import Shelf

WANTED = os.environ.get("CAN_TRAIN_CHROMIUM") == "1"
"""Read before each test is kept from the settings of who runs it."""

WIDTHS = {"phone": 390, "desk": 1280}
TIMEOUT_S = 300

MEASURE = """
function used(page, view) {
  const plot = [...page.querySelectorAll('figure')].find(one => one.textContent.includes('Memory of each step'))
    .querySelector('svg'), tip = page.querySelector('.tip'), box = plot.getBoundingClientRect();
  const send = (type, share) => plot.dispatchEvent(
    new view.PointerEvent(type, {clientX: box.left + share * box.width, clientY: box.top + 9, pointerId: 1}));
  const ticks = () => [...plot.querySelectorAll('.ticks text')].map(one => one.textContent);
  const parts = () => plot.querySelector('svg[viewBox]').getAttribute('viewBox');
  const button = plot.parentElement.querySelector('button'), whole = [ticks(), parts()];
  plot.setPointerCapture = () => {};
  send('pointermove', 0.5);
  const shown = [...tip.children].map(one => one.textContent), place = tip.getBoundingClientRect();
  const is_inside = place.left >= 0 && place.right <= page.documentElement.clientWidth;
  send('pointerdown', 0.25); send('pointermove', 0.5); send('pointerup', 0.5);
  const zoomed = [ticks(), parts(), button.hidden];
  button.click();
  return {shown, is_inside, zoomed, restored: JSON.stringify([ticks(), parts()]) === JSON.stringify(whole),
    is_hidden: tip.hidden};
}
function measured(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, inside = page.documentElement.clientWidth;
  const texts = [...page.querySelectorAll('svg text')].filter(one => one.textContent.trim());
  const boxes = texts.map(one => [one.textContent, one.ownerSVGElement, one.getBoundingClientRect()]);
  const besides = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 2;
  const apart = (a, b) => besides(a, b) || besides(b, a);
  const overlapping = [];
  boxes.forEach(([text, svg, box], at) => boxes.slice(at + 1).forEach(([other, its, second]) => {
    if (svg === its && !apart(box, second)) overlapping.push([text, other]);
  }));
  const wide = [...page.querySelectorAll('body *')].filter(one => one.getBoundingClientRect().right > inside + 1
    && !one.closest('.scroll') && !one.closest('svg')).map(one => one.outerHTML.slice(0, 80));
  const plots = [...page.querySelectorAll('figure > svg')].map(one => one.getBoundingClientRect());
  return {
    scroll: page.documentElement.scrollWidth, inside: inside,
    figures: plots.length, narrowest: Math.min(...plots.map(box => box.width)),
    outside: boxes.filter(([, , box]) => box.left < -1 || box.right > inside + 1).map(([text]) => text),
    overlapping: overlapping, wide: wide,
    smallest: Math.min(...texts.map(one => parseFloat(view.getComputedStyle(one).fontSize))),
    requests: view.performance.getEntriesByType('resource').map(one => one.name),
    used: used(page, view),
    background: view.getComputedStyle(page.body).backgroundColor,
  };
}
window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.id] = measured(frame);
  document.getElementById('found').textContent = JSON.stringify(found);
};
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """The path of Chromium; the tests are skipped where there is none, but not where it is wanted."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        assert not WANTED, "Chromium is not installed, though CAN_TRAIN_CHROMIUM=1"
        pytest.skip("Chromium is not installed")
    return found


def opened(chromium: str, file: Path, home: Path) -> tuple[str, str]:
    """Returns a page as it is once it has run, and what was said on the console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    profile = f"--user-data-dir={home / 'profile'}"
    command = [chromium, *flags, profile, "--window-size=1400,1000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
                          env={**os.environ, "HOME": str(home)})  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def record(shelf: Shelf, number: int) -> str:
    """Lays down a finished run with names as long as real ones, and returns its id."""
    run = shelf.put(number, shelf.resolved("gat", "normal", sets=(f"training.lr=0.{number}",)))
    mib = 1 << 20
    one = StepRecord(step=1, loss=0.5, allocated_bytes=900 * mib, reserved_bytes=1000 * mib, micro_batches=12,
                     micro_batch_size=4)  # fmt: skip
    log = StepLog(steps_path(run.path, 0), 123_456)
    log.limit(MemoryLimits(from_step=1, device="sim-2gib", capacity_bytes=2000 * mib, safe_bytes=1200 * mib,
                           predicted_bytes=(880 * mib, 990 * mib)))  # fmt: skip
    for step in range(1, 123_457, 97):
        log.add(replace(one, step=step, loss=1 / step, ooms_rescued=int(step == 98)))
    log.flush()
    run.metrics_path.write_text(json.dumps({"step": 123_456, "epoch": 1, "validation_loss": 0.25}) + "\n")
    drawn = np.random.default_rng(number)
    positive = drawn.random(2000) < 0.3
    score = drawn.normal(size=2000) + positive
    scored = Predictions(score=score, positive=positive, flagged=score > 1, time_s=np.arange(2000.0) * 11,
                         words=("window", "attack", "benign"))  # fmt: skip
    names = ("test_02_unknown_vehicle_known_attack", "test_04_unknown_vehicle_unknown_attack", "w" * 80)
    write_predictions(run.predictions_path, dict.fromkeys(names, scored))
    return run.run_id


@pytest.fixture(scope="module")
def measured(chromium: str) -> dict[str, Any]:
    """What Chromium measured of each report at each width; it starts once for all of them."""
    with TemporaryDirectory(prefix="reports-") as name:
        shelf = Shelf(Path(name))
        runs = [record(shelf, number) for number in (1, 2, 3)]
        frames = []
        for report, chosen in {"one": runs[:1], "three": runs}.items():
            path = shelf.folder / f"{report}.html"
            assert main(("report", *chosen, "--output", str(path), *shelf.flags)) == 0
            source = html.escape(path.read_text(), quote=True)
            for screen, width in WIDTHS.items():
                style = f"width:{width}px;height:900px;border:0"
                frames.append(f'<iframe id="{report} {screen}" style="{style}" srcdoc="{source}"></iframe>')
        harness = shelf.folder / "harness.html"
        harness.write_text(f'<!DOCTYPE html><script>{MEASURE}</script><pre id="found"></pre>{"".join(frames)}')
        page, console = opened(chromium, harness, shelf.folder)
        assert console == ""
        found = re.search(r'<pre id="found">(.+?)</pre>', page)
        assert found is not None
        return dict(json.loads(html.unescape(found[1])))


pytestmark = [pytest.mark.slow, pytest.mark.chromium]
SCREENS = [f"{report} {screen}" for report in ("one", "three") for screen in WIDTHS]


@pytest.mark.parametrize("screen", SCREENS)
def test_a_report_fits_the_screen(measured: dict[str, Any], screen: str) -> None:
    found = measured[screen]
    assert found["inside"] == WIDTHS[screen.split()[1]]
    assert found["wide"] == []
    assert found["outside"] == []
    assert found["scroll"] <= found["inside"]
    assert found["figures"] >= 12
    assert found["narrowest"] >= 200
    assert found["smallest"] >= 12


@pytest.mark.parametrize("screen", SCREENS)
def test_no_text_of_a_chart_lies_on_another(measured: dict[str, Any], screen: str) -> None:
    assert measured[screen]["overlapping"] == []


@pytest.mark.parametrize("screen", SCREENS)
def test_values_are_shown_where_the_pointer_is_and_steps_are_zoomed(measured: dict[str, Any], screen: str) -> None:
    used = measured[screen]["used"]
    assert re.fullmatch(r"optimizer step: 6\d,\d{3}", used["shown"][0])
    assert used["is_inside"]
    if screen.startswith("one"):
        assert used["shown"][1:] == [
            "predicted peak: 0.85938 GiB – 0.9668 GiB", "capacity: 1.9531 GiB", "safe limit: 1.1719 GiB",
            "reserved: 0.97656 GiB", "allocated: 0.87891 GiB",
        ]  # fmt: skip
    ticks, view, is_whole = used["zoomed"]
    assert (view, is_whole) == ("500 0 500 1000", False)
    assert ticks[0] == "40,000"
    assert used["restored"]
    assert used["is_hidden"]


def test_a_script_that_got_into_a_report_does_not_run(chromium: str) -> None:
    with TemporaryDirectory(prefix="reports-") as name:
        shelf = Shelf(Path(name))
        path = shelf.folder / "report.html"
        assert main(("report", record(shelf, 1), "--output", str(path), *shelf.flags)) == 0
        whole = path.read_text()
        path.write_text(whole.replace("</main>", "<script>document.title = 'taken'</script></main>"))
        page, console = opened(chromium, path, shelf.folder)
        assert "<title>taken</title>" not in page
        assert "Content Security Policy" in console


@pytest.mark.parametrize("screen", SCREENS)
def test_a_browser_asks_nothing_of_a_network(measured: dict[str, Any], screen: str) -> None:
    assert measured[screen]["requests"] == []
