"""Asking other models on a tool's behalf: the run's own endpoint, or one that a tool's settings name."""

from __future__ import annotations

from rollout.config import RunConfig
from tools.services import Answer, AuxiliaryError, Question, Settings


class AuxiliaryModels:
    """The models the tools of one worker may ask."""

    def __init__(self, config: RunConfig, api_key: str, settings: Settings) -> None:
        self._config = config
        self._api_key = api_key
        self._settings = settings

    async def ask(self, question: Question) -> Answer:
        """Return the answer. Raises AuxiliaryError."""
        raise AuxiliaryError(f"{question.model or self._config.model} cannot be asked")
