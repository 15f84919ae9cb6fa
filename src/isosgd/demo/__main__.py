"""``python -m isosgd.demo``; the code is in `run`, where spawned processes find it."""

import sys

from isosgd.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
