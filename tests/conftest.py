"""How hard the property tests look: `pytest --hypothesis-profile=thorough` takes ten times the examples."""

from hypothesis import settings

# No deadline for one example: the machine may be busy, and speed is not what these tests are about.
settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
