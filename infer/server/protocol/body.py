"""What all bodies of requests have in common: which fields they may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from idlm.config.suggest import did_you_mean
from idlm.infer.server.errors import FieldError

Text = Annotated[str, Field(min_length=1)]
Unicode = Annotated[str, Field(min_length=0)]
"""Any text that can be encoded: pydantic lets lone surrogates pass in a `str` without a constraint."""
IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "prediction"),
        # Of messages, their parts and their calls: what other servers and clients keep there.
        *("annotations", "cache_control", "provider_specific_fields", "index"),
    )
)
"""Fields that do not say what the answer shall be, of a request or of its parts; docs/serve.md lists them."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "functions": ([],),
    "verbosity": ("medium",),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    # Routers add these to every chat; whatever the parser finds is separate.
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "include_obfuscation": (False,),
    # Other engines' own values where a client says nothing.
    "bad_words": ([],),
    "logits_processors": ([],),
    "detokenize": (True,),
}
"""Fields that are not supported, and their values that ask for nothing."""


class Body(BaseModel):
    """A JSON object; fields without a declaration stay in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")

    def check_extra(self, location: str = "") -> None:
        """Raise ApiError for a field that is unknown or not supported; null counts as absent."""
        for name, value in (self.model_extra or {}).items():
            param = f"{location}{name}"
            if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
                continue
            if name in NEUTRAL:
                allowed = " or ".join(map(repr, NEUTRAL[name]))
                rule = f"leave it out{f', or give {allowed}' if allowed else ''}"
                raise FieldError(param, f"is not supported; {rule}", code="unsupported_parameter")
            near = did_you_mean(name, type(self).model_fields)
            raise FieldError(param, f"unknown field{near}", code="unknown_parameter")


def is_json(value: Any) -> bool:
    """Whether JSON has no lone surrogates or infinite numbers, and is not nested too deeply to be written."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True
