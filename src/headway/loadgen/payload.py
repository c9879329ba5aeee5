"""A request as the bytes that are sent, with the fields that the endpoint understands."""

from __future__ import annotations

from headway.core import Capabilities, Request
from headway.transport import Target


def payload(
    request: Request, model: str, target: Target, can: Capabilities, api_key: str | None = None
) -> bytes:
    """Serialize a request for `/v1/completions`, with the fields that the endpoint understands."""
    body: dict[str, object] = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if can.ids_out:
        body["return_token_ids"] = True
    if request.ignore_eos and can.ignore_eos != "none":
        body["ignore_eos"] = True
    if can.usage_in_stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return target.post("/v1/completions", body, headers)
