"""The parts of `isosgd.audit`: a description of a loop, what it samples, its breaches, and runs that measure it."""
