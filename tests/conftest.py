"""What all tests share. Hypothesis's deadline is off: two workers on two cores make it measure the machine."""

from hypothesis import settings

settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")
