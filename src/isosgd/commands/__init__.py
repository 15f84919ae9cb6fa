"""The commands of the command line, one file each.

A command is a module with ``add(parser)``, which gives its own parser a description, an example (``epilog``) and its
arguments, and ``run(args) -> int``, which does the work and returns the exit code. The first line of the module's
docstring is what ``isosgd --help`` says about it. Heavy imports wait until ``run``. What a user can mend is raised as
``ValueError``, ``TypeError`` or ``OSError``; `isosgd.cli` prints it and ends with 1.
"""
