"""Device memory as a resource: what lies where, what a phase needs, and how it gets there."""
