"""The strategy and callbacks for ``pytorch_lightning``.

``lightning_ddp_ext`` itself may have those for ``lightning``.

The modules of this package are the files of ``integration``, loaded for the other tree;
see ``trees``.
"""

from pathlib import Path
from typing import TYPE_CHECKING

__path__ = [str(Path(__file__).parent.parent / "integration")]

if TYPE_CHECKING:
    from lightning_ddp_ext.integration.public import *  # noqa: F403
else:
    from lightning_ddp_ext.pytorch_lightning.public import *  # noqa: F403
