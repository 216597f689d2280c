"""How the bytes of a version travel: one file a medium."""
