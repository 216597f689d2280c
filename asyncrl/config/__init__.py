"""WHAT A RUN IS TOLD: frozen structs from TOML."""
