"""Settings of the clients under test: none of them looks for another server, a key of the user or the network."""

from __future__ import annotations

import os

import pytest

if "GLINT_CLIENTS_URL" not in os.environ:
    raise pytest.UsageError("tests/clients needs its server and environments: run scripts/clients.sh")

os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
    os.environ.pop(name, None)
