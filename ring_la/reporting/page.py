"""The page around the sections."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from ..errors import ArgumentError
from . import benchmark, training

EXPECTED = (
    "a training run's folder or a benchmark's JSON (metrics.jsonl, the demo's losses.json, `ring-la bench`'s rows)"
)
STYLE = """
:root { --ink: #1c2430; --paper: #fff; --soft: #667; --line: #d9dde3; --lane: #f1f3f6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --paper: #14181e; --soft: #9aa3b0; --line: #333b46; --lane: #1d232b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
.grid { stroke: var(--line); stroke-width: .6 } .axis { stroke: var(--soft); stroke-width: .8 }
.lane { fill: var(--lane) }
table { border-collapse: collapse; margin: .5rem 0 } th { text-align: left; font-weight: 600 }
th, td { padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line) } td { font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--soft) }
pre { overflow-x: auto; font-size: 12px; background: var(--lane); padding: .8rem }
.legend { margin: .2rem 0 } .legend span { margin-right: 1.2rem }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px }
footer { color: var(--soft); margin-top: 3rem; font-size: 13px }
"""


def write(run: str | Path, out: str | Path | None = None) -> Path:
    """Write a report.

    Args:
        run: a folder of a training run or of the demo, or a benchmark's JSON file or a folder with one.
        out: the HTML file; None: report.html beside what is read.

    Returns:
        The file.

    Raises:
        ArgumentError: nothing there can be reported, or `out` cannot be written.
    """
    run = Path(run)
    if not run.exists():
        raise ArgumentError("RUN", EXPECTED, f"{run}, which is not there")
    folder = run if run.is_dir() else run.parent
    if run.is_dir() and (run / "metrics.jsonl").exists():
        sections = training.sections(run)
    elif run.is_dir() and (run / "losses.json").exists():
        sections = training.demo_sections(run)
    else:
        file = run if run.is_file() else next(iter(sorted(run.glob("*.json"))), None)
        if file is None:
            raise ArgumentError("RUN", EXPECTED, f"{run}, a folder with neither")
        sections = benchmark.sections(_read(file), str(file))
    to = folder / "report.html" if out is None else Path(out)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(page(run.resolve().name, sections), encoding="utf-8")
    except OSError as error:
        raise ArgumentError("out", "a file that can be written", f"{to} ({error})") from None
    return to


def page(title: str, sections: list[tuple[str, str]]) -> str:
    """The HTML of sections."""
    from .. import __version__

    body = "".join(f"<section><h2>{escape(head)}</h2>{inside}</section>" for head, inside in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}<footer>ring-la report, ring_la {__version__}</footer></body></html>\n"
    )


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ArgumentError("RUN", EXPECTED, f"{file} ({e})") from None
