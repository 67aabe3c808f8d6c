"""The package's folder, as tracebacks show it, also where the checkout has the package's name."""

from pathlib import Path

import gpumagic

OURS = f"{Path(*Path(gpumagic.__file__).parts[-3:-1])}/"
