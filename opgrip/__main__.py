"""Entry point of `python -m opgrip`, which is the command `opgrip`."""

import sys

from opgrip.tools.opgrip import main

sys.exit(main())
