"""A run of any size, simulated: the production state machines under a virtual clock."""
