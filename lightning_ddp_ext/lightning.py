"""The strategy and callbacks for ``lightning``, also where ``lightning_ddp_ext`` has those of ``pytorch_lightning``."""

from lightning_ddp_ext.integration.public import *  # noqa: F403
