"""STAGE 3: the bounded, staleness-tracked buffer and its ledger."""
