"""Public import path of `slime.rollout.agents.openai_endpoint`."""

from slime.rollout.agents.openai_endpoint import (
    RecordingEndpoint,
    record_agent,
)

__all__ = ["RecordingEndpoint", "record_agent"]
