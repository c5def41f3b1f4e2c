"""The strategy and callbacks for ``lightning``, even if ``lightning_ddp_ext`` has those
for ``pytorch_lightning``.
"""

from lightning_ddp_ext.integration.public import *  # noqa: F403
