"""`python -m lab`: the same as `engram-lab`."""

import sys

from lab.cli import main

sys.exit(main())
