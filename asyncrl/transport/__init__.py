"""HOW IT TRAVELS: the channel contract and its implementations."""
