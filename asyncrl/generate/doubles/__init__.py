"""Engines without a model: scripted tokens for tests and load, given answers for offline data."""
