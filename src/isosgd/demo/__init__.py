"""The demo, ``python -m isosgd.demo``: posteriors that are known exactly, and two real data sets."""
