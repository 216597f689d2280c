"""`python -m asyncrl`: the same as the `asyncrl` command."""

from asyncrl.cli import main

main()
