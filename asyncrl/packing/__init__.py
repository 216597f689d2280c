"""STAGE 4: whole samples into token-budgeted rows."""
