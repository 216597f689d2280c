"""STAGE 1: engines, admission, rollout."""
