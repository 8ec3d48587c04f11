"""The three pictures of docs/users/benchmarks.md, drawn from benchmarks/results.

python -m benchmarks.pictures    # writes docs/images/measured-*.svg
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
IMAGES = ROOT / "docs/images"

OURS, PEER, BOUND, OTHER = "#3b6ea5", "#c9823a", "#b8bec6", "#8a6fae"
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
LEFT, RIGHT, BAR = 190, 90, 17  # pixels: names, figures behind a bar, and a bar's height


def bars(title: str, legend: list[tuple[str, str]], groups: list[tuple[str, list[tuple[float, str, str]]]]) -> str:
    """Groups of horizontal bars; each bar is a length of its own unit, a colour, and what stands behind it."""
    width, scale = 760, max(size for _, rows in groups for size, *_ in rows)
    parts, y = [], 84
    parts.append(f'<text x="20" y="32" font-size="16" font-weight="600" fill="#222">{title}</text>')
    x = 20
    for name, colour in legend:
        parts.append(f'<rect x="{x}" y="47" width="13" height="13" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="58" fill="#444">{name}</text>')
        x += 19 + 7.4 * len(name) + 18
    for name, rows in groups:
        middle = y + BAR * len(rows) / 2 + 5
        parts.append(f'<text x="{LEFT - 12}" y="{middle:.0f}" text-anchor="end" fill="#222">{name}</text>')
        for size, colour, said in rows:
            long = size / scale * (width - LEFT - RIGHT)
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 2}" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + long + 6:.1f}" y="{y + 12}" font-size="12" fill="#444">{said}</text>')
            y += BAR
        y += 11
    top = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 8}" font-family="{FONT}" font-size="13" '
    background = f'<rect width="{width}" height="{y + 8}" rx="10" fill="#ffffff"/>'
    return "\n".join([top + f'role="img" aria-label="{title}">', background, *parts, "</svg>\n"])


def read(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["rows"]


def operators() -> str:
    """Forward and backward of an operator on one GPU beside fla-core's, 32,768 tokens."""
    groups = []
    for row in read("ops-h200.json"):
        if row["shape"] == "1x32768x32x128" and "fla" in row["sides"] and row["op"] != "short_conv":
            ours, peer = (row["sides"][side]["fwd_bwd"] for side in ("ring_la", "fla"))
            groups.append((row["op"], [(ours, OURS, f"{ours:.2f} ms"), (peer, PEER, f"{peer:.2f} ms")]))
    title = "Forward and backward on one H200: 32,768 tokens, 32 heads of 128, bf16"
    return bars(title, [("ring_la", OURS), ("fla-core 0.6.0", PEER)], groups)


def scaling() -> str:
    """One sequence of 262,144 tokens on one, two and four GPUs, as CUDA graphs."""
    rows = [r for r in read("scaling-h200x4.json") if r["mode"] == "graph" and r["what"] != "forward"]
    colours, groups = {1: BOUND, 2: OTHER, 4: OURS}, []
    for op in dict.fromkeys(row["op"] for row in rows):
        found = {row["P"]: row["ms"] for row in rows if row["op"] == op and row["T"] * row["P"] == 262144}
        alone = found[1]["local"]
        times = {P: ms["local" if P == 1 else "auto"] for P, ms in sorted(found.items())}
        said = [f"{ms:.2f} ms" + (f", {alone / ms:.2f} ×" if P > 1 else "") for P, ms in times.items()]
        groups.append((op, [(ms, colours[P], words) for (P, ms), words in zip(times.items(), said)]))
    title = "One sequence of 262,144 tokens, forward and backward, on 1, 2 and 4 H200"
    return bars(title, [("1 GPU", BOUND), ("2 GPUs", OTHER), ("4 GPUs", OURS)], groups)


def attention() -> str:
    """Causal attention on four GPUs beside yunchang and ring-flash-attn, forward and backward."""
    found = {}
    for row in read("attention-turns-h200x4.json"):
        found.setdefault(row["T"], []).append((row["total"], row["name"].removeprefix("ring_la ")))
    groups = []
    for tokens, rows in sorted(found.items(), reverse=True):
        fastest = min(ms for ms, _ in rows)
        for ms, name in rows:
            colour = OURS if name.startswith("ring, copied") else PEER
            label = name.replace("ring, copied", "ring_la") + f", {tokens // 1024}k"
            groups.append((label, [(ms / fastest, colour, f"{ms:.1f} ms")]))
    title = "Causal attention on 4 H200, forward and backward, over the fastest at 16k and 4k tokens a rank"
    return bars(title, [("ring_la by kernel", OURS), ("peers, on FlashAttention-2", PEER)], groups)


PICTURES = {"operators": operators, "scaling": scaling, "attention": attention}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"measured-{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
