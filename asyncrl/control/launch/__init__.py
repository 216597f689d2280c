"""How the processes of a run start and end: on this machine or on a Ray cluster."""
