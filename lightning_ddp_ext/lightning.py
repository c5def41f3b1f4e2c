"""The strategy and callbacks for ``lightning``.

``lightning_ddp_ext`` itself may have those for ``pytorch_lightning``.
"""

from lightning_ddp_ext.integration.public import *  # noqa: F403
