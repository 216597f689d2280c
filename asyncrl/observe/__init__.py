"""Metrics, alarms, events and spans of a run, the files that hold them, and the displays that show them."""
