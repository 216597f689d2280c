"""The ledger: what a run has promised to keep, in one SQLite file."""
