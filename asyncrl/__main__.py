"""`python -m asyncrl`: the same as the `asyncrl` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working directory: a file of the user's there must not stand in for a library's module

from asyncrl.cli import main

main()
