"""Before anything runs: what a run needs and how fast it can be (plan), and what happens in it (simulate)."""
