"""STAGE 2: rewards in worker processes."""
