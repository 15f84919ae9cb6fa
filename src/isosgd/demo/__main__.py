"""``python -m isosgd.demo``. What runs it has a module of its own: spawned processes do not find what is of `__main__`."""

import sys

from isosgd.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
