"""A recorded run, once more: its decisions without torch, its learner's steps with it."""
