"""A model class of mini-swe-agent that speaks to nano without litellm, so that an agent starts in 0.6 s of
processor time and not in 3. Copy it into the agent's folder; the recipe is in README.md."""

import os
from typing import Any

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class NanoModel(OpenRouterTextbasedModel):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
