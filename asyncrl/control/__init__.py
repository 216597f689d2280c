"""RUN LIFE: lifecycle, supervisor, launcher, API."""
