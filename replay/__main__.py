"""`python -m opgrip.replay` is the command `opreplay`, as launchers such as torchrun start it."""

import sys

from opgrip.replay.command.opreplay import main

if __name__ == "__main__":
    sys.exit(main())
