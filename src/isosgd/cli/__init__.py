"""The command line."""

from isosgd.cli.main import main

__all__ = ["main"]
