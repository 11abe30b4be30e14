"""`python -m microtome.app` is the command `microtome`."""

from microtome.app.cli import main

main()
