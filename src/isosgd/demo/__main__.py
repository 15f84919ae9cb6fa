"""``python -m isosgd.demo``: what it does stands in `run`, where spawned processes find it."""

import sys

from isosgd.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
