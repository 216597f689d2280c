"""Model code common to learner, inference and engine: packed attention, log-probabilities, output layer, adapters, folders."""
