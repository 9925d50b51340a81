"""Run replay tests with native.c and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ludus.experience import native


@pytest.fixture(scope="module", params=["compiled", "python"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests of a module with native.c, then with numpy and torch."""
    if request.param == "compiled" and native.LIBRARY is None:
        pytest.skip("native.c was not compiled: there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "LIBRARY", None)
        yield
