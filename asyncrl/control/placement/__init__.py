"""Which process holds a shared device: placement phases, and the shares of a GPU."""
