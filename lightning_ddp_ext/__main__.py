"""Run the command ``lightning-ddp-ext`` as ``python -m lightning_ddp_ext``."""

from lightning_ddp_ext.cli import main

if __name__ == "__main__":
    main()
