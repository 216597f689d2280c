"""Placement on a shared device: its phases, and the shares of a GPU."""
