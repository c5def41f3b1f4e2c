"""The modules of the package, for tests that read them."""

from pathlib import Path

import lightning_ddp_ext

ROOT = Path(lightning_ddp_ext.__file__).parent
PACKAGE = ROOT.name
FILES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
}
