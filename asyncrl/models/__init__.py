"""Models alike in learner, inference and engine: packed attention, log-probabilities, output layer, adapters, folders."""
