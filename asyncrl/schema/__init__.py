"""WHAT TRAVELS: frozen, typed, versioned structs and their codec. Imports nothing of asyncrl above it."""
