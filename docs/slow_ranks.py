"""Draw how each of four ranks spends a step, of which one is slow.

python docs/slow_ranks.py > docs/images/slow-ranks.svg
"""

from __future__ import annotations

import sys

from ring import rectangle, text

COLOURS = {"data": "#f08c00", "forward": "#3f51b5", "backward": "#7986cb", "waiting": "#ced4da"}
STEPS = [(9, 12, 18, 34), (9, 12, 18, 34), (8, 12, 19, 34), (41, 12, 18, 2)]  # ms, by rank
LEFT, SCALE, HEIGHT = 80, 7, 30


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 180" font-family="sans-serif">'
    ]
    parts.append(rectangle(0, 0, 640, 180, fill="#ffffff"))
    for index, (part, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * index
        parts.append(rectangle(x, 10, 14, 14, fill=colour))
        parts.append(text(x + 20, 22, part, "#212529"))
    for rank, times in enumerate(STEPS):
        x, y = LEFT, 40 + HEIGHT * rank
        parts.append(text(20, y + 15, f"rank {rank}", "#212529"))
        for time, colour in zip(times, COLOURS.values(), strict=True):
            parts.append(rectangle(x, y, SCALE * time, 20, fill=colour))
            x += SCALE * time
    caption = (
        f"a step of {sum(STEPS[0])} ms on every rank: rank 3 needs {STEPS[3][0]} ms for its batch"
    )
    return "\n".join([*parts, text(LEFT, 174, caption, "#495057"), "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(draw())
