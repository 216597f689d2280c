"""Tools to use before a run: its memory and speed (plan), and a simulation of it (simulate)."""
