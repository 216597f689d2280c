"""Runs model-written Python in a sandbox, and judges it outside of that sandbox."""
