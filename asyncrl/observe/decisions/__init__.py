"""Every event that enters the pure machines of a run: where it enters, and how it is recorded."""
