"""The ledger: the durable state of a run's groups, in one SQLite file."""
