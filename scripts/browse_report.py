"""Open a page of ``kvfold report`` in a headless browser: what it says on the console, how it fits a desk and a phone.

    python scripts/browse_report.py report.html --picture docs/plots/report.png --section source-2

Needs Chromium. Ends with status 1 if the console has a message, a plot has no size or nothing drawn in it, or the page is wider
than the window.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

WIDTHS = (390, 1120)
"""Of a phone and of a desk, in pixels."""
FRAME = """<html><body style="margin:0"><iframe id="page" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre><script>
document.getElementById("page").onload = function () {{
  const page = this.contentDocument, drawn = [...page.querySelectorAll("figure svg")].filter(s => !s.closest(".legend"));
  page.querySelectorAll("details").forEach(d => d.open = true);
  const marks = "circle, path, polyline, rect, line";
  const empty = drawn.filter(s => s.getBoundingClientRect().width < 100 || !s.querySelector(marks));
  document.getElementById("found").textContent =
    "plots=" + drawn.length + " empty=" + empty.length + " tables=" + page.querySelectorAll("table").length +
    " width=" + page.documentElement.scrollWidth + " text=" + getComputedStyle(page.body).fontSize;
}};
</script></body></html>"""


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    sys.exit("browser: Chromium is not installed")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
        ]
        command += [
            "--allow-file-access-from-files",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=20000",
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def look(page: pathlib.Path, width: int) -> list[str]:
    """What is wrong at a width."""
    with tempfile.TemporaryDirectory() as folder:
        frame = pathlib.Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), encoding="utf-8")
        done = run(f"--window-size={max(width, 500)},900", "--dump-dom", frame.as_uri())
    said = re.search(r'<pre id="found">([^<]+)</pre>', done.stdout)
    if said is None:
        return [f"{width} pixels: the page did not load"]
    print(f"{width} pixels: {said[1]}")
    found = dict(pair.split("=") for pair in said[1].split())
    wrong = [f"{width} pixels: console: {line}" for line in done.stderr.splitlines() if ":CONSOLE" in line]
    if int(found["empty"]) or not int(found["plots"]):
        wrong.append(f"{width} pixels: {found['empty']} of {found['plots']} plots are empty")
    if int(found["width"]) > width:
        wrong.append(f"{width} pixels: the page is {found['width']} wide")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path, help="PNG of a section")
    parser.add_argument("--section", default="source-0", help="its anchor in the page")
    parser.add_argument("--height", type=int, default=1260)
    given = parser.parse_args()
    page = given.page.resolve()
    wrong = [line for width in WIDTHS for line in look(page, width)]
    if given.picture is not None:
        with tempfile.TemporaryDirectory() as folder:
            frame, wide = pathlib.Path(folder) / "picture.html", WIDTHS[-1]
            style = f"width:{wide}px;height:{given.height}px;border:0"
            inside = f'<iframe src="{page.as_uri()}#{given.section}" style="{style}"></iframe>'
            frame.write_text(f'<body style="margin:0">{inside}</body>', encoding="utf-8")
            run(f"--window-size={wide},{given.height}", f"--screenshot={given.picture.resolve()}", frame.as_uri())
        print(f"written: {given.picture}")
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
