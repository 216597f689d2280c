"""STAGE 2b: reference and reward models, forward only, beside the rules."""
