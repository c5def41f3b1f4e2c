"""Draw an all-reduce as a ring: whose numbers each chunk on each rank holds, after each step.

    python docs/ring.py > docs/images/ring.svg

The picture comes from following the algorithm of `examples/ring_all_reduce.py`, so the two agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

State = list[list[set[int]]]  # [rank][chunk]: the ranks whose numbers are in that sum

COLOURS = ("#4c6ef5", "#f08c00", "#2f9e44", "#c2255c")
CELL, GAP, LEFT, TOP = 30, 22, 58, 44


def states(world_size: int) -> Iterator[tuple[str, State]]:
    """Yield a title and the state before the first step and after each one."""
    state: State = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    yield "start", state
    for step in range(world_size - 1):
        state = passed_on(state, first=-step, adds=True)
        yield f"add {step + 1}", state
    for step in range(world_size - 1):
        state = passed_on(state, first=1 - step, adds=False)
        yield f"copy {step + 1}", state


def passed_on(state: State, *, first: int, adds: bool) -> State:
    """Return the state after each rank has sent chunk `rank + first` to the next rank."""
    world_size = len(state)
    after = [[set(chunk) for chunk in chunks] for chunks in state]
    for rank in range(world_size):
        receiver, chunk = (rank + 1) % world_size, (rank + first) % world_size
        after[receiver][chunk] = state[rank][chunk] | (state[receiver][chunk] if adds else set())
    return after


def draw(world_size: int) -> str:
    """Return the picture as SVG: adding above copying, with a column a step and a row a rank."""
    block_width, block_height = world_size * CELL + GAP, TOP + world_size * (CELL + 8)
    width, height = LEFT + world_size * block_width, 2 * block_height + 8
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    before: State | None = None
    for number, (title, state) in enumerate(states(world_size)):
        left, top = (
            LEFT + number % world_size * block_width,
            TOP + number // world_size * block_height,
        )
        if left == LEFT:
            parts += names(world_size, top)
        parts.append(text(left, top - 12, title, "#333"))
        parts += cells(left, top, state, before)
        before = state
    return "\n".join([*parts, "</svg>", ""])


def names(world_size: int, above: int) -> Iterator[str]:
    """Name each row by its rank, in the rank's colour."""
    for rank in range(world_size):
        yield text(4, above + rank * (CELL + 8) + 20, f"rank {rank}", COLOURS[rank])


def cells(left: int, above: int, state: State, before: State | None) -> Iterator[str]:
    """Draw all chunks of all ranks at one moment; what has just arrived has a dark frame."""
    for rank, chunks in enumerate(state):
        top = above + rank * (CELL + 8)
        for number, chunk in enumerate(chunks):
            x = left + number * CELL
            is_new = before is not None and before[rank][number] != chunk
            for contributor in chunk:
                stripe = (CELL - 2) / len(state)
                yield rectangle(
                    x + contributor * stripe, top, stripe, CELL, fill=COLOURS[contributor]
                )
            frame = 'stroke="#111" stroke-width="3"' if is_new else 'stroke="#999"'
            yield (
                f'<rect x="{x}" y="{top}" width="{CELL - 2}" height="{CELL}" fill="none" {frame}/>'
            )


def rectangle(x: float, y: float, width: float, height: float, *, fill: str) -> str:
    """Return a rectangle without a frame."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width - 0.5:g}" height="{height:g}" fill="{fill}"/>'


def text(x: float, y: float, words: str, fill: str) -> str:
    """Return a line of text that begins at a point."""
    return f'<text x="{x:g}" y="{y:g}" font-size="14" fill="{fill}">{words}</text>'


if __name__ == "__main__":
    sys.stdout.write(draw(4))
