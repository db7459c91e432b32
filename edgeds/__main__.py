"""``python -m edgeds``."""

import sys

from edgeds.cli.main import main

sys.exit(main())
