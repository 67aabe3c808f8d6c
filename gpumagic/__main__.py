"""Run the command line for ``python -m gpumagic``."""

import sys

from gpumagic.cli import main

sys.exit(main())
