"""Weight sync: versions from the learner to the generators, whole or as deltas, by exchangeable media."""
