"""Sweeps: a grid of ordinary runs over seeds, its results, their statistics, a report and a picture."""
