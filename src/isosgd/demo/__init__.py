"""The demo: posteriors that are known exactly, and two real data sets. ``python -m isosgd.demo`` runs it."""
