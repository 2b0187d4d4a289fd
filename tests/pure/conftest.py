"""How many cases a property is tried on: some by default, many with HYPOTHESIS_PROFILE=thorough; no case is timed."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
