"""Device memory as a resource: where components are, what a phase needs, and how components are moved."""
