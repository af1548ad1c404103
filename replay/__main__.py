"""The command `opreplay` as `python -m opgrip.replay`, which launchers such as torchrun start."""

import sys

from opgrip.replay.command.opreplay import main

if __name__ == "__main__":
    sys.exit(main())
