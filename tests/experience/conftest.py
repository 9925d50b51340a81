"""What a replay computes, it computes with compiled code and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ludus.experience import native


@pytest.fixture(scope="module", params=["compiled", "python"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replays and sum trees with native.c, then with what stands in for it."""
    if request.param == "compiled" and native.LIBRARY is None:
        pytest.skip("native.c was not compiled: there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "LIBRARY", None)
        yield
