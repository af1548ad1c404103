"""The command `opreplay` as `python -m opgrip.replay`, for launchers such as torchrun."""

import sys

from opgrip.replay.command.opreplay import main

if __name__ == "__main__":
    sys.exit(main())
