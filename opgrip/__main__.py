"""`python -m opgrip` is the command `opgrip`."""

import sys

from opgrip.tools.opgrip import main

sys.exit(main())
