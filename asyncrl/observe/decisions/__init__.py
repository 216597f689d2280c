"""Every event that enters the pure machines of a run: where it enters, how it is recorded, what it says of selection bias."""
