"""Many injections, one after the other: ``python -m tests.faults [--seed N] [--count N]``; see ``make soak``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.faults.plan import Injection, draw
from tests.faults.run import References, inject, references_in
from tests.harness.network import network, why_unavailable


def main() -> int:
    """Do them all, whatever is wrong with one of them; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first injection")
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    # A shell's background ignores Ctrl-C, and the ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        references = references_in(Path(directory))
        for plan in map(draw, range(options.seed, options.seed + options.count)):
            failed += bool(_one(plan, Path(directory), references))
    print(f"\n{options.count} injections, {failed} failed")
    return 1 if failed else 0


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


if __name__ == "__main__":
    sys.exit(main())
