"""Watches the share of drafts that are right, and says so when it falls to nothing."""

import logging

MIN_REQUESTS = 16
MIN_DRAFT_TOKENS = 200
LEAST_SHARE = 0.01

log = logging.getLogger(__name__)


class AcceptanceWatch:
    """Looks at the drafts of 16 requests or more at a time, 200 at least. Warns once, and again after a recovery."""

    def __init__(self) -> None:
        self._has_warned = False
        self._begin()

    def observe(self, draft_tokens: int, accepted_tokens: int) -> None:
        """Count the drafts of a request; one without drafts changes nothing."""
        if not draft_tokens:
            return
        self._num_requests += 1
        self._draft_tokens += draft_tokens
        self._accepted_tokens += accepted_tokens
        if self._num_requests < MIN_REQUESTS or self._draft_tokens < MIN_DRAFT_TOKENS:
            return
        is_low = self._accepted_tokens < LEAST_SHARE * self._draft_tokens
        if is_low and not self._has_warned:
            log.warning(
                "speculation: %d of %d drafts of the last %d requests were right; answers are not affected, but the "
                "MTP layer does not fit the model: check the checkpoint, or start with --num-speculative-tokens 0",
                self._accepted_tokens,
                self._draft_tokens,
                self._num_requests,
            )
        elif self._has_warned and not is_low:
            log.info("speculation: %d of %d drafts were right again", self._accepted_tokens, self._draft_tokens)
        self._has_warned = is_low
        self._begin()

    def _begin(self) -> None:
        self._num_requests = self._draft_tokens = self._accepted_tokens = 0
