"""What no engine of these settings can ever do: refused when it is asked for."""

from __future__ import annotations

from tutti.batching.request import Request
from tutti.batching.settings import Settings
from tutti.errors import InputError


def check_request(request: Request, settings: Settings) -> None:
    """Refuse a request that has no prompt, or more tokens than context or pages hold."""
    total = len(request.prompt) + request.most_new
    if not request.prompt:
        raise InputError(f"request {request.id}: the prompt is empty; give at least one token")
    if request.most_new < 0 or request.samples < 1:
        raise InputError(
            f"request {request.id}: {request.most_new} new tokens of {request.samples} samples"
        )
    if total > settings.max_length:
        raise InputError(
            f"request {request.id}: a prompt of {len(request.prompt)} tokens and "
            f"{request.most_new} new ones are {total}; the context holds {settings.max_length}"
        )
    pages = settings.most_pages(total)
    if pages > settings.usable_pages:
        raise InputError(
            f"request {request.id}: its {total} tokens need {pages} pages of "
            f"{settings.page_size}; there are {settings.usable_pages} in all: ask for fewer "
            "tokens, or give the engine more memory"
        )
