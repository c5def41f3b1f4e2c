"""What MkDocs calls while it builds the site: it adds the pictures that are drawn."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import charts
import ring


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Draw the pictures; they are written to the site alone."""
    files.append(File.generated(config, "images/ring.svg", content=ring.draw(4)))
    for name in charts.CHARTS:
        files.append(File.generated(config, f"images/{name}.svg", content=charts.draw(name)))
    return files
