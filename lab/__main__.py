"""`python -m lab`: the same as `engram-lab`."""

import sys

from engram_lab.lab.command.main import main

sys.exit(main())
