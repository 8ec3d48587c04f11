"""One HTML file that shows a run: pictures as SVG, no script, nothing fetched.

write("runs/hybrid", "report.html")        a run of examples/train_hybrid.py, with its profile where it has one
write("runs/demo", "report.html")          the losses of examples/train_demo.py
write("bench_scan.json", "report.html")    what a benchmark wrote
"""

from .page import write

__all__ = ["write"]
