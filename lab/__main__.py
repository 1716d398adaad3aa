"""`python -m lab`: the same as `engram-lab`."""

import sys

from engram_lab.lab.cli import main

sys.exit(main())
