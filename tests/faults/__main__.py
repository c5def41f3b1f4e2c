"""Many injections, one after the other: ``python -m tests.faults [--seed N] [--count N]``; see ``make soak``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from tests.faults.plan import HOOKS, KINDS, Injection, draw
from tests.faults.references import References
from tests.faults.run import inject
from tests.harness.network import network, why_unavailable


def main() -> int:
    """Do them all, whatever is wrong with one of them; 1 if anything was."""
    options = _parse()
    # A shell's background ignores Ctrl-C, and the ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        references = References(Path(directory))
        for seed in range(options.seed, options.seed + options.count):
            plan = draw(seed)
            wrong = _one(plan, Path(directory), references)
            done[plan.kind, plan.stage] += 1
            failed[plan.kind, plan.stage] += bool(wrong)
    _print_table(done, failed)
    return 1 if failed.total() else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first injection")
    parser.add_argument("--count", type=int, default=1)
    return parser.parse_args()


def _one(plan: Injection, parent: Path, references: References) -> list[str]:
    """Do one, and print how it went."""
    reason = why_unavailable() if plan.launch == "on two hosts" else None
    if reason is not None:
        print(f"skipped  {plan}: {reason}", flush=True)
        return []
    began = time.monotonic()
    directory = parent / f"seed-{plan.seed}"
    directory.mkdir()
    with network("host-a", "host-b") if plan.launch == "on two hosts" else nullcontext() as hosts:
        wrong = inject(plan, directory, references, hosts)
    print(f"{'FAILED' if wrong else 'passed'}  {time.monotonic() - began:5.1f} s  {plan}", flush=True)
    if wrong:
        print(*wrong, f"again: make soak SEED={plan.seed} COUNT=1", sep="\n", flush=True)
    return wrong


def _print_table(done: Counter[tuple[str, str]], failed: Counter[tuple[str, str]]) -> None:
    print("\n" + "".join(f"{title:>12}" for title in ("", *HOOKS)))
    for kind in KINDS:
        cells = (_cell(done[kind, stage], failed[kind, stage]) for stage in HOOKS)
        print("".join(f"{cell:>12}" for cell in (kind, *cells)))
    print(f"\n{done.total()} injections, {failed.total()} failed")


def _cell(done: int, failed: int) -> str:
    return f"{done} ({failed} !)" if failed else str(done or "-")


if __name__ == "__main__":
    sys.exit(main())
