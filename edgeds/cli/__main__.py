"""``python -m edgeds.cli``, the same as ``python -m edgeds``."""

import sys

from edgeds.cli.main import main

sys.exit(main())
