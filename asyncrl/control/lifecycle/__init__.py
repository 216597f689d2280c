"""Which phase a run is in and which processes must run: a pure state machine and the supervisor that carries it out."""
