"""A run's controller, for what its peers say to it."""

import pytest


@pytest.fixture
async def world(tmp_path):
    """Return a controller that runs, with the processes of its run played by the test; it fails where a loop has raised."""
    from tests.unit.control.test_controller import running

    async with running(tmp_path) as one:
        yield one
