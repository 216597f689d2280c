"""The daemon: many runs on one machine, over HTTP. It owns runs, and trains nothing itself."""
