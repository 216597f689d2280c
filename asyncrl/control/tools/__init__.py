"""Command-line tools that examine a machine, a config or a ledger without a run."""
