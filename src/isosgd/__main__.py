"""``python -m isosgd``."""

import sys

from isosgd.cli import main

sys.exit(main())
