"""``python -m ahp``: the same as the console script."""

from ahp.cli.main import program

program()
