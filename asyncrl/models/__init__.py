"""Models over packed rows: attention, log-probabilities, and how a folder is opened for them. Shared by learner, inference and engine."""
