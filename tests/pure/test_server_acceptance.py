"""The warning about drafts that are never right."""

from __future__ import annotations

import logging

import pytest

from glint.server.acceptance import MIN_REQUESTS, AcceptanceWatch


def observe(watch: AcceptanceWatch, requests: int, drafts: int, accepted: int) -> None:
    """Count the same request several times."""
    for _ in range(requests):
        watch.observe(drafts, accepted)


def test_nothing_right_over_many_requests_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch = AcceptanceWatch()
    observe(watch, MIN_REQUESTS - 1, 100, 0)
    assert not caplog.records
    observe(watch, 1, 100, 0)
    assert "0 of 1600 drafts of the last 16 requests were right" in caplog.text
    observe(watch, 10 * MIN_REQUESTS, 100, 0)
    assert len(caplog.records) == 1
    observe(watch, MIN_REQUESTS, 100, 60)
    assert "960 of 1600 drafts were right again" in caplog.records[-1].getMessage()
    observe(watch, MIN_REQUESTS, 100, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.parametrize(("drafts", "accepted"), [(100, 2), (3, 0), (0, 0)])
def test_some_right_or_few_drafts_say_nothing(caplog: pytest.LogCaptureFixture, drafts: int, accepted: int) -> None:
    observe(AcceptanceWatch(), 3 * MIN_REQUESTS, drafts, accepted)
    assert not caplog.records
