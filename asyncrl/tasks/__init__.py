"""PROMPTS: tasks and their held-out splits."""
