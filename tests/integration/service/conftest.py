"""A page of a browser, for the tests that have one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.integration.service.browser")


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    """A page of a browser of its own; see browser.py."""
    from tests.integration.service.browser import new_page

    async with new_page() as one:
        yield one
