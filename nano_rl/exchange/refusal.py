"""What a format cannot take (`nano_shared.refusal`), as the task formats import it."""

from __future__ import annotations

from nano_shared.refusal import Refusal, Refused, first_problem

__all__ = ["Refusal", "Refused", "first_problem"]
