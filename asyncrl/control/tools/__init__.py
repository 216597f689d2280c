"""Tools of the command line: looking at a machine, a config or a ledger without running anything."""
